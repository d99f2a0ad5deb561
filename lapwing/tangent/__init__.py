"""The tangent model over a data set: products with its Jacobian and GGN, its loss and gradient.

Jacobians of one batch are in ``lapwing.networks``, solvers in ``lapwing.linalg``.
"""
