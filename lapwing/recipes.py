"""Recipes for ``train``: how a network is trained while the evidence chooses its regularisation."""

from lapwing.training.recipe import Recipe, classic, online

__all__ = ["Recipe", "classic", "online"]
