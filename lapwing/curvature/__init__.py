"""Structures of the curvature H, sums of them, and the sweep over the data that computes them.

Prior and dispersion enter when a curvature is turned into a precision. No method and no posterior lives here.
"""
