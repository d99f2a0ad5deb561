"""Likelihoods: how targets depend on the outputs of a network.

``protocol.py`` has the contract; every other file is one likelihood, and ``energies.py`` what methods that learn by
predicting need of them. Predictive distributions live in ``lapwing.predictives``.
"""
