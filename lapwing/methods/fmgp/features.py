"""Features on which a kernel works, and all data as the process sees them, with the units of their features."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lapwing.core.data import Data
from lapwing.core.inputs import Inputs, check_finite
from lapwing.errors import DataError, ModelError, UnsupportedError
from lapwing.likelihoods.protocol import Likelihood
from lapwing.networks.features import is_single_map, last_features
from lapwing.networks.last_layer import last_layer
from lapwing.networks.network import Network
from lapwing.problem import Statistics, sample_count, total_loss


@dataclass(frozen=True, eq=False)
class Sight:
    """The features on which a kernel works: the flattened input, or the input of the network's last layer."""

    network: Network
    last: Network | None = None  # the network with only its last layer selected, for features

    def __call__(self, x: Inputs) -> tuple[Tensor, Tensor]:
        """Return features (B, D) and outputs (B, C), in float64."""
        if self.last is not None:
            classes = self.last.output_shape[-1]
            last = self.last  # whose own graph is only that of the last layer: the whole network says what fits
            both = self.network.in_runs(x, lambda part: torch.cat([t.double() for t in features(last, part)], 1))
            return both[:, :-classes], both[:, -classes:]
        if not (isinstance(x, Tensor) and x.is_floating_point()):
            raise UnsupportedError(
                "the rbf kernel needs inputs that are one tensor of real numbers; use kernel='features'."
            )
        return x.reshape(len(x), -1).double(), self.network(x).double()


def last_layer_network(network: Network, inputs: Inputs) -> Network:
    """Return the network with only its last layer selected; raise if that is not a single linear map."""
    last = Network.build(network.model, inputs, last_layer, network.output)
    if not is_single_map(last):
        raise ModelError("the last layer is no single linear map, so it has no features; use kernel='rbf'.")
    return last


def features(network: Network, inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Return the last layer's input (B, D) and the outputs f (B, C), by one forward pass."""
    both = last_features(network, inputs)
    if both is None:
        raise ModelError("the last layer is used several times for one input; use kernel='rbf'.")
    a, f = both
    return (a[:, :-1] if network.layout[0].bias is not None else a), f


@dataclass(frozen=True, eq=False)
class Table:
    """Features (n, D), outputs (n, C) and targets of all data, in float64: learning does not run the network again."""

    u: Tensor
    f: Tensor
    y: Tensor

    @classmethod
    def read(cls, likelihood: Likelihood, sight: Sight, data: Data) -> tuple[Table, Statistics]:
        """Return the table and the loss at the network's outputs, by one pass over the data."""
        features: list[Tensor] = []
        outputs, targets = [], []
        for batch in data.batches("features"):
            sample_count(sight.network, batch)
            u, f = sight(batch.inputs)
            check_finite(f, "outputs of the network")
            if features and u.shape[1] != features[0].shape[1]:
                raise DataError(
                    f"inputs of {features[0].shape[1]} and of {u.shape[1]} numbers; expected as many in all."
                )
            y = likelihood.targets(f, batch.targets)
            features.append(u)
            outputs.append(f)
            targets.append(y.double() if y.is_floating_point() else y)
        table = cls(torch.cat(features), torch.cat(outputs), torch.cat(targets))
        return table, total_loss(likelihood, zip(outputs, targets, strict=True)).over(data.processes)

    def rows(self, index: Tensor | slice) -> Table:
        """Return the rows with these numbers."""
        return Table(self.u[index], self.f[index], self.y[index])

    def __len__(self) -> int:
        return len(self.f)


@dataclass(frozen=True, eq=False)
class Units:
    """Centre and spread of each column of the features; learning moves inducing points in these units.

    With a length-scale for each column, a constant column takes the spread of the others, and points do not move in it.
    With one length-scale for all, all columns share one unit: their spread, or their size if they have no spread.
    """

    centre: Tensor
    size: Tensor
    varies: Tensor  # whether a column varies by more than rounding

    @classmethod
    def of(cls, u: Tensor, per_column: bool) -> Units:
        """Return the units of features u (n, D)."""
        if not per_column:
            spread, level = u.std(correction=0), u.square().mean().sqrt()
            size = spread if bool(spread > 1e-9 * level) else torch.where(level > 0, level, 1)
            return cls(torch.zeros_like(u[0]), size.expand_as(u[0]), torch.ones_like(u[0], dtype=torch.bool))
        centre, spread = u.mean(0), u.std(0, correction=0)
        varies = spread > 1e-9 * centre.abs()
        usual = spread[varies].square().mean().sqrt() if bool(varies.any()) else torch.ones_like(spread[0])
        return cls(centre, torch.where(varies, spread, usual), varies)

    def measured(self, table: Table) -> Table:
        """Return the table with its features in these units."""
        return replace(table, u=(table.u - self.centre) / self.size)
