"""Methods: one file for each way to compute a posterior, their contract in ``base.py``, what they take in ``cost.py``.

Methods do not import each other. Parts that several methods use live in ``curvature``, ``tangent`` and ``posteriors``;
``hfl_response.py`` and ``inducing_points.py`` are second files of HFL, and of ELLA and VaLLA.
"""
