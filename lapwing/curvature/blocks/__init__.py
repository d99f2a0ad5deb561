"""Structures of the curvature of one block of parameters: Kronecker, eigenvalue-corrected, diagonal and full.

Each stores sums over the data at unit dispersion; ``precision`` adds prior and dispersion and factorises once.
Structures over all weights are one folder up.
"""
