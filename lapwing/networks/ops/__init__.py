"""Autograd operations: one entry for each in ``table.py``, and the functions that the entries name.

``operation.py`` says what an entry holds. ``rows.py`` has the ways in which rows of samples pass through an operation,
``gradients.py`` the ways to pull gradients back; the other files have the functions by topic. No graph is walked here.
"""
