"""Methods: one file or folder for each way to compute a posterior, and their contract in ``base.py``.

Methods do not import each other. Parts that several methods use live in ``curvature``, ``tangent`` and ``posteriors``.
"""
