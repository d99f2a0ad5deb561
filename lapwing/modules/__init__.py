"""A fitted posterior as an ``nn.Module``, for evaluation loops and for export."""
