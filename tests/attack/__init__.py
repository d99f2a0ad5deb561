"""Attacks: long tests with many random cases. ``python -m tests.attack NAME`` runs one; ``make attack`` runs all."""
