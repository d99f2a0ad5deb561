"""Values and checks that all layers use: data, beliefs, random numbers, settings, traces. Nothing here runs a network."""
