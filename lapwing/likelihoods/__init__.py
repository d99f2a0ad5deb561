"""Likelihoods: how targets depend on the outputs of a network. ``protocol.py`` has the contract.

``energies.py`` has the objectives of methods that learn by predicting. Predictive distributions are in
``lapwing.predictives``.
"""
