"""How many weights the data decide."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from lapwing.curvature.protocols import layer_numbers
from lapwing.problem import Problem

NEAR = 0.8  # share of the weights from which a network may be too small


@dataclass(frozen=True, eq=False)
class EffectiveParameters:
    r"""γ = tr(Λ⁻¹ H/φ), between zero and the number of weights P: how many directions the data determine.

    ``layers`` maps layer names to γ and ``sizes`` to numbers of weights; ``by_precision`` is γ of the weights that
    share a precision of the prior. Print it to read it.
    """

    total: float
    weights: int
    layers: dict[str, float]
    sizes: dict[str, int]
    by_precision: Tensor

    @property
    def findings(self) -> tuple[str, ...]:
        """Advice on the size of the network, if there is any to give (MacKay 1992)."""
        advice = []
        if self.total > NEAR * self.weights:
            advice.append(
                f"gamma is {self.total:.1f} of {self.weights} weights: nearly all are decided by the data, so the "
                "network may be too small. Try a larger one and compare the evidence."
            )
        for name, gamma in self.layers.items():
            if self.sizes[name] > 1 and gamma < 0.01 * self.sizes[name]:
                advice.append(
                    f"layer {name or '(top)'}: gamma is {gamma:.2g} of {self.sizes[name]} weights; the data decide "
                    "almost none of them, and a smaller layer may do."
                )
        return tuple(advice)

    def __str__(self) -> str:
        width = max(len(name) for name in (*self.layers, "layer"))
        lines = [f"{'layer':{width}s} {'weights':>9s} {'gamma':>10s} {'share':>6s}"]
        for name, gamma in self.layers.items():
            size = self.sizes[name]
            lines.append(f"{name:{width}s} {size:9d} {gamma:10.2f} {gamma / size:6.1%}")
        lines.append(f"{'total':{width}s} {self.weights:9d} {self.total:10.2f} {self.total / self.weights:6.1%}")
        return "\n".join([*lines, *self.findings])


@runtime_checkable
class HasGammas(Protocol):
    """A posterior that knows how far the data determine each weight."""

    @property
    def problem(self) -> Problem: ...

    def gammas(self) -> Tensor:
        """Return γ of every weight, (P,)."""
        ...


def effective_parameters(posterior: HasGammas) -> EffectiveParameters:
    """Return γ of a posterior in weight space, in total and by layer.

    Cost: the posterior variance of every weight. Exact for the structure that the method has; an estimate for samples.
    """
    problem = posterior.problem
    selection, prior = problem.network.selection, problem.prior
    with torch.no_grad():
        each = posterior.gammas().to(prior.values)
    names, numbers = layer_numbers(selection)
    numbers = numbers.to(each.device)
    gammas = each.new_zeros(len(names)).index_add(0, numbers, each).tolist()
    sizes = torch.bincount(numbers, minlength=len(names)).tolist()
    return EffectiveParameters(
        float(each.sum()), len(each), dict(zip(names, gammas, strict=True)), dict(zip(names, sizes, strict=True)),
        prior.summed(each),
    )  # fmt: skip
