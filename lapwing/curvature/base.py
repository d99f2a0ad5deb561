"""The contracts of curvatures and of the precisions that they give, and what all structures share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar, TypeVar

import torch
from torch import Tensor

from lapwing.errors import UnsupportedError
from lapwing.networks.selection import Selection
from lapwing.networks.tangent import LayerJacobians
from lapwing.priors import BoundPrior
from lapwing.runtime.memory import PIECE, chunks
from lapwing.runtime.settings import State

S = TypeVar("S", bound="Curvature")
Q = TypeVar("Q", bound="Precision")


class Precision:
    """Λ = H/φ + A, factorised once."""

    shares_rotation: ClassVar[bool] = False  # whether ``quadratics`` rotates a Jacobian into its basis once for all

    def logdet(self) -> Tensor:
        """Return the log-determinant of Λ."""
        raise NotImplementedError

    def quadratic(self, jacobian: LayerJacobians, full: bool = True) -> Tensor:
        """Return J Λ⁻¹ Jᵀ: (B, S, C, C), or its diagonal (B, S, C)."""
        raise NotImplementedError

    def quadratics(self: Q, precisions: Sequence[Q], jacobian: LayerJacobians) -> list[Tensor]:
        """Return ``quadratic(jacobian)`` of all precisions, which belong to one curvature."""
        return [each.quadratic(jacobian, True) for each in precisions]

    def cross(self, jacobian: LayerJacobians, other: LayerJacobians | None = None) -> Tensor:
        """Return J Λ⁻¹ J'ᵀ between all inputs and outputs of two batches, (B K, B' K'), or of one with itself."""
        raise NotImplementedError

    def sample(self, eps: Tensor) -> Tensor:
        """Return Λ^-½ eps for eps (n, P)."""
        raise NotImplementedError

    def adjoint(self, v: Tensor) -> Tensor:
        """Apply the transpose of ``sample`` to v (n, P)."""
        raise NotImplementedError

    def solve(self, v: Tensor) -> Tensor:
        """Return Λ⁻¹ v for v (n, P): ``sample`` after ``adjoint``."""
        return self.sample(self.adjoint(v)).to(v)

    def variances(self) -> Tensor:
        """Return the diagonal of Λ⁻¹, (P,)."""
        raise NotImplementedError

    def gammas(self, precision: Tensor) -> Tensor:
        """Return γ of every weight, (P,), under prior precisions (P,): one less precision times posterior variance.

        A precision that gives some directions no variance at all counts those as not determined by the data.
        """
        return 1 - precision * self.variances().to(precision)


class Curvature:
    """H at unit dispersion in some structure. If two can be added, the sum is the curvature of both data sets."""

    start: Tensor | None = None  # noise ratios (C,) in whose units a curvature is kept for each output; None otherwise
    preconditions: ClassVar[bool] = False  # whether its precision couples all weights: it preconditions the exact one

    @property
    def findings(self) -> tuple[str, ...]:
        """Remarks on parts that are approximated further than the structure says, in words."""
        return ()

    def precision(self, phi: Tensor, prior: BoundPrior) -> Precision:
        """Return Λ = H/φ + A, factorised."""
        raise NotImplementedError

    def logdet(self, phi: Tensor, prior: BoundPrior) -> Tensor:
        """Return the log-determinant of H/φ + A in the cheapest way that the structure allows."""
        return self.precision(phi, prior).logdet()

    def diagonal(self) -> Tensor:
        """Return the diagonal of H, (P,), no entry below a thousandth of the median of its layer."""
        raise NotImplementedError

    def coupled(self) -> Tensor:
        """Return one for every weight that is coupled with others and zero for the rest, (P,), or one for all.

        No digits cancel in the variance of a weight that is coupled with no other.
        """
        return torch.ones(())

    def refuse_prior(self, phi: Tensor, prior: BoundPrior) -> None:
        """Raise if the precision with this prior does not exist in the structure."""

    def missing_trace(self, phi: Tensor, prior: BoundPrior) -> Tensor | None:
        """Return the share of each weight, (P,), in what ``logdet`` adds for curvature that the structure leaves out.

        None if it adds nothing, and is not a bound.
        """
        return None

    def missing_findings(self, phi: Tensor, prior: BoundPrior, rows: float) -> tuple[str, ...]:
        """Return remarks on the curvature that is left out, for data with this many outputs in total.

        Nothing where the variances hardly change.
        """
        return ()

    def at(self, ratios: Tensor | None) -> Curvature:
        """Return the curvature under these noise ratios (C,), differentiable in them; itself if it has no ``start``."""
        return self

    def __add__(self: S, other: S) -> S:
        raise UnsupportedError(f"curvatures of the class {type(self).__name__} do not add; fit all the data again.")

    def sum_with(self: S, others: Sequence[S], weights: Tensor) -> S:
        """Return the weighted sum of this curvature and the others, differentiable in the weights (1 + others,)."""
        raise UnsupportedError(f"curvatures of the class {type(self).__name__} do not add with weights.")

    def state(self) -> State:
        """Return the curvature as plain data, for a file; the class method ``from_state`` builds it again."""
        raise UnsupportedError(f"the curvature {type(self).__name__} has no file form, a method state().")


def floor_values(values: Tensor) -> Tensor:
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
    return list(order), selection.pick(numbers.repeat_interleave(torch.tensor(selection.sizes)))


def floor_by_layer(values: Tensor, selection: Selection) -> Tensor:
    """Apply ``floor_values`` to each layer by itself: values (P,) in the order of theta, selected weights only."""
    names, numbers = layer_numbers(selection)
    numbers, raised = numbers.to(values.device), values.clone()
    for number in range(len(names)):
        in_layer = numbers == number
        raised[in_layer] = floor_values(values[in_layer])
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
    for rows in chunks(jacobian.batch, 8 * numbers * jacobian.outputs, device):
        yield jacobian.samples(rows)


def cross_products(
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
    pieces = [list(chunks(each.batch, 8 * numbers * each.outputs, device, PIECE / 2)) for each in (one, second)]
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
