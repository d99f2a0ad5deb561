"""Training in which the evidence chooses the regularisation: recipes, the loop, and its state. No methods or tuners."""
