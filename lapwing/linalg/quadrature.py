"""Gauss quadrature of an operator's spectrum, seen from given rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from lapwing.linalg.operators import Product, applied

CUT = 1e-12  # a new direction shorter than this, relative to the largest image, is none


@dataclass(frozen=True, eq=False)
class Quadrature:
    """Nodes and weights, one set for each row v (K, P): Σ weight · f(node) ≈ v f(A) vᵀ.

    ``nodes`` and ``weights`` (K, m) are Gauss's; ``low_nodes`` and ``low_weights`` (K, m + 1) are Gauss and Radau's
    with a node at zero, the end of a positive semi-definite spectrum.
    """

    nodes: Tensor
    weights: Tensor
    low_nodes: Tensor
    low_weights: Tensor
    products: int

    def ends(self, function: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        """v f(A) vᵀ from below and from above, (K,) each.

        Ends they are where derivatives of f alternate in sign from a positive first one, as those of log(1 + x/a)
        and of x/(x + a) do.
        """
        return (function(self.low_nodes) * self.low_weights).sum(1), (function(self.nodes) * self.weights).sum(1)


def lanczos_quadrature(product: Product, rows: Tensor, steps: int) -> Quadrature:
    """Lanczos on every row by itself, all rows in one product at each step, with full reorthogonalisation, twice.

    A row whose Krylov space is exhausted goes on as noughts. Memory: steps · K · P in float64.
    Reference: Golub & Meurant 1994.

    >>> a = torch.diag(torch.tensor([1.0, 3.0], dtype=torch.float64))
    >>> found = lanczos_quadrature(lambda v: v @ a, torch.ones(1, 2, dtype=torch.float64), steps=2)
    >>> [round(float(end), 6) for end in found.ends(torch.log1p)]  # log 2 + log 4
    [2.079442, 2.079442]
    """
    rows = rows.double()
    count, size = rows.shape
    steps = min(steps, size)
    lengths = rows.norm(dim=1)
    q = torch.where(lengths[:, None] > 0, rows / lengths[:, None], 0.0)
    basis = rows.new_zeros(count, steps, size)
    small = rows.new_zeros(count, steps + 1, steps + 1)
    scale, step = rows.new_zeros(()), 0
    for step in range(steps):
        basis[:, step] = q
        image = applied(product, q)
        scale = torch.maximum(scale, image.norm(dim=1).max())
        small[:, step, step] = (image * q).sum(1)
        seen = basis[:, : step + 1]
        for _ in range(2):
            image = image - ((seen @ image[:, :, None]).mT @ seen)[:, 0]
        beta = image.norm(dim=1)
        live = beta > CUT * scale
        small[:, step, step + 1] = small[:, step + 1, step] = torch.where(live, beta, 0.0)
        q = torch.where(live[:, None], image / beta[:, None], 0.0)
        if not bool(live.any()):
            break
    return _rules(small[:, : step + 2, : step + 2], lengths.square(), step + 1)


def _rules(small: Tensor, mass: Tensor, products: int) -> Quadrature:
    """Both rules from the tridiagonal matrices (K, m + 1, m + 1), whose last entry is free."""
    nodes, turn = torch.linalg.eigh(small[:, :-1, :-1])
    end = nodes.min().clamp_max(0)
    # The last entry that makes ``end`` an eigenvalue of the longer matrix.
    inverse = (turn[:, -1].square() / (nodes - end).clamp_min(torch.finfo(torch.float64).tiny)).sum(1)
    coupling = small[:, -1, -2].square()
    longer = small.clone()
    longer[:, -1, -1] = end + torch.where(coupling > 0, coupling * inverse, 0.0)
    low_nodes, low_turn = torch.linalg.eigh(longer)
    weights, low_weights = turn[:, 0].square() * mass[:, None], low_turn[:, 0].square() * mass[:, None]
    return Quadrature(nodes, weights, low_nodes, low_weights, products)
