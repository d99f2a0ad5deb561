"""Experiments with images: convolutional networks, shifted data, and the evidence."""
