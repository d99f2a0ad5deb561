"""Recipes for ``train``: how a network is trained while the evidence chooses its regularisation.

>>> online(epochs=20).optimiser, classic().optimiser
('adam', 'lbfgs')
"""

from lapwing.training.recipe import Recipe, classic, online

__all__ = ["Recipe", "classic", "online"]
