"""FMGP: a sparse Gaussian process around the network's outputs, with a kernel learned from the data.

Its kernels and its learning live here. It uses no Jacobian and no curvature.
"""
