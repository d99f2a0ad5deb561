"""FMGP: a sparse Gaussian process around the network's outputs, with a kernel learned from the data.

Its features, kernels, learning and posterior live here. It uses no Jacobian and no curvature.
"""
