"""All data as the process sees them: features, outputs and targets, and the units they are measured in."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lapwing.core.data import Data, check_finite
from lapwing.errors import DataError
from lapwing.likelihoods.protocol import AdditiveNoise, Likelihood, Logits
from lapwing.losses import Statistics, sample_count, total_loss
from lapwing.methods.fmgp.posterior import Sight


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
        return table, total_loss(likelihood, zip(outputs, targets, strict=True))

    def rows(self, index: Tensor) -> Table:
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

    def flattened(self, table: Table) -> Table:
        """Return the table without rounding in constant columns, for which a length-scale would be learned."""
        return replace(table, u=torch.where(self.varies, table.u, 0))


def output_level(likelihood: Likelihood, table: Table) -> Tensor:
    """Return where the outputs lie, (C,): zero for logits, else their mean."""
    return torch.zeros_like(table.f[0]) if isinstance(likelihood, Logits) else table.f.mean(0)


def output_scale(likelihood: Likelihood, table: Table) -> Tensor:
    """Return the scale of each output, (C,): one for logits, else its spread over the data.

    If the targets have the units of the outputs, a constant output takes the spread of its targets, or one if these
    are constant too. Other outputs, such as log-rates, do not have the scale of their targets.
    """
    if isinstance(likelihood, Logits):
        return torch.ones_like(table.f[0])
    if not isinstance(likelihood, AdditiveNoise):
        return table.f.std(0, correction=0).clamp_min(1e-3)
    moments = [(t.mean(0).abs(), t.std(0, correction=0)) for t in (table.f, table.y.to(table.f))]
    rounding = 1e-9 * torch.maximum(moments[0][0], moments[1][0])
    outputs, targets = (torch.where(spread > rounding, spread, 0) for _, spread in moments)
    return torch.where(outputs > 1e-3 * targets, outputs, torch.where(targets > 0, targets, 1))
