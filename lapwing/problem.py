"""The problem of inference (a network, a likelihood and a prior), and losses and counts over a data set."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lapwing.data.batches import Data
from lapwing.data.inputs import Batch, Inputs, check_finite
from lapwing.data.processes import Processes
from lapwing.errors import DataError
from lapwing.likelihoods.base import Likelihood, as_count, expand_weights, weighted_count, weighted_loss
from lapwing.networks.network import Network
from lapwing.priors import BoundPrior
from lapwing.runtime.states import ABOVE_ZERO, Either, ListOf, Real, Record, Whole


@dataclass(frozen=True)
class Statistics:
    """Loss and counts of a pass over the data."""

    loss: float  # at unit dispersion, summed
    data: int | float  # data with a target that is not ignored; the sum of their weights if they have weights
    outputs: int  # numbers predicted for each datum
    losses: tuple[float, ...] = ()  # of each output at unit noise, if each output has its own noise

    def __add__(self, other: Statistics) -> Statistics:
        losses = tuple(a + b for a, b in zip(self.losses, other.losses, strict=True))
        return Statistics(self.loss + other.loss, self.data + other.data, self.outputs, losses)

    def over(self, processes: Processes) -> Statistics:
        """Return the statistics of the data of all processes; raise if no datum counts."""
        own = torch.tensor([self.loss, self.data, self.outputs, self.outputs > 0], dtype=torch.float64)
        loss, count, outputs, known = processes.sum([own])[0].tolist()  # one without data may not know the outputs
        return replace(self, loss=loss, data=nonzero_count(as_count(count)), outputs=round(outputs / max(1, known)))


STATISTICS = Record(  # what a file may hold
    Statistics, loss=Real(), data=Either(Whole(1), ABOVE_ZERO), outputs=Whole(1, size="C"),
    losses=Either(ListOf(Real(0), 0), ListOf(Real(0), "C")),
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class Problem:
    """The network, the likelihood and the prior; everything but the data."""

    network: Network
    likelihood: Likelihood
    prior: BoundPrior
    learn_prior: bool = False  # whether the precisions are to be learned: set if the user gave no prior

    @property
    def evidence_unit(self) -> int:
        """The number of weights: tuners divide the log evidence by it, so that slopes have one scale."""
        return self.network.selection.size

    def with_likelihood(self, likelihood: Likelihood) -> Problem:
        """Return the problem with another likelihood."""
        return replace(self, likelihood=likelihood)

    def with_prior(self, prior: BoundPrior) -> Problem:
        """Return the problem with another prior."""
        return replace(self, prior=prior)

    def with_precisions(self, values: Tensor) -> Problem:
        """Return the problem with other precisions of the same prior, in the shape of ``prior.values``."""
        return replace(self, prior=replace(self.prior, values=values))

    def batch_loss(self, weights: Mapping[str, Tensor], batch: Batch) -> tuple[Tensor, int]:
        """Return the summed loss of a batch under other weights, differentiable in them, and the number of its data."""
        f = self.network.outputs_under(weights, batch.inputs).to(self.network.dtype)
        y = self.likelihood.targets(f, batch.targets)
        return self.likelihood.loss(f, y).sum(), max(int(self.likelihood.count(f, y)), 1)

    def with_known_prior(self) -> Problem:
        """Return the problem with a prior that is no longer to be learned."""
        return replace(self, learn_prior=False)

    def with_residual_noise(self, statistics: Statistics) -> Problem:
        """Return the problem with the noise set to the mean squared residual, if the likelihood leaves it open."""
        if not self.likelihood.learns_dispersion:
            return self
        phi = 2 * statistics.loss / (statistics.data * statistics.outputs)
        if phi < 1e-30:
            raise DataError(
                f"the network fits its {statistics.data} targets exactly, so the residuals say nothing about the "
                "noise; expected residuals that are not zero. Give the noise: Gaussian(noise_std=...)."
            )
        noise = torch.tensor(phi, dtype=torch.float64, device=self.network.device)
        return self.with_likelihood(self.likelihood.with_dispersion(noise))


def sample_count(network: Network, batch: Batch) -> int:
    """Return the number of samples in a batch; raise unless each has a target."""
    inputs, targets = network.count(batch.inputs), batch.targets.shape[0] if batch.targets.ndim else 1
    if inputs != targets:
        raise DataError(
            f"{inputs} inputs with {targets} targets; expected one target for each. Single samples need a batch "
            "dimension: give the Dataset, or wrap it in a DataLoader."
        )
    return inputs


def first_samples(network: Network, batch: Batch, count: int) -> Batch:
    """Return the batch with at most so many samples."""
    if batch.n_samples <= count:
        return batch
    return batch.take(network.per_sample(batch.inputs), slice(0, count))


def check_targets(network: Network, likelihood: Likelihood, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return (outputs, targets) of a batch, checked against each other before the network runs.

    The outputs have a shape but no values.
    """
    size, shape = sample_count(network, batch), network.output_shape
    if len(shape) == 2 and batch.targets.ndim > 1:  # the number of tokens may differ between batches
        shape = (batch.targets.shape[1], shape[1])
    outputs = torch.empty(1, dtype=network.dtype, device=network.device).expand(size, *shape)
    return outputs, check_targets_for(network, likelihood, outputs, batch.targets)


def check_targets_for(network: Network, likelihood: Likelihood, f: Tensor, y: Tensor) -> Tensor:
    """Return targets that fit the outputs f; raise if they do not, and for images say how their pixels are seen."""
    try:
        return likelihood.targets(f, y)
    except DataError as error:
        if f.ndim == 2 and y.ndim and len(f) != len(y):  # targets of tokens may be flattened: that is another mistake
            raise DataError(
                f"targets have the shape {tuple(y.shape)} and outputs {tuple(f.shape)}: {len(f)} inputs with {len(y)} "
                "targets; expected one target for each. Take the same rows of inputs and targets."
            ) from error
        if not network.image:
            raise
        raise DataError(
            f"{error} These are the pixels (B, H W, C) of images (B, C, H, W): give class numbers as (B, H, W), from "
            "one-hot targets by y.argmax(1), and other targets as (B, C, H, W)."
        ) from error


def check_named_targets(network: Network, likelihood: Likelihood, batch: Batch, name: str) -> Tensor:
    """Return the checked targets of a batch; the message of an error begins with the name of the data."""
    try:
        return check_targets(network, likelihood, batch)[1]
    except DataError as error:
        raise DataError(f"{name}: {error}") from error


def data_count(network: Network, likelihood: Likelihood, data: Data) -> int | float:
    """Return the number of data with a target that is not ignored, or the sum of their weights; no network runs."""
    own = 0.0
    for batch in data.batches("counting", weighted=True):
        own += float(weighted_count(likelihood, *check_targets(network, likelihood, batch), batch.weights))
    data.refuse_same_parts()
    return nonzero_count(as_count(sum(data.processes.gather_values(own))))


def nonzero_count(count: int | float) -> int | float:
    """Return the number of data; raise if it is zero."""
    if count == 0:
        raise DataError("every target is ignored, or has the weight zero; expected at least one that counts.")
    return count


def summed_loss(
    outputs: Callable[[Inputs], Tensor], likelihood: Likelihood, data: Data, what: str = "outputs of the network"
) -> Statistics:
    """Return loss and counts of ``outputs(inputs)`` over the data, in float64, by one pass.

    ``what`` names the outputs in the error for numbers that are not finite.
    """
    own = _total_loss(likelihood, _triples(outputs, likelihood, data, "loss", what))
    data.refuse_same_parts()
    return own.over(data.processes)


def _triples(
    outputs: Callable[[Inputs], Tensor], likelihood: Likelihood, data: Data, label: str, what: str
) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
    """Yield outputs in float64, targets and weights of every batch; raise if an output is not finite."""
    for batch in data.batches(label, weighted=True):
        f = outputs(batch.inputs).double()
        check_finite(f, what)
        yield f, likelihood.targets(f, batch.targets), batch.weights


@dataclass(frozen=True, eq=False)
class FeatureTable:
    """Features (n, D), outputs (n, C) and targets of all data, in float64: learning does not run the network again."""

    u: Tensor
    f: Tensor
    y: Tensor

    @classmethod
    def read(
        cls, network: Network, likelihood: Likelihood, data: Data, features: Callable[[Inputs], tuple[Tensor, Tensor]]
    ) -> tuple[FeatureTable, Statistics]:
        """Return the table, and the loss at the outputs, by one pass over the data.

        ``features`` gives features (B, D) and outputs (B, C) of some inputs in float64.
        """
        rows: list[tuple[Tensor, Tensor, Tensor]] = []
        for batch in data.batches("features"):
            sample_count(network, batch)
            u, f = features(batch.inputs)
            check_finite(f, "outputs of the network")
            if rows and u.shape[1] != rows[0][0].shape[1]:
                raise DataError(
                    f"inputs of {rows[0][0].shape[1]} and of {u.shape[1]} numbers; expected as many in all."
                )
            rows.append((u, f, likelihood.targets(f, batch.targets)))
        statistics = _total_loss(likelihood, ((f, y, None) for _, f, y in rows)).over(data.processes)
        u, f, y = map(torch.cat, zip(*rows, strict=True))
        return cls(u, f, y.double() if y.is_floating_point() else y), statistics

    def rows(self, index: Tensor | slice) -> FeatureTable:
        """Return the rows with these numbers."""
        return FeatureTable(self.u[index], self.f[index], self.y[index])

    def __len__(self) -> int:
        return len(self.f)


def _total_loss(likelihood: Likelihood, triples: Iterable[tuple[Tensor, Tensor, Tensor | None]]) -> Statistics:
    """Return loss and counts of outputs (B, [T,] C), checked targets and weights."""
    loss, count, size = 0.0, 0.0, 0
    for f, y, weights in triples:
        loss += float(weighted_loss(likelihood, f, y.double() if y.is_floating_point() else y, weights).sum())
        count += float(weighted_count(likelihood, f, y, weights))
        size = f.shape[-1]
    return Statistics(loss, as_count(count), size)


def mean_squared_residual(network: Network, likelihood: Likelihood, data: Data) -> Tensor:
    """Return the mean squared residual of each output, (C,), by one forward pass."""
    total, count = torch.zeros(network.output_shape[-1], dtype=torch.float64, device=network.device), 0.0
    for f, y, weights in _triples(network, likelihood, data, "residuals", "outputs of the network"):
        squares = (f - y.double()).square()
        squares = squares if weights is None else squares * expand_weights(weights, squares)
        total += squares.flatten(0, -2).sum(0)
        count += float(weighted_count(likelihood, f, y, weights))
    (total,) = data.processes.sum([total])
    return total / nonzero_count(sum(data.processes.gather_values(count)))
