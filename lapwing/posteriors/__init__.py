"""Posteriors that several methods return, and the contracts of all. A posterior of one method lives with that method."""
