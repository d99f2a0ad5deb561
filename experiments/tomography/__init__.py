"""Tomography with error bars: an untrained network as a prior over images, made linear at its solution."""
