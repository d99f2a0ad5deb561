"""Products with the curvature, streaming over the data; the matrix is never formed."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lapwing.core.data import Data
from lapwing.likelihoods.protocol import Likelihood
from lapwing.networks.network import Network


@dataclass(frozen=True, eq=False)
class GGNProduct:
    """v -> Σ Jᵀ R Rᵀ J v at unit dispersion, for all rows of v (K, P) at once."""

    network: Network
    likelihood: Likelihood
    data: Data

    def __call__(self, v: Tensor) -> Tensor:
        v = v.to(self.network.dtype)
        total = torch.zeros(v.shape, dtype=torch.float64, device=v.device)
        for batch in self.data.batches("GGN products"):
            f = self.network(batch.inputs).to(self.network.dtype)
            root = self.likelihood.root(f, self.likelihood.targets(f, batch.targets))
            moved = self.network.jvp(batch.inputs, v)
            curved = torch.einsum("...ck,...dk,n...d->n...c", root, root, moved)
            total += self.network.vjp(batch.inputs, curved)
        return total
