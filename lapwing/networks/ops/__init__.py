"""Autograd operations: one entry for each in ``table.py``, and the functions that the entries name.

``entry.py`` defines an entry. ``rows.py`` describes how rows of samples pass through an operation, ``gradients.py``
how gradients are pulled back; the other files have functions by topic. No graph is walked here.
"""

from lapwing.networks.ops import table  # first: an entry that a user registers must not be replaced by a built-in one
from lapwing.networks.ops.entry import Operation, entries, operation, register
from lapwing.networks.ops.gradients import Expanded, New, Slope, View
from lapwing.networks.ops.rows import along, row_wise

__all__ = [
    "Expanded", "New", "Operation", "Slope", "View", "along", "entries", "operation", "register", "row_wise", "table",
]  # fmt: skip
