"""Training in which the evidence chooses the regularisation."""
