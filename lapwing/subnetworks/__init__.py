"""Rules that choose single weights: by their variance, magnitude, gradient, greedily, or at random.

Each returns a selection for the argument ``weights`` of ``fit``. A layer, or all weights with certain names, is a
selection too: ``lw.last_layer`` and ``lw.named(pattern)``.
"""

from lapwing.subnetworks.by_data import by_gradient, by_swag, by_variance
from lapwing.subnetworks.by_model import by_magnitude, random
from lapwing.subnetworks.one_by_one import greedy

__all__ = ["by_variance", "by_swag", "by_magnitude", "by_gradient", "greedy", "random"]
