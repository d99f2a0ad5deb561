"""Pictures of predictions and results, each a function that returns a Matplotlib axis: ``lw.plots``."""
