"""Hessian-free Laplace: the variance of a prediction, measured as its response to a small push of the loss."""
