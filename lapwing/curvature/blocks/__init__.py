"""Structures of the curvature of one block of parameters: Kronecker, eigenvalue-corrected, diagonal and full.

Each stores sums over the data at unit dispersion. Prior and dispersion enter in ``precision``, which factorises once.
"""
