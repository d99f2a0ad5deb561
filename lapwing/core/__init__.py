"""Values and checks that all layers use: data, beliefs, random numbers, settings, traces, states for files.

No network, likelihood, prior or method lives here.
"""
