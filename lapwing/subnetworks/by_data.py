"""Rules that choose single weights by a score of each, from a pass over the data: variances and gradients."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from lapwing.core.data import Data
from lapwing.core.progress import shows_progress
from lapwing.core.settings import NONE, Rule
from lapwing.curvature.blocks import DiagonalSum
from lapwing.curvature.blockwise import BlockwiseCurvature, blockwise_sum
from lapwing.curvature.seeds import Seeds
from lapwing.curvature.sweep import Sweep
from lapwing.fitting import problem_of
from lapwing.likelihoods.protocol import Likelihood
from lapwing.methods.diagonal import Diagonal
from lapwing.methods.swag import SWAG
from lapwing.networks.forward import arithmetic_of, device_of, outside_autocast
from lapwing.networks.network import Network
from lapwing.networks.selection import Subnetwork, Weights
from lapwing.posteriors.weight_space import WeightPosterior
from lapwing.priors.bound import Prior
from lapwing.problem import Problem
from lapwing.registry import named
from lapwing.subnetworks.candidates import NUMBER, count_of, largest, largest_in, positions_of

SETTINGS = Rule("lw.baselines.SWAG(...)", lambda v: isinstance(v, SWAG))


@outside_autocast
@torch.inference_mode(False)
def by_variance(
    model: nn.Module,
    data: Iterable[Any],
    likelihood: Likelihood | str,
    n: float,
    *,
    prior: Prior | float | None = None,
    within: Weights | str | None = None,
    target_key: str | None = None,
    progress: bool | None = None,
) -> Subnetwork:
    """Choose the weights with the largest marginal variance under the diagonal Laplace approximation, 1/(H_ii/φ + A_i).

    Args:
        model: The trained network, in evaluation mode.
        data: The training data, as for ``fit``.
        likelihood: As for ``fit``.
        n: How many weights, or which share of the candidates.
        prior: As for ``fit``. With an isotropic prior, the default, the order does not depend on its precision.
        within: The candidates, as ``weights`` of ``fit``: ``lw.named("weight")``. All that require a gradient by
            default.
        target_key: As for ``fit``.
        progress: Whether to show progress bars; None shows them on a terminal.

    Returns:
        A selection for ``weights`` of ``fit``; equal variances go to the first weights.

    Raises:
        UnsupportedError: If n is no number of weights, or above that of the candidates.
        ModelError: If a candidate does not require a gradient, or as in ``fit``.

    Cost: that of ``Diagonal``. Weights on which no output depends, such as those of dead units, come first: they keep
    the variance of the prior, and add none to predictions. ``by_gradient`` and ``greedy`` leave them out.

    >>> import lapwing as lw
    >>> x, net = torch.randn(30, 3), nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    >>> some = by_variance(net, [(x, x[:, :2])], "regression", 5)
    >>> lw.fit(net, [(x, x[:, :2])], "regression", method=lw.Full(), weights=some)
    <Fitted: Full, 5 weights, ...>
    """
    NUMBER.check("n", n)
    problem, batches = problem_and_data(model, data, likelihood, within, prior, target_key, progress)
    count_of(n, problem.network.selection.size)  # refuse before the passes
    posterior = Diagonal().fit(problem, batches)
    precision = curvature_diagonal(posterior)
    if prior is not None:  # otherwise the order is that of H, in which no digits are lost beside the prior
        precision = precision / dispersion_of(posterior) + posterior.problem.prior.vector.to(precision)
    return largest_in(-precision, problem.network, n)


@outside_autocast
@torch.inference_mode(False)
def by_swag(
    model: nn.Module,
    data: Iterable[Any],
    likelihood: Likelihood | str,
    n: float,
    *,
    swag: SWAG | None = None,
    within: Weights | str | None = None,
    target_key: str | None = None,
    progress: bool | None = None,
) -> Subnetwork:
    """Choose the weights that vary most over the iterates of SGD: diagonal SWAG, as Daxberger et al. 2021 publish it.

    Args:
        model: The trained network, in evaluation mode.
        data: The training data, as for ``fit``.
        likelihood: As for ``fit``.
        n: How many weights, or which share of the candidates.
        swag: The settings of SGD, ``lw.baselines.SWAG(snapshots=..., learning_rate=...)``; its defaults if None. All
            weights that require a gradient move.
        within: The candidates, as for ``by_variance``.
        target_key: As for ``fit``.
        progress: Whether to show progress bars; None shows them on a terminal.

    Returns:
        A selection for ``weights`` of ``fit``; equal variances go to the first weights.

    Raises:
        UnsupportedError: If n is no number of weights, or above that of the candidates; if all data are one mini-batch.
        NumericalError: If SGD diverges, see ``SWAG``.

    Cost: ``snapshots`` epochs of training, and those that try a learning rate.

    >>> x, net = torch.randn(30, 3), nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    >>> some = by_swag(net, [(x, x[:, :2])], "regression", 0.5, swag=SWAG(4, 2, batch_size=5))
    >>> len(some.index)
    13
    """
    NUMBER.check("n", n)
    (SETTINGS | NONE).check("swag", swag)
    problem, batches = problem_and_data(model, data, likelihood, None, None, target_key, progress)
    candidates = problem.network
    if within is not None:
        candidates = Network.build(model, batches.look()[1].inputs, named("weights", within))
    positions = positions_of(model, candidates.selection)
    count_of(n, len(positions))  # refuse before the training
    settings = replace(swag or SWAG(), rank=2)  # deviations are not used
    variances = settings.collected(problem, batches)[0].variance
    return largest(variances[positions.to(variances.device)], positions, n)


@outside_autocast
@torch.inference_mode(False)
def by_gradient(
    model: nn.Module,
    data: Iterable[Any],
    likelihood: Likelihood | str,
    n: float,
    *,
    within: Weights | str | None = None,
    target_key: str | None = None,
    progress: bool | None = None,
) -> Subnetwork:
    """Choose the weights with the largest mean squared gradient of the outputs, summed over outputs: diag(JᵀJ).

    Args:
        model: The trained network, in evaluation mode.
        data: Data, as for ``fit``; only the inputs matter.
        likelihood: As for ``fit``, to read the targets.
        n: How many weights, or which share of the candidates.
        within: The candidates, as for ``by_variance``.
        target_key: As for ``fit``.
        progress: Whether to show progress bars; None shows them on a terminal.

    Returns:
        A selection for ``weights`` of ``fit``; equal gradients go to the first weights.

    Raises:
        UnsupportedError: If n is no number of weights, or above that of the candidates.

    Cost: one forward pass and a backward pass for each output.

    >>> x, net = torch.randn(30, 3), nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    >>> len(by_gradient(net, [(x, x[:, :2])], "regression", 6).index)
    6
    """
    NUMBER.check("n", n)
    problem, batches = problem_and_data(model, data, likelihood, within, None, target_key, progress)
    count_of(n, problem.network.selection.size)  # refuse before the passes
    return largest_in(squared_gradients(problem, batches), problem.network, n)


def problem_and_data(
    model: nn.Module,
    data: Iterable[Any],
    likelihood: Likelihood | str,
    within: Weights | str | None,
    prior: Prior | float | None,
    target_key: str | None,
    progress: bool | None,
) -> tuple[Problem, Data]:
    """Return the problem over the candidates, and the data in the form of its outputs."""
    batches = Data(data, device_of(model), target_key, shows_progress(progress), dtype=arithmetic_of(model))
    problem = problem_of(model, batches, likelihood, within, prior)
    positions_of(model, problem.network.selection)  # refuse frozen candidates before the passes
    return problem, problem.network.arranging(batches)


def curvature_diagonal(posterior: WeightPosterior) -> Tensor:
    """Return the diagonal of H at unit dispersion, (P,), float64."""
    curvature = posterior.current
    assert isinstance(curvature, BlockwiseCurvature)
    return curvature.plain_diagonal().double()


def dispersion_of(posterior: WeightPosterior) -> Tensor:
    """Return the noise variance or temperature, float64."""
    return posterior.problem.likelihood.dispersion.detach().double().to(posterior.theta.device)


def squared_gradients(problem: Problem, data: Data) -> Tensor:
    """Return the diagonal of JᵀJ over the data, (P,)."""
    network = problem.network
    sweep = Sweep(network, problem.likelihood, data, Seeds("jacobian"), "gradients", closed=False)
    return blockwise_sum(sweep, network, [DiagonalSum(block, network) for block in network.layout]).plain_diagonal()
