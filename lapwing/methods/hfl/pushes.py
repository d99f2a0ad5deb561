"""Functions of the weights that are pushed: K of them at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from lapwing.methods.hfl.objective import Objective
from lapwing.methods.hfl.response import Response

Push = Callable[[Tensor], Tensor]  # ∇g_k at every row k of d, (K, P) -> (K, P)
Read = Callable[[Tensor], Tensor]  # a reading at every row of d, (K, P) -> (K, ...); a single row may stand for all
Value = Callable[[Tensor], Tensor]  # g_k as a linear function of reading k, (K, ...) -> (K,)


@dataclass(frozen=True, eq=False)
class Pushes:
    """K functions g_k to push: their gradients, the values that are read after a push, and both before any push."""

    push: Push
    read: Read
    value: Value
    start: Tensor  # d = 0, (K, P)
    slopes: Tensor  # ∇g_k at the start, (K, P)
    reading: Tensor  # at the start, (1, ...) or (K, ...)

    @classmethod
    def of(cls, push: Push, read: Read, start: Tensor, value: Value | None = None) -> Pushes:
        """Evaluate gradients and reading at the start.

        Without ``value`` the reading is the weights themselves, and g_k is taken to first order.
        """
        slopes = push(start)
        linear = lambda reading: (slopes * reading).sum(1)
        return cls(push, read, value or linear, start, slopes, read(start[:1]))

    def bend(self, up: Tensor, down: Tensor, twin: Tensor) -> Tensor:
        """Return |g(up) + g(down) - 2 g(twin)| / |g(up) - g(down)|, (K,); infinite if a push moved nothing."""
        even, odd = self.value(up + down - 2 * twin).abs(), self.value(up - down).abs()
        unmoved = torch.where(self.slopes.any(1), torch.inf, 0.0).to(odd)
        return torch.where(odd == 0, unmoved, even / odd)


def central_difference(up: Tensor, down: Tensor, lam: Tensor) -> Tensor:
    """Return (up - down) / 2λ for readings (K, ...) and strengths (K,)."""
    return (up - down) / (2 * lam).reshape(-1, *[1] * (up.ndim - 1))


class Responds(Protocol):
    """A way to re-optimise the network under pushes: ``Responder`` by Newton steps, ``FineTuner`` by Adam."""

    @property
    def objective(self) -> Objective: ...

    @property
    def tolerance(self) -> float: ...

    @property
    def root(self) -> Tensor | None:
        """L (P, P) with L Lᵀ the Hessian, if it is known."""
        ...

    def respond(
        self, push: Push, read: Read, count: int, strength: float | None = None, value: Value | None = None
    ) -> Response:
        """Return the responses to ``count`` pushes; choose λ for each if ``strength`` is None."""
        ...

    def respond_alike(self, push: Push, count: int, tolerance: float) -> Response:
        """Return how the weights respond to ``count`` pushes of similar size, with λ chosen for all together."""
        ...
