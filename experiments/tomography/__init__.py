"""Tomography with error bars: an untrained network as a prior over images, made linear at its solution."""

from experiments.tomography.command import add_options, command

__all__ = ["add_options", "command"]
