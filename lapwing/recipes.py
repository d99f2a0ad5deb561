"""Recipes for ``train``: how a network is trained, and whether the evidence chooses its regularisation meanwhile.

>>> online(epochs=20).optimiser, classic().optimiser
('adam', 'lbfgs')
"""

from lapwing.training.recipe import Recipe, classic, fixed, online

__all__ = ["Recipe", "classic", "fixed", "online"]
