"""Rules that choose single weights: by their variance, magnitude, gradient, greedily, or at random.

Each returns a selection for the argument ``weights`` of ``fit``. A layer, or all weights with certain names, is a
selection too: ``lw.last_layer`` and ``lw.named(pattern)``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor, nn

from lapwing.api import problem_of
from lapwing.curvature.base import Seeds, Sweep
from lapwing.curvature.blocks import DiagonalSum
from lapwing.curvature.dense import full_curvature
from lapwing.curvature.kronecker import BlockwiseCurvature, blockwise_sum
from lapwing.data.batches import Data
from lapwing.data.inputs import check_finite
from lapwing.errors import ModelError, UnsupportedError
from lapwing.likelihoods.base import Likelihood
from lapwing.linalg.dense import choose_most_explaining
from lapwing.methods.swag import SWAG
from lapwing.methods.weight_space import Diagonal
from lapwing.networks.forward import arithmetic_of, device_of, outside_autocast, unwrap
from lapwing.networks.network import Network
from lapwing.networks.selection import NeedsNoGraph, Selection, Subnetwork, Weights, all_weights, make_selection
from lapwing.posteriors.weight_space import WeightPosterior
from lapwing.priors import Prior
from lapwing.problem import Problem
from lapwing.registry import find_weights
from lapwing.runtime.memory import refuse_large_result
from lapwing.runtime.settings import GENERATOR, NONE, Rule, integer, is_integer, is_real, of_class, refuse_other_calls
from lapwing.runtime.threads import independent_generator, should_show_progress, uniform
from lapwing.tuners.base import MaximiseEvidence, start_near_optimum

__all__ = ["by_variance", "by_swag", "by_magnitude", "by_gradient", "greedy", "random"]


NUMBER = Rule(
    "a number of weights of at least 1, or a share of them, above 0 and at most 1",
    lambda v: v >= 1 if is_integer(v) else is_real(v) and 0 < v <= 1,
)


def candidates_by_name(model: nn.Module, within: Weights | str | None) -> Selection:
    """Return the candidates of a rule that needs no pass over inputs, by their names in the unwrapped model."""
    device_of(model)
    rule = find_weights(within)
    if not isinstance(rule, NeedsNoGraph):
        raise UnsupportedError(
            f"within is {rule!r:.80}, which is found by a pass over inputs; expected lw.named(pattern) or "
            "lw.subnetwork(index). Give the names of these parameters."
        )
    return rule.select(unwrap(model))


def positions_of(model: nn.Module, candidates: Selection) -> Tensor:
    """Return the positions of the candidates, (P,), in the flat vector of all weights that require a gradient."""
    model = unwrap(model)
    whole = make_selection(model, all_weights.needs(model))
    frozen = [name for name in candidates.names if name not in whole.slices]
    if frozen:
        raise ModelError(
            f"the candidate {frozen[0]!r} does not require a gradient; single weights are chosen among those that do. "
            "Call requires_grad_(True) on it, or leave it out of within."
        )
    parts = [torch.arange(whole.slices[name].start, whole.slices[name].stop) for name in candidates.names]
    flat = torch.cat(parts)
    return flat if candidates.index is None else flat[candidates.index.to(flat.device)]


def choose_largest(scores: Tensor, positions: Tensor, n: float) -> Subnetwork:
    """Return the n positions (P,) with the largest scores (P,), in rising order."""
    check_finite(scores, "scores of the weights")
    order = scores.argsort(descending=True, stable=True)[: number_to_choose(n, len(scores))]
    return Subnetwork(positions[order.to(positions.device)].sort().values)


def number_to_choose(n: float, candidates: int) -> int:
    """Return how many weights to choose."""
    if is_integer(n) and n > candidates:
        raise UnsupportedError(f"n is {n}; expected at most {candidates}, the number of candidates.")
    return int(n) if is_integer(n) else max(1, round(n * candidates))


SETTINGS = of_class("lw.baselines.SWAG(...)", SWAG)


@outside_autocast
@torch.inference_mode(False)
def by_variance(
    model: nn.Module,
    data: Iterable[object],
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
        UnsupportedError: If n is not a number, or above that of the candidates.
        ModelError: If a candidate does not require a gradient, or as in ``fit``.

    Cost: that of ``Diagonal``. Weights on which no output depends, such as those of dead units, come first: they keep
    the variance of the prior, and add none to predictions. ``by_gradient`` and ``greedy`` leave them out.

    >>> import lapwing as lw
    >>> x, net = torch.randn(30, 3), nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    >>> some = by_variance(net, [(x, x[:, :2])], "regression", 5)
    >>> lw.fit(net, [(x, x[:, :2])], "regression", method=lw.Full(), weights=some)
    <Fitted: Full, 5 weights, ...>
    """
    problem, batches, positions, _ = read_candidates(model, data, likelihood, n, within, prior, target_key, progress)
    posterior = Diagonal().fit(problem, batches)
    precision = curvature_diagonal(posterior)
    if prior is not None:  # otherwise the order is that of H, in which no digits are lost beside the prior
        precision = precision / dispersion_of(posterior) + posterior.problem.prior.vector.to(precision)
    return choose_largest(-precision, positions, n)


@outside_autocast
@torch.inference_mode(False)
def by_swag(
    model: nn.Module,
    data: Iterable[object],
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
        UnsupportedError: If n is not a number, or above that of the candidates; if all data are one mini-batch.
        NumericalError: If SGD diverges, see ``SWAG``.

    Cost: ``snapshots`` epochs of training, and those that try a learning rate.

    >>> x, net = torch.randn(30, 3), nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    >>> some = by_swag(net, [(x, x[:, :2])], "regression", 0.5, swag=SWAG(4, 2, batch_size=5))
    >>> len(some.index)
    13
    """
    NUMBER.check("n", n)
    (SETTINGS | NONE).check("swag", swag)
    problem, batches, positions, _ = read_candidates(model, data, likelihood, 1, None, None, target_key, progress)
    if within is not None:
        candidates = Network.build(model, batches.peek()[1].inputs, find_weights(within))
        positions = positions_of(model, candidates.selection)
    number_to_choose(n, len(positions))  # refuse before the training
    settings = replace(swag or SWAG(), rank=2)  # deviations are not used
    variances = settings.collect(problem, batches).variance
    return choose_largest(variances[positions.to(variances.device)], positions, n)


@outside_autocast
@torch.inference_mode(False)
def by_gradient(
    model: nn.Module,
    data: Iterable[object],
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
        UnsupportedError: If n is not a number, or above that of the candidates.

    Cost: one forward pass and a backward pass for each output.

    >>> x, net = torch.randn(30, 3), nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    >>> len(by_gradient(net, [(x, x[:, :2])], "regression", 6).index)
    6
    """
    problem, batches, positions, _ = read_candidates(model, data, likelihood, n, within, None, target_key, progress)
    return choose_largest(squared_gradients(problem, batches), positions, n)


def read_candidates(
    model: nn.Module,
    data: Iterable[object],
    likelihood: Likelihood | str,
    n: float,
    within: Weights | str | None,
    prior: Prior | float | None,
    target_key: str | None,
    progress: bool | None,
) -> tuple[Problem, Data, Tensor, int]:
    """Return the problem over the candidates, data in the form of its outputs, positions, and how many to choose.

    Raise before any pass over the data if these weights or so many cannot be chosen.
    """
    NUMBER.check("n", n)
    batches = Data(data, device_of(model), target_key, should_show_progress(progress), dtype=arithmetic_of(model))
    problem = problem_of(model, batches, likelihood, within, prior)
    positions = positions_of(model, problem.network.selection)
    return problem, problem.network.arrange_data(batches), positions, number_to_choose(n, len(positions))


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


def by_magnitude(model: nn.Module, n: float, *, within: Weights | str | None = None) -> Subnetwork:
    """Choose the weights with the largest absolute values.

    Args:
        model: The trained network.
        n: How many weights, or which share of the candidates.
        within: The candidates: ``lw.named(pattern)`` or ``lw.subnetwork(index)``; all by default.

    Returns:
        A selection for ``weights`` of ``fit``; equal magnitudes go to the first weights.

    Raises:
        UnsupportedError: If n is not a number, or above that of the candidates; if ``within`` is another rule.
        ModelError: If a candidate does not require a gradient.
        DataError: If a candidate is not finite.

    >>> net = nn.Linear(3, 1)
    >>> _ = net.weight.data.copy_(torch.tensor([[0.1, -4.0, 2.0]])), net.bias.data.fill_(3.0)
    >>> by_magnitude(net, 2).index.tolist()
    [1, 3]
    """
    NUMBER.check("n", n)
    candidates = candidates_by_name(model, within)
    tensors = dict(unwrap(model).named_parameters())
    flat = torch.cat([tensors[name].detach().reshape(-1).double() for name in candidates.names])
    return choose_largest(candidates.pick(flat).abs(), positions_of(model, candidates), n)


def random(
    model: nn.Module, n: float, *, within: Weights | str | None = None, generator: torch.Generator | None = None
) -> Subnetwork:
    """Choose weights at random, each set of n with the same probability.

    Args:
        model: The network.
        n: How many weights, or which share of the candidates.
        within: The candidates: ``lw.named(pattern)`` or ``lw.subnetwork(index)``; all by default.
        generator: The source of randomness; a fixed seed if None.

    Returns:
        A selection for ``weights`` of ``fit``.

    Raises:
        UnsupportedError: If n is not a number, or above that of the candidates; if ``within`` is another rule.
        ModelError: If a candidate does not require a gradient.

    >>> len(random(nn.Linear(5, 3), 7).index)
    7
    """
    NUMBER.check("n", n)
    GENERATOR.check("generator", generator)
    positions = positions_of(model, candidates_by_name(model, within))
    like = torch.empty(0, dtype=torch.float64)
    return choose_largest(uniform((len(positions),), independent_generator(generator), like), positions, n)


POOL = 1000  # candidates that are compared at least, if there are so many


@outside_autocast
@torch.inference_mode(False)
def greedy(
    model: nn.Module,
    data: Iterable[object],
    likelihood: Likelihood | str,
    n: float,
    *,
    prior: Prior | float | None = None,
    within: Weights | str | None = None,
    pool: int | None = None,
    target_key: str | None = None,
    progress: bool | None = None,
) -> Subnetwork:
    r"""Choose weights one after another: the next one adds most to the predictive variance of those already chosen.

    That variance is the sum over data and outputs, $\mathrm{tr}\, J_S (H_{SS}/\phi + A_S)^{-1} J_S^\top$. It is exact
    among the candidates of the pool, those that have the largest variance alone, $|J_i|^2 / (H_{ii}/\phi + A_i)$.

    Args:
        model: The trained network, in evaluation mode.
        data: The training data, as for ``fit``.
        likelihood: As for ``fit``.
        n: How many weights, or which share of the candidates.
        prior: As for ``fit``. None takes the precision that maximises the evidence of the diagonal Laplace
            approximation.
        within: The candidates, as for ``by_variance``.
        pool: The number of candidates M that are compared; None takes 2 n, and 1,000 or all if that is less.
        target_key: As for ``fit``.
        progress: Whether to show progress bars; None shows them on a terminal.

    Returns:
        A selection for ``weights`` of ``fit``. For a smaller n and the same pool it is a part of it.

    Raises:
        UnsupportedError: If n is not a number, or above that of the candidates or the pool; if the matrices of
            the pool take more than four times the byte budget.

    Cost: four passes over the data as those of ``Full`` over the pool, 2 M² N C multiplications; 1.5 M n² for the
    choice. Memory: 16 M² + 16 M n bytes, and 8 M² once more for a while.

    >>> x, net = torch.randn(30, 3), nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    >>> len(greedy(net, [(x, x[:, :2])], "regression", 6).index)
    6
    """
    problem, batches, positions, count = read_candidates(
        model, data, likelihood, n, within, prior, target_key, progress
    )
    device, candidates = problem.network.device, len(positions)
    size = min(candidates, max(POOL, 2 * count)) if pool is None else _checked_pool(pool, count, candidates)
    refuse_large_result(24 * size**2 + 16 * size * count, device, f"a pool of {size} weights", "Lower n or pool")
    posterior = Diagonal(curvature="ggn").fit(problem, batches)
    if posterior.problem.learn_prior:
        posterior = MaximiseEvidence()(start_near_optimum(posterior))
    phi, added = dispersion_of(posterior), posterior.problem.prior.vector.double()
    kept = torch.arange(candidates, device=device)
    if size < candidates:
        alone = squared_gradients(problem, batches) / (curvature_diagonal(posterior) / phi + added)
        kept = alone.argsort(descending=True, stable=True)[:size].sort().values
    positions = positions.to(device)[kept]
    network = Network.build(model, batches.peek()[1].inputs, Subnetwork(positions))
    gram, curvature = (
        full_curvature(Sweep(network, problem.likelihood, batches, Seeds(seeds), "pool", closed=False), network).matrix
        for seeds in ("jacobian", "ggn")
    )
    curvature /= phi
    curvature.diagonal().add_(added[kept])
    chosen = choose_most_explaining(curvature, gram, count, float(added[kept].min()), batches.progress)
    return Subnetwork(positions[chosen].sort().values.cpu())


def _checked_pool(pool: int, count: int, candidates: int) -> int:
    """Return the size of a given pool; raise if it is too small."""
    integer().check("pool", pool)
    if pool < count:
        raise UnsupportedError(f"pool is {pool}; expected at least the {count} weights that are chosen from it.")
    return min(pool, candidates)


refuse_other_calls(globals())
