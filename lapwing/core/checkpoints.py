"""Runs of a model without gradient checkpointing, whose parts would be hidden from the autograd graph.

``torch.utils.checkpoint`` drops the activations of a part of the model and computes them again in the backward pass.
Its reentrant form puts one opaque node into the graph for the whole part; the other form recomputes the part whenever
a saved tensor is read. Lapwing reads the graph, and keeps its own activations within the byte budget, so that the part
runs as it is. Outputs and derivatives are the same.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.utils.checkpoint

from lapwing.core.switches import Switch

_here = threading.local()  # ``depth`` of the runs in this thread that take no checkpoints
REENTRANT = "CheckpointFunction"  # names in torch.utils.checkpoint, where its public functions look them up
OTHER = "_checkpoint_without_reentrant_generator"


def _inside() -> bool:
    return getattr(_here, "depth", 0) > 0


class _Reentrant:
    """In place of ``CheckpointFunction``: the part itself in threads that take no checkpoints."""

    def __init__(self, original: Any) -> None:
        self._original = original

    def apply(self, function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
        return function(*args) if _inside() else self._original.apply(function, preserve, *args)


def _other(original: Callable[..., Iterator[None]]) -> Callable[..., Iterator[None]]:
    """Return a generator in place of the one that drops what is saved between its start and its end."""

    def run(*args: Any, **kwargs: Any) -> Iterator[None]:
        if _inside():
            yield
        else:
            yield from original(*args, **kwargs)

    return run


@contextmanager
def _replaced() -> Iterator[None]:
    module = torch.utils.checkpoint
    kinds: dict[str, Callable[[Any], Any]] = {REENTRANT: _Reentrant, OTHER: _other}
    before = {name: getattr(module, name) for name in kinds if hasattr(module, name)}
    for name, original in before.items():
        setattr(module, name, kinds[name](original))
    try:
        yield
    finally:
        for name, original in before.items():
            setattr(module, name, original)


_switch = Switch(_replaced)


@contextmanager
def without_checkpoints() -> Iterator[None]:
    """Run checkpointed parts of models as they are, in this thread; others are not affected."""
    with _switch:
        _here.depth = getattr(_here, "depth", 0) + 1
        try:
            yield
        finally:
            _here.depth -= 1
