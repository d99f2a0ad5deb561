"""The methods that the conformance suites try: all registered ones, with the settings that each declares.

``lapwing.methods.base.Conformance`` says what a method declares. A new method needs no line here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from lapwing.methods.base import Conformance, Exactness
from lapwing.registry import METHODS
from tests.tolerances import EXACT, SOLVED


def declaration(name: str) -> Conformance:
    """Return what a registered method declares; nothing, if it has no declaration."""
    declared: Conformance = getattr(METHODS[name], "conformance", Conformance())
    return declared


def exact_entries() -> dict[str, Exactness]:
    """Return every setting at which a method is exact, as "kron" or "kron reduce"."""
    return {f"{name} {entry.name}".strip(): entry for name in METHODS for entry in declaration(name).exact}


def lawful_entries() -> dict[str, Exactness]:
    """Return the exact settings that the laws of exact methods are tried with."""
    return {name: entry for name, entry in exact_entries().items() if not entry.no_laws}


def small_settings(name: str, model: nn.Module) -> dict[str, Any]:
    """Return quick settings of one registered method for this model, as "hfl" and "hfl linearised"."""
    small = declaration(name).small
    variants = {"": METHODS[name]()} if small is None else small(model)
    return {f"{name} {variant}".strip(): method for variant, method in variants.items()}


def small_names() -> list[str]:
    """Return the names of the quick settings of all methods."""
    return [setting for name in METHODS for setting in small_settings(name, nn.Linear(1, 1))]


def small_method(setting: str, model: nn.Module) -> Any:
    """Return the method with the quick settings of this name."""
    return small_settings(setting.split()[0], model)[setting]


def net(outputs: int = 3) -> nn.Module:
    """A network that every method takes: one of them needs a dropout layer."""
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Dropout(0.2), nn.Linear(5, outputs)).double().eval()


def power(entry: Exactness) -> float:
    """Return the tolerance of a comparison, as a power of the rounding unit."""
    return SOLVED if entry.iterative else EXACT


EXACT_ENTRIES, LAWFUL, SMALL = list(exact_entries()), list(lawful_entries()), small_names()
SUITES = {"exact": EXACT_ENTRIES, "laws": LAWFUL, "every method": SMALL}


def skipped(suite: str, name: str) -> str:
    """Return the stated reason why a suite does not try a method; empty if there is none."""
    declared = declaration(name)
    reasons = [declared.never_exact]
    if suite == "laws":
        reasons += [entry.no_laws for entry in declared.exact]
    return "" if suite == "every method" else "; ".join(reason for reason in reasons if reason)
