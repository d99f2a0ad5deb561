"""VaLLA and ELLA: methods that describe the posterior by a few inducing points or landmarks.

The points, their placement and the curvatures in their span live here. Kernels of priors are in ``lapwing.priors``.
"""
