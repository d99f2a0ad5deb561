"""Structures of the curvature H, their precisions, and the sweep over the data that computes them.

H is kept at unit dispersion; ``precision`` adds prior and dispersion. No method and no posterior lives here. The
structures of VaLLA and ELLA are in ``lapwing.methods.inducing_points``.
"""
