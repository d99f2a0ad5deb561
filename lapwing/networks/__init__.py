"""Networks: outputs, layer-wise Jacobians, and the selection of weights. No likelihood, prior or curvature lives here.

``Network.build`` examines a model with one batch. ``graph.py`` walks its autograd graph with the table of operations in
``ops.py``; ``tangent.py`` computes the Jacobians of a batch from its graph, block by block.
"""
