"""Predictive distributions of targets y, each from a Gaussian belief about the outputs f.

A likelihood's ``predict`` returns one of them. They know neither networks nor posteriors.
"""
