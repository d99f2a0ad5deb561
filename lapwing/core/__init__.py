"""Values and checks that all layers use: data, beliefs, random numbers, progress, traces, states.

No network, likelihood, prior or method lives here.
"""
