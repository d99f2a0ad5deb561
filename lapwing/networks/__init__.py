"""Networks: outputs, layer-wise Jacobians, and the selection of weights. No likelihood, prior or curvature lives here.

``Network.build`` runs a model once. ``graph.py`` walks its autograd graph and asks ``ops/`` about each operation;
``tangent.py`` turns the graph of a batch into Jacobians, block by block.
"""
