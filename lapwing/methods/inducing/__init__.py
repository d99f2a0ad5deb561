"""Inducing points: VaLLA and ELLA."""
