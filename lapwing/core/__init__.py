"""Values and checks that all layers use: data, beliefs, random numbers, settings, traces. No networks or methods."""
