"""The inverse problem: tangent model, operator, measurements and prior; the covariances that they imply."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lapwing.core.memory import budget, gathered, runs
from lapwing.core.progress import ProgressBar, is_showing
from lapwing.core.settings import POSITIVE, Rule
from lapwing.errors import UnsupportedError
from lapwing.inverse.observation import Observation
from lapwing.inverse.tangent import Tangent
from lapwing.priors.bound import Prior
from lapwing.priors.given import Isotropic
from lapwing.priors.structured import ClassCovariance, same_classes

PIECES = 0.65  # share of the byte budget for rows of the Jacobian; the rest is for passes, and for products of the rows
PRIOR = Rule(
    "a precision, or an object such as lw.priors.filter_gp()",
    lambda v: not isinstance(v, type) and (isinstance(v, Prior) or POSITIVE.holds(v)),
)


@dataclass(frozen=True, eq=False)
class InverseProblem:
    """Measurements y = A (f + J (θ - w̃)) + noise with the prior θ ~ N(mean, Σ); everything but the noise."""

    network: Tangent
    observation: Observation
    prior: ClassCovariance
    residual: Tensor  # y - A f(x), (dy,), float64
    theta: Tensor  # the trained weights w̃ (P,), float64
    prior_residual: Tensor  # y - A h(mean) = residual + A J (w̃ - mean), (dy,), float64

    @classmethod
    def of(cls, network: Tangent, observation: Observation, prior: ClassCovariance, y: Tensor) -> InverseProblem:
        """Return the problem of measurements y (dy,) in float64."""
        residual = y - observation.forward(network.f.double()[None])[0]
        theta = network.theta().double()
        return cls(network, observation, prior, residual, theta, residual).with_prior_residual()

    def with_prior_residual(self) -> InverseProblem:
        """Return the problem with y - A h(mean) for the mean of its prior, at the cost of a product with J."""
        network = self.network
        change = network.forward((self.theta - self.prior.mean)[None]).double()
        return replace(self, prior_residual=self.residual + self.observation.forward(change)[0])

    @property
    def evidence_unit(self) -> int:
        """The number that tuners divide the log evidence by: weights or measurements, whichever are fewer."""
        return min(self.network.selection.size, self.observation.rows)

    def with_prior(self, given: ClassCovariance | Prior | float) -> InverseProblem:
        """Return the problem with another prior of the same structure, bound to the weights or as users give it."""
        prior: Any = given if hasattr(given, "selection") else bound_prior(given, self.network)
        if not same_classes(prior, self.prior):
            raise UnsupportedError(
                "the prior has other blocks than that of the fit; expected the same blocks with other values. Fit "
                "again with lw.inverse.fit(prior=...)."
            )
        return replace(self, prior=prior).with_prior_residual()

    def with_precisions(self, values: Tensor) -> InverseProblem:
        """Return the problem with other hyperparameters of the same prior, in the shape of ``prior.values``."""
        return replace(self, prior=replace(self.prior, values=values))  # type: ignore[type-var]

    def image_kernel(self, v: Tensor) -> Tensor:
        """Return J Σ Jᵀ v (K, dx) for rows v (K, dx), in the dtype of the network."""
        network, size = self.network, self.network.selection.size
        rows = v.to(network.output)
        with torch.no_grad():
            parts = (
                network.forward(self.prior.multiply(network.back(rows[chunk])))
                for chunk in runs(len(v), 3 * size * rows.element_size(), network.device)
            )
            return gathered(parts, len(v)) if len(v) else rows

    def kernel(self, u: Tensor) -> Tensor:
        """Return A J Σ Jᵀ Aᵀ u (K, dy) for rows u (K, dy), in the dtype of the network."""
        return self.observation.forward(self.image_kernel(self.observation.back(u.to(self.network.output))))

    def back(self, u: Tensor) -> Tensor:
        """Return Jᵀ Aᵀ u (K, P) for rows u (K, dy), in the dtype of the network."""
        return self.network.back(self.observation.back(u.to(self.network.output)))

    def rows(self, observation: Observation, label: str) -> Iterator[tuple[str, Tensor]]:
        """Yield the rows of A J (dy, m) piece by piece: names of parameters, each with some or all of its filters.

        Pieces are computed in groups that fit the byte budget, with one backward pass for each row and group. What
        was yielded is freed before the next piece comes.
        """
        network, n = self.network, observation.rows
        groups = list(self._groups(n))
        for number, group in enumerate(groups, 1):
            names = tuple(dict.fromkeys(name for name, _ in group))
            pull = network.pullback(names)
            counts = {name: _filters(network.parameters[name]) for name in names}
            sizes = {name: network.parameters[name].numel() // counts[name] for name in names}
            pieces = [network.f.new_empty(n, sizes[name] * (part.stop - part.start)) for name, part in group]
            chunks = list(network.chunks(n, names))
            of = f" {number}/{len(groups)}" if len(groups) > 1 else ""
            for chunk in ProgressBar(chunks, f"{label}{of}", is_showing()):
                grads = pull(observation.basis(chunk, network.f))
                for piece, (name, part) in zip(pieces, group, strict=True):
                    rows = grads[name].reshape(len(piece[chunk]), counts[name], sizes[name])
                    piece[chunk] = rows[:, part].flatten(1)
                del grads
            del pull
            for name, _ in group:
                yield name, pieces.pop(0)

    def _groups(self, n: int) -> Iterator[list[tuple[str, slice]]]:
        """Yield groups of parameters, or slices of them, of which n rows fit the byte budget."""
        network = self.network
        room = int(PIECES * budget(network.device)) // (n * network.output.element_size())
        group: list[tuple[str, slice]] = []
        taken = 0
        for name, parameter in network.parameters.items():
            count = _filters(parameter)
            each = parameter.numel() // count
            step = max(1, min(count, room // each))
            for start in range(0, count, step):
                part = slice(start, min(count, start + step))
                size = each * (part.stop - part.start)
                if group and taken + size > room:
                    yield group
                    group, taken = [], 0
                group.append((name, part))
                taken += size
        yield group


def _filters(parameter: Tensor) -> int:
    """Return the number of slices along the first dimension."""
    return parameter.shape[0] if parameter.ndim else 1


def bound_prior(given: Any, tangent: Tangent) -> ClassCovariance:
    """Return the prior of the selected weights; raise unless its covariance has a few classes."""
    PRIOR.check("prior", given)
    given = given if isinstance(given, Prior) else Isotropic(given)
    if given.needs_groups or given.needs_curvature:
        raise UnsupportedError(
            f"the prior {type(given).__name__} takes groups or a scale from the data of lw.fit; expected filter_gp(), "
            "isotropic(), per_layer() or grouped()."
        )
    bound = given.structured(tangent.selection, tangent.f)
    _ = bound.parts  # raises if there are too many classes
    return bound
