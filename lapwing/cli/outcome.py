"""The outcome of a command: text for people, and the same as one JSON object for programs."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import lapwing


@dataclass(frozen=True)
class Outcome:
    """What a command prints: ``text``, or with ``--json`` the ``facts`` as an object."""

    text: str
    facts: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self, command: str) -> str:
        """Return the facts as one JSON object, after the command and the versions. Numbers that JSON lacks are null.

        >>> print(Outcome("", {"nll": float("nan")}).to_json("evaluate").splitlines()[-2])
          "nll": null
        """
        versions = {"lapwing": lapwing.__version__, "torch": str(torch.__version__)}
        return json.dumps(plain({"command": command, "versions": versions, **self.facts}), indent=2, allow_nan=False)


def plain(value: Any) -> Any:
    """Return a value as JSON can hold it: tensors become lists, paths become text, numbers that are not finite None.

    >>> plain({"mean": torch.tensor([1.0, float("inf")]), "out": Path("net.lapwing")})
    {'mean': [1.0, None], 'out': 'net.lapwing'}
    """
    if isinstance(value, Tensor):
        return plain(value.detach().tolist())
    if isinstance(value, Mapping):
        return {str(name): plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    if isinstance(value, Path):
        return str(value)
    return None if isinstance(value, float) and not math.isfinite(value) else value
