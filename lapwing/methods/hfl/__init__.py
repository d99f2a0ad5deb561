"""HFL, Hessian-free Laplace: the variance of a prediction, measured as its response to a small push of the loss.

Its objective, Newton and Adam steps, responses and posteriors live here. Linear solvers are in ``lapwing.linalg``.
"""
