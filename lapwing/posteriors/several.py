"""A mixture of the posteriors of several networks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lapwing.data.inputs import Inputs
from lapwing.errors import ModelError, UnsupportedError
from lapwing.networks.fingerprint import Fingerprint
from lapwing.networks.network import Network
from lapwing.posteriors.base import ALL, Posterior
from lapwing.posteriors.mixture import Belief, Cell, MixturePosterior
from lapwing.problem import Problem, Statistics
from lapwing.runtime.state import State
from lapwing.runtime.trace import Trace
from lapwing.values.gaussian import FunctionGaussian
from lapwing.values.outputs import Query


@dataclass(frozen=True, eq=False)
class NetworksPosterior(Posterior):
    """Posteriors of several networks with a share each: y ~ Σ share · predictive of each network.

    ``functions`` has the mean and covariance of the mixture. It has no evidence, no weight samples, no Jacobian and no
    GGN: those belong to the weights of one network.
    """

    mixture: MixturePosterior
    networks: tuple[Network, ...]
    fingerprints: tuple[Fingerprint, ...]  # of the networks at the fit
    trace: Trace | None = None  # the steps of the tuners of all networks, one after another

    @classmethod
    def of(cls, posteriors: Sequence[Posterior], shares: Sequence[float]) -> NetworksPosterior:
        """Return the mixture; raise if two networks have outputs of different shapes."""
        networks = tuple(each.problem.network for each in posteriors)
        for number, network in enumerate(networks):
            if network.output_shape != networks[0].output_shape:
                raise ModelError(
                    f"network {number} has outputs of the shape {network.output_shape}; expected "
                    f"{networks[0].output_shape}, that of the first."
                )
        marks = tuple(Fingerprint.of(network.model) for network in networks)
        return cls(joined(posteriors, shares), networks, marks, _together([each.trace for each in posteriors]))

    @property
    def problem(self) -> Problem:  # type: ignore[override]
        """That of the first network."""
        return self.mixture.problem

    @property
    def statistics(self) -> Statistics:  # type: ignore[override]
        """Loss and counts of the data, of the first network."""
        return self.mixture.statistics

    @property
    def of_one_network(self) -> bool:
        return False

    @property
    def findings(self) -> tuple[str, ...]:
        count, bases = len(self.networks), self.mixture.bases
        listed = (finding for each in bases for finding in each.findings)
        first = f"A mixture of the posteriors of {count} networks; the prior and noise shown are those of the first."
        return (first, *dict.fromkeys(listed))

    def belief(self, x: Inputs, query: Query = ALL) -> FunctionGaussian:
        return self._unchanged().belief(x, query)

    def predict(self, x: Inputs, samples: int | None = None) -> Any:
        return self._unchanged().predict(x, samples)

    def function_samples(self, x: Inputs, n: int, generator: torch.Generator | None = None) -> Tensor:
        """Return n functions, (n, B, [T,] C); each draws its network first."""
        for base in self.mixture.bases:
            base.require(Posterior.function_samples, "function samples")
        return self._unchanged().function_samples(x, n, generator)

    def plain(self) -> Posterior:
        return self.mixture.base.plain()

    def _unchanged(self) -> MixturePosterior:
        """Return the mixture; raise ``ModelError`` if a network has other weights than at the fit."""
        for network, fingerprint in zip(self.networks, self.fingerprints, strict=True):
            fingerprint.refuse_other(network.model)
        return self.mixture

    def state(self) -> State:
        """Raise ``UnsupportedError``: a file does not hold networks."""
        raise UnsupportedError(
            "a mixture of several networks has no file form, since a file does not hold networks; save those and fit "
            "again, or save the posterior of each."
        )


def joined(posteriors: Sequence[Posterior], shares: Sequence[float]) -> MixturePosterior:
    """Return one mixture of posteriors with these shares; those that are mixtures bring their cells."""
    bases: list[Posterior] = []
    beliefs: list[Belief] = []
    cells: list[Cell] = []
    weights: list[Tensor] = []
    for posterior, share in zip(posteriors, shares, strict=True):
        each = posterior if isinstance(posterior, MixturePosterior) else _alone(posterior)
        cells += [replace(cell, belief=cell.belief + len(beliefs)) for cell in each.cells]
        beliefs += [replace(belief, base=belief.base + len(bases)) for belief in each.beliefs]
        bases += each.bases
        weights.append(share * each.weights.cpu())
    return MixturePosterior(tuple(bases), tuple(beliefs), tuple(cells), torch.cat(weights))


def _alone(posterior: Posterior) -> MixturePosterior:
    """Return the mixture of one posterior."""
    cell = Cell(0, posterior.problem.likelihood)
    return MixturePosterior((posterior,), (Belief(0),), (cell,), torch.ones(1, dtype=torch.float64))


def _together(traces: Sequence[Trace | None]) -> Trace | None:
    """Return one record of the tuners of several networks; scores are means over networks, each by itself."""
    known = [trace for trace in traces if trace is not None]
    if not known:
        return None
    first = known[0]
    names = [name for name in first.scores if all(name in trace.scores for trace in known)]
    return replace(
        first,
        tuner=f"{first.tuner} for each network" if first.tuner else "",
        steps=tuple(step for trace in known for step in trace.steps),
        findings=tuple(dict.fromkeys(finding for trace in known for finding in trace.findings)),
        scores={
            f"{name}, mean of the networks": sum(trace.scores[name] for trace in known) / len(known) for name in names
        },
    )
