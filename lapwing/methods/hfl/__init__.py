"""HFL, Hessian-free Laplace: the variance of a prediction, measured as its response to a small push of the loss.

Its objective, the Newton and Adam steps and the responses live here. Linear solvers are in ``lapwing.linalg``.
"""
