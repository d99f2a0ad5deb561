"""Predictive distributions of targets y, each computed from a Gaussian belief about the outputs f.

The ``predict`` of a likelihood returns one of them. No network and no posterior is used here.
"""
