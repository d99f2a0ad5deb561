"""Measurements: ratios in one run, with the machine and the versions named."""
