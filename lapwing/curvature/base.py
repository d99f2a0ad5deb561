"""The contracts of curvatures and of the precisions that they give, and what all structures share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from lapwing.networks.jacobians import LayerJacobians
from lapwing.networks.selection import Selection
from lapwing.priors.base import BoundPrior
from lapwing.runtime.memory import PIECE, runs
from lapwing.runtime.state import State


class Precision(Protocol):
    """Λ = H/φ + A, factorised once."""

    def logdet(self) -> Tensor:
        """Return the log-determinant of Λ."""
        ...

    def quadratic(self, jacobian: LayerJacobians, full: bool = True) -> Tensor:
        """Return J Λ⁻¹ Jᵀ: (B, S, C, C), or its diagonal (B, S, C)."""
        ...

    def cross(self, jacobian: LayerJacobians, other: LayerJacobians | None = None) -> Tensor:
        """Return J Λ⁻¹ J'ᵀ between all inputs and outputs of two batches, (B K, B' K'), or of one with itself."""
        ...

    def sample(self, eps: Tensor) -> Tensor:
        """Return Λ^-½ eps for eps (n, P)."""
        ...

    def adjoint(self, v: Tensor) -> Tensor:
        """Apply the transpose of ``sample`` to v (n, P)."""
        ...

    def solve(self, v: Tensor) -> Tensor:
        """Return Λ⁻¹ v for v (n, P): ``sample`` after ``adjoint``."""
        ...

    def variances(self) -> Tensor:
        """Return the diagonal of Λ⁻¹, (P,)."""
        ...


class Curvature(Protocol):
    """H at unit dispersion in some structure. If two can be added, the sum is the curvature of both data sets."""

    def precision(self, phi: Tensor, prior: BoundPrior) -> Precision:
        """Return Λ = H/φ + A, factorised."""
        ...

    def logdet(self, phi: Tensor, prior: BoundPrior) -> Tensor:
        """Return the log-determinant of H/φ + A in the cheapest way that the structure allows."""
        ...

    def diagonal(self) -> Tensor:
        """Return the diagonal of H, (P,), no entry below a thousandth of the median of its layer."""
        ...

    def state(self) -> State:
        """Return the curvature as plain data, for a file."""
        ...


@runtime_checkable
class SharesRotation(Protocol):
    """A precision whose costliest step on a Jacobian, the rotation into its basis, serves other precisions too."""

    def quadratics(self, precisions: Sequence[Any], jacobian: LayerJacobians) -> list[Tensor]:
        """Return ``quadratic(jacobian)`` of all precisions, which belong to one curvature."""
        ...


@runtime_checkable
class RefusesPriors(Protocol):
    """A curvature that takes some priors only."""

    def refuse_prior(self, phi: Tensor, prior: BoundPrior) -> None:
        """Raise if the precision with this prior does not exist in the structure."""
        ...


@runtime_checkable
class HoldsDirections(Protocol):
    """A precision that gives some directions no variance at all, so that γ does not follow from variances alone."""

    def decided(self, precision: Tensor) -> Tensor:
        """Return γ of every weight, (P,), under prior precisions (P,)."""
        ...


@runtime_checkable
class BoundsLogdet(Protocol):
    """A curvature whose log-determinant is a bound, with a term for the curvature that it leaves out."""

    def unseen(self, phi: Tensor, prior: BoundPrior) -> Tensor:
        """Return that term for each weight, (P,)."""
        ...


@runtime_checkable
class SaysWhatIsMissing(Protocol):
    """A curvature that can say how much of the exact one it leaves out under a prior, and what that does."""

    def missing_findings(self, phi: Tensor, prior: BoundPrior, rows: float) -> tuple[str, ...]:
        """Return remarks for data with this many outputs in total; nothing where the variances hardly change."""
        ...


@runtime_checkable
class Preconditions(Protocol):
    """A curvature whose precision couples all weights and so is a good preconditioner for the exact one.

    Blocks would spread the eigenvalues, and a subspace would keep all weights outside it fixed.
    """

    @property
    def preconditions(self) -> bool: ...


@runtime_checkable
class HasFindings(Protocol):
    """A curvature that approximates some of its parts further than its structure says."""

    @property
    def findings(self) -> tuple[str, ...]:
        """Remarks on these parts, in words."""
        ...


@runtime_checkable
class HasLoneWeights(Protocol):
    """A curvature that couples some weights with no other, so that no digits cancel in their variances."""

    def coupled(self) -> Tensor:
        """Return one for every weight that is coupled with others and zero for the rest, (P,)."""
        ...


def floored(values: Tensor) -> Tensor:
    """Raise values to at least a thousandth of their median, or of their mean if the median is zero.

    If all values are zero, return ones.
    """
    typical = values.median()
    typical = typical if float(typical) > 0 else values.mean()
    return values.clamp_min(float(1e-3 * typical) or 1.0)


def layer_numbers(selection: Selection) -> tuple[list[str], Tensor]:
    """Return the names of all layers, and for every selected weight the position of its layer among them, (P,)."""
    by_parameter = selection.layer_of()
    order = {name: i for i, name in enumerate(dict.fromkeys(by_parameter))}
    numbers = torch.tensor([order[name] for name in by_parameter])
    return list(order), selection.picked(numbers.repeat_interleave(torch.tensor(selection.sizes)))


def floored_by_layer(values: Tensor, selection: Selection) -> Tensor:
    """Apply ``floored`` to each layer separately: values (P,) in the order of theta, selected weights only."""
    names, numbers = layer_numbers(selection)
    numbers, raised = numbers.to(values.device), values.clone()
    for number in range(len(names)):
        in_layer = numbers == number
        raised[in_layer] = floored(values[in_layer])
    return raised


def weighted_sum(tensors: Sequence[Tensor], weights: Tensor) -> Tensor:
    """Return Σ_c weights_c tensors_c, differentiable in the weights. Memory: one tensor more."""
    weights = weights.to(tensors[0])
    total = weights[0] * tensors[0]
    for weight, tensor in zip(weights[1:], tensors[1:], strict=True):
        total.addcmul_(weight, tensor)
    return total


def in_runs(jacobian: LayerJacobians, numbers: int, device: torch.device) -> Iterator[LayerJacobians]:
    """Yield runs of samples that fit the byte budget, where each row takes so many float64 ``numbers``."""
    for rows in runs(jacobian.batch, 8 * numbers * jacobian.outputs, device):
        yield jacobian.samples(rows)


def crossed(
    rows_of: Callable[[LayerJacobians], Tensor],
    one: LayerJacobians,
    other: LayerJacobians | None,
    numbers: int,
    device: torch.device,
) -> Tensor:
    """Return the products (B K, B' K') between rows (B K, d) that ``rows_of`` computes for samples of two batches.

    A row takes so many float64 ``numbers`` while it is computed; samples are taken in runs that fit the byte budget.
    """
    second, total = one if other is None else other, None
    pieces = [list(runs(each.batch, 8 * numbers * each.outputs, device, PIECE / 2)) for each in (one, second)]
    for here in pieces[0]:
        left = rows_of(one.samples(here))
        if total is None:
            total = left.new_empty(one.batch, one.outputs, second.batch, second.outputs)
        for there in pieces[1]:
            if other is None and there.start < here.start:
                continue
            right = left if other is None and there == here else rows_of(second.samples(there))
            block = (left @ right.mT).reshape(-1, one.outputs, there.stop - there.start, second.outputs)
            total[here, :, there] = block
            if other is None and there != here:
                total[there, :, here] = block.permute(2, 3, 0, 1)
    assert total is not None
    return total.flatten(2).flatten(0, 1)


def row_products(rows: Tensor, full: bool = True) -> Tensor:
    """Return the products of all pairs of rows (..., n, d): (..., n, n), or only their squares (..., n)."""
    return rows @ rows.mT if full else rows.square().sum(-1)
