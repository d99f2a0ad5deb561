"""Fixed-mean Gaussian process: a sparse process around the network's outputs, with a kernel learned from the data."""
