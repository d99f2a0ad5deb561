"""Dropout left on while predicting (Gal & Ghahramani 2016)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lapwing.core.data import Data
from lapwing.core.settings import require_integer
from lapwing.losses import summed_loss
from lapwing.posteriors.members import Masks, MembersPosterior
from lapwing.problem import Problem


@dataclass(frozen=True)
class MCDropout:
    """The spread of ``samples`` forward passes, each under one random dropout mask for all inputs, of ``seed + k``.

    For networks trained with ``nn.Dropout`` or with the dropout of PyTorch's attention and recurrent layers (one by
    ``F.dropout`` inside ``forward`` is not seen). The mean is that of the passes; the noise of a regression is the
    residual of the network without dropout. The model is not changed.

    Cost: nothing to fit; a prediction takes ``samples`` forward passes.

    >>> from lapwing.api import fit
    >>> x = torch.linspace(-1, 1, 20).unsqueeze(1)
    >>> net = torch.nn.Sequential(torch.nn.Linear(1, 8), torch.nn.Dropout(), torch.nn.Linear(8, 1)).eval()
    >>> bool((fit(net, [(x, x)], "regression", method=MCDropout(samples=8)).functions(x).std > 0).all())
    True
    """

    samples: int = 32
    seed: int = 0

    def __post_init__(self) -> None:
        require_integer("samples", self.samples, least=2)  # one has no spread
        require_integer("seed", self.seed, least=0)

    def fit(self, problem: Problem, data: Data, generator: torch.Generator | None = None) -> MembersPosterior:
        network = problem.network
        members = Masks.of(network.model, self.samples, self.seed)
        statistics = summed_loss(network, problem.likelihood, data)
        problem = problem.with_residual_noise(statistics).with_known_prior()
        return MembersPosterior(problem, members, statistics, network.theta())
