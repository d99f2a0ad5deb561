"""Hessian-free Laplace: error bars as the response of a prediction to a small push of the loss."""
