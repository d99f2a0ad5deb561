"""The full curvature matrix, summed over a pass."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from lapwing.curvature.full import FullCurvature, single_map
from lapwing.linalg.gram import Gram
from lapwing.networks.budget import temporary
from lapwing.networks.jacobians import LayerJacobians
from lapwing.networks.linear_jacobian import LinearJacobian
from lapwing.networks.network import Network


def full_curvature(sweep: Iterable[LayerJacobians], network: Network) -> FullCurvature:
    """Return Σ JᵀJ over a pass, summed in float64, so that a prior far below the largest eigenvalue is not lost.

    A single linear map uses the outer products of its inputs instead. Memory: 8 P² bytes and the Jacobian of one chunk;
    nearly twice that for a single linear map, whose pairs are put in order at the end.
    """
    size = network.selection.size
    gram: Gram | None = None
    pairs = _PairSums()
    for jacobians in sweep:
        part = single_map(jacobians)
        if part is not None:
            pairs.add(part)
            continue
        gram = Gram(size, torch.float64, network.device) if gram is None else gram
        rows = jacobians.whole().flatten(0, 1)
        step = max(1, temporary(network.device) // (8 * size))
        for start in range(0, len(rows), step):
            gram.add(rows[start : start + step])
    if not pairs.used:
        gram = Gram(size, torch.float64, network.device) if gram is None else gram
        return FullCurvature(gram.value(), network.selection)
    total = _spread_pairs(pairs.value(), network)
    return FullCurvature(total if gram is None else total.add_(gram.value()), network.selection)


class _PairSums:
    """The sum Σ_b (Σ_k g_ki g_kj) a aᵀ for i <= j, (pairs, d_in, d_in), float64: a K-th of the work of JᵀJ.

    Rows are collected until there are enough of them for an efficient product. The result is kept in strips of inputs;
    each strip holds only the columns from its own start on, since the rest follows by symmetry.
    """

    ROWS = 512
    STRIP = 32

    def __init__(self) -> None:
        self._inputs: list[Tensor] = []
        self._weights: list[Tensor] = []
        self._strips: list[Tensor] = []  # (pairs, strip, d_in - start)
        self.used = False

    def add(self, part: LinearJacobian) -> None:
        a, g = part.a[0, :, 0].double(), part.g[0, :, :, 0].transpose(0, 1).double()  # (B, d_in), (B, K, d_out)
        first, second = torch.triu_indices(g.shape[-1], g.shape[-1], device=a.device)
        self._inputs.append(a)
        self._weights.append(torch.bmm(g.mT, g)[:, first, second])
        self.used = True
        if sum(len(x) for x in self._inputs) >= self.ROWS:
            self._flush()

    def _flush(self) -> None:
        if not self._inputs:
            return
        a, w = torch.cat(self._inputs), torch.cat(self._weights).mT.contiguous()
        self._inputs, self._weights = [], []
        size = a.shape[1]
        if not self._strips:
            starts = range(0, size, self.STRIP)
            self._strips = [a.new_zeros(len(w), min(self.STRIP, size - start), size - start) for start in starts]
        columns = a.mT.contiguous()
        for k, strip in enumerate(self._strips):
            start = k * self.STRIP
            _add_weighted(strip, columns[start : start + self.STRIP], w, a[:, start:])

    def value(self) -> Tensor:
        self._flush()
        pairs, _, size = self._strips[0].shape
        whole = self._strips[0].new_empty(pairs, size, size)
        for k, strip in enumerate(self._strips):
            start = k * self.STRIP
            whole[:, start : start + self.STRIP, start:] = strip
            whole[:, start:, start : start + self.STRIP] = strip.mT
        return whole


def _add_weighted(total: Tensor, left: Tensor, weights: Tensor, right: Tensor) -> None:
    """Add Σ_b weights_pb left_ib right_bj to ``total`` (pairs, d_left, d_right)."""
    rows, (width, last) = left.shape[1], total.shape[1:]
    step = max(1, temporary(left.device) // (left.element_size() * max(1, rows * width)))
    for start in range(0, len(weights), step):
        tall = weights[start : start + step].unsqueeze(1) * left  # (p, d_left, B)
        total[start : start + step].view(-1, last).addmm_(tall.view(-1, rows), right)


def _spread_pairs(pairs: Tensor, network: Network) -> Tensor:
    """Return the matrix (P, P) in the order of theta from its blocks for i <= j."""
    (block,) = network.layout
    size = network.selection.size
    order = block.arrange(network.selection.split(torch.arange(size, dtype=torch.float64)))[0].long().to(pairs.device)
    first, second = torch.triu_indices(block.d_out, block.d_out, device=pairs.device)
    matrix = pairs.new_empty(size, size)
    matrix[order[first].unsqueeze(-1), order[second].unsqueeze(-2)] = pairs
    matrix[order[second].unsqueeze(-1), order[first].unsqueeze(-2)] = pairs
    return matrix
