"""Decisions from a posterior: scores beside the plain network, conformal sets, abstaining, strange inputs, labels."""
