"""Posteriors that several methods return, and the contracts of all. The posterior of a single method lives with it."""
