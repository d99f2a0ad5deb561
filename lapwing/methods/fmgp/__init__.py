"""Fixed-mean Gaussian process."""
