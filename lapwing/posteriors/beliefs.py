"""The beliefs of several posteriors about the outputs at some inputs, from one pass of each network."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from lapwing.core.chosen import ChosenOutputs
from lapwing.core.gaussian import FunctionGaussian
from lapwing.core.inputs import Inputs
from lapwing.core.memory import gathered
from lapwing.networks.jacobians import LayerJacobians
from lapwing.networks.tangent import Tangent
from lapwing.posteriors.weight_space import WIDE


def beliefs_at(members: Sequence[Any], x: Inputs, outputs: ChosenOutputs | None = None) -> list[FunctionGaussian]:
    """Return the belief of every posterior about all or some outputs at x, by one pass of each network.

    With many outputs each posterior passes by itself, so that no (B, C, C) covariance need be built.
    """
    by_model: dict[int, list[int]] = {}
    for number, each in enumerate(members):
        by_model.setdefault(id(each.problem.network.model), []).append(number)
    beliefs: dict[int, FunctionGaussian] = {}
    for numbers in by_model.values():
        beliefs.update(zip(numbers, _of_one_network([members[i] for i in numbers], x, outputs), strict=True))
    return [beliefs[number] for number in range(len(members))]


def _of_one_network(members: Sequence[Any], x: Inputs, outputs: ChosenOutputs | None) -> list[FunctionGaussian]:
    """Return the belief of every posterior, all of the same network."""
    network = members[0].problem.network
    alone = lambda each: each(x) if outputs is None else each.chosen(x, outputs)
    shape = network.output_shape if outputs is None else outputs.shape(network.output_shape)
    if shape[-1] > WIDE:
        return [alone(each) for each in members]
    linearised = [each for each in members if each.linearised]
    if len({id(each.shared) for each in linearised}) == 1:  # one use of the Jacobian
        network = linearised[0].passing
    means: list[Tensor] = []

    def parts() -> Iterator[Tensor]:
        for _, tangent in network.tangents(x, chosen=outputs):
            means.append(tangent.f.to(network.dtype))
            yield covariances(linearised, tangent)

    covs = iter(gathered(parts(), network.count(x), 1) if linearised else ())
    mean = gathered(means, network.count(x)) if linearised else network.theta()[:0]
    return [FunctionGaussian(mean, next(covs)) if each.linearised else alone(each) for each in members]


def covariances(members: Sequence[Any], tangent: Tangent) -> Tensor:
    """Return the covariance of the wanted outputs under every posterior, (K, B, [T,] C, C), from one Jacobian of them.

    Where the outputs of all tokens do not fit the byte budget, tokens are taken in runs.
    """
    groups: dict[int, list[int]] = {}
    for i, each in enumerate(members):
        groups.setdefault(id(each.shared), []).append(i)

    def of_run(jacobian: LayerJacobians) -> Tensor:
        out: list[Tensor] = [torch.empty(0)] * len(members)
        for numbers in groups.values():
            together = [members[i] for i in numbers]
            for i, cov in zip(numbers, together[0].covariances(jacobian, together), strict=True):
                out[i] = cov
        return torch.stack(out)  # (K, B, tokens, C, C)

    cov = gathered(map(of_run, tangent.runs(whole_tokens=True)), tangent.tokens, 2)
    return cov.reshape(len(members), -1, *tangent.shape, tangent.shape[-1])
