"""SWAG: a Gaussian fitted to the iterates of SGD, and draws of weights from it."""
