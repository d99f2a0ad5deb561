"""What every part of the package uses: data and samples, beliefs about outputs, random draws, settings, progress.

Nothing here knows a network, a likelihood or a method.
"""
