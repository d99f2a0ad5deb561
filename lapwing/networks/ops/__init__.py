"""Autograd operations: one entry for each in ``table.py``, and the functions that the entries name.

``operation.py`` defines an entry: how rows of samples may pass through an operation and how gradients may be pulled
back. The other files have functions by topic. No graph is walked here.
"""

from lapwing.networks.ops import table  # first: an entry that a user registers must not be replaced by a built-in one
from lapwing.networks.ops.operation import (
    Expanded,
    New,
    Operation,
    Slope,
    View,
    along,
    entries,
    operation,
    register,
    row_wise,
)

__all__ = [
    "Expanded", "New", "Operation", "Slope", "View", "along", "entries", "operation", "register", "row_wise", "table",
]  # fmt: skip
