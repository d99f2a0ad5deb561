"""Training in which the evidence chooses the regularisation: recipes, the loop and its state.

The methods and tuners that a recipe names live in ``lapwing.methods`` and ``lapwing.tuners``.
"""
