"""Structures of the curvature H, sums of them, and the sweep over the data that computes them.

Methods choose a structure; priors and dispersions enter when a curvature is made a precision. No method and no
posterior lives here.
"""
