"""One pass over the data: for every chunk of samples the layer-wise Jacobian seeded with the curvature's root."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from lapwing.core.data import Data, check_finite, merged
from lapwing.curvature.blockwise import in_order
from lapwing.errors import DataError, NumericalError, UnsupportedError
from lapwing.likelihoods.protocol import Likelihood
from lapwing.losses import Statistics, checked_targets, counted
from lapwing.networks.jacobians import LayerJacobians
from lapwing.networks.network import Network

CURVATURES = ("ggn", "fisher_mc")
PLAIN = "jacobian"  # no likelihood: every output is a seed


def checked_curvature(curvature: str, allowed: tuple[str, ...] = CURVATURES) -> str:
    if curvature not in allowed:
        raise UnsupportedError(f"curvature is {curvature!r}; expected one of {', '.join(allowed)}.")
    return curvature


class Sweep:
    """Iterate to get seeded Jacobians; afterwards ``statistics`` holds loss and counts.

    With ``curvature="ggn"`` the seeds are the columns of the likelihood's root, so that the sum of JᵀJ over
    the pass is the exact GGN at unit dispersion. With "fisher_mc" there is one seed, the gradient of the loss
    at a label drawn from the model: an unbiased estimate for one backward pass.
    """

    def __init__(
        self,
        network: Network,
        likelihood: Likelihood,
        data: Data,
        curvature: str = "ggn",
        generator: torch.Generator | None = None,
        label: str = "curvature",
        only: int | None = None,
        part: int | None = None,
    ) -> None:
        self._only = only  # the one output to seed, of those that the likelihood keeps apart
        self._part = part  # the most samples of one chunk, where there is a reason besides memory
        self._network, self._likelihood, self._data = network, likelihood, data
        self._curvature, self._generator, self._label = (
            checked_curvature(curvature, (*CURVATURES, PLAIN)),
            generator,
            label,
        )
        self._statistics: Statistics | None = None

    def __iter__(self) -> Iterator[LayerJacobians]:
        network, likelihood = self._network, self._likelihood
        total = torch.zeros((), dtype=torch.float64, device=network.device)
        count: int | Tensor = 0
        # The C library gives large blocks back to the system and faults their pages in again at the next batch, a
        # quarter of the time of a pass. It stops doing so below the largest block it has seen freed, up to 32 MB.
        torch.empty(31 * 2**20, dtype=torch.uint8)
        for batch in merged(
            self._data.batches(self._label), network.footprint.joined(self._seed_count, network.dtype, network.device)
        ):
            _, y = checked_targets(network, likelihood, batch)
            # Sums stay on the device until the batch is done: asking for one halts a GPU.
            before = total.clone()
            for rows, tangent in network.tangents(batch.inputs, self._seed_count, self._part):
                f, mine = tangent.f.to(network.dtype), y[rows]
                if f.shape[0] != len(mine):
                    raise DataError(f"{len(mine)} inputs gave {f.shape[0]} outputs; expected one for each.")
                total += likelihood.loss(f, mine).sum(dtype=torch.float64)
                count = count + likelihood.count(f, mine)
                jacobians = tangent.jacobians(self._seeds(f, mine))
                del tangent  # nothing of one chunk may live on while the next is computed
                yield jacobians
                del jacobians
            if not math.isfinite(total - before):
                check_finite(network(batch.inputs), "outputs of the network")
                raise NumericalError(
                    "the loss is not finite although inputs, targets and outputs are; check the scale."
                )
        self._statistics = Statistics(float(total), counted(int(count)), network.output_shape[-1])

    @property
    def statistics(self) -> Statistics:
        if self._statistics is None:
            raise AssertionError("iterate over the sweep before asking for its statistics")
        return self._statistics

    @property
    def _seed_count(self) -> int:
        shape = self._network.output_shape
        if self._curvature == "fisher_mc":
            return 1
        return torch.Size(shape if self._only is None else shape[:-1]).numel()

    def _seeds(self, f: Tensor, y: Tensor) -> Tensor:
        """(K, B, [T,] C): every token's seeds apart from the others'."""
        if self._curvature == "fisher_mc":
            # Labels are drawn independently, so tokens may share a seed: their cross terms vanish on average.
            gradient = self._likelihood.sampled_gradient(f, y, self._generator)
            if self._only is not None:
                gradient = gradient * F.one_hot(torch.tensor(self._only), f.shape[-1]).to(f)
            return gradient.unsqueeze(0)
        if self._curvature == PLAIN:
            return seeded(torch.eye(f.shape[-1]).to(f).expand(*f.shape, f.shape[-1]))
        root = self._likelihood.root(f, y)
        return seeded(root if self._only is None else root[..., self._only : self._only + 1])


class SquaredSum:
    """The diagonal of the GGN at unit dispersion, added up as seeded Jacobians pass by."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self._totals = [torch.zeros(b.form, dtype=torch.float64, device=network.device) for b in network.layout]

    def add(self, jacobians: LayerJacobians) -> None:
        for total, (_, jacobian) in zip(self._totals, jacobians, strict=True):
            total += jacobian.squares().reshape(total.shape)

    def diagonal(self) -> Tensor:
        """(P,)"""
        return in_order(self._totals, self._network.layout, self._network.selection)


def seeded(root: Tensor) -> Tensor:
    """R (B, C, K) -> (K, B, C); R (B, T, C, K) -> (T K, B, T, C), one token alive in each."""
    if root.ndim == 3:
        return root.permute(2, 0, 1)
    batch, tokens, classes, columns = root.shape
    seeds = root.new_zeros(tokens, columns, batch, tokens, classes)
    index = torch.arange(tokens, device=root.device)
    seeds[index, :, :, index] = root.permute(1, 3, 0, 2)
    return seeds.reshape(tokens * columns, batch, tokens, classes)
