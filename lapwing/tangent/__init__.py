"""The tangent model over a data set: products with its Jacobian and GGN, its loss and gradient."""
