"""The contracts of posteriors, those of a general form (Gaussian, samples, members, a point), and effective parameters.

A posterior that only makes sense for one method lives with that method, such as those of HFL, FMGP and SWAG.
"""
