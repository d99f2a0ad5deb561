"""One self-contained page about a posterior: is it calibrated, is it better than the plain network, where it is not."""
