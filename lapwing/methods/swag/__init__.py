"""SWAG: a Gaussian fitted to the iterates of SGD. Its descent and its draws of weights live here.

Posteriors made of members, which ``Ensemble`` returns too, are in ``lapwing.posteriors``.
"""
