"""Linear algebra on tensors and callables: solvers, Krylov spaces, designs, quadrature, factorisations.

Nothing here knows networks, likelihoods or priors. Every function is called from another part of the package.
"""
