"""The rule that chooses single weights one after another, with those already chosen accounted for."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from lapwing.core.memory import refuse_beyond
from lapwing.core.settings import require_integer
from lapwing.curvature.full import full_curvature
from lapwing.curvature.seeds import Seeds
from lapwing.curvature.sweep import Sweep
from lapwing.errors import UnsupportedError
from lapwing.likelihoods.protocol import Likelihood
from lapwing.linalg.greedy import most_explaining
from lapwing.methods.diagonal import Diagonal
from lapwing.networks.forward import outside_autocast
from lapwing.networks.network import Network
from lapwing.networks.selection import Subnetwork, Weights
from lapwing.priors.bound import Prior
from lapwing.subnetworks.by_data import curvature_diagonal, dispersion_of, problem_and_data, squared_gradients
from lapwing.subnetworks.candidates import NUMBER, count_of, positions_of
from lapwing.tuners.evidence import MaximiseEvidence, start_near_optimum

POOL = 1000  # candidates that are compared at least, if there are so many


@outside_autocast
@torch.inference_mode(False)
def greedy(
    model: nn.Module,
    data: Iterable[Any],
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
        UnsupportedError: If n is no number of weights, or above that of the candidates or the pool; if the matrices of
            the pool take more than four times the byte budget.

    Cost: four passes over the data as those of ``Full`` over the pool, 2 M² N C multiplications; 1.5 M n² for the
    choice. Memory: 16 M² + 16 M n bytes, and 8 M² once more for a while.

    >>> x, net = torch.randn(30, 3), nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    >>> len(greedy(net, [(x, x[:, :2])], "regression", 6).index)
    6
    """
    NUMBER.check("n", n)
    problem, batches = problem_and_data(model, data, likelihood, within, prior, target_key, progress)
    device, candidates = problem.network.device, problem.network.selection.size
    count = count_of(n, candidates)
    size = min(candidates, max(POOL, 2 * count)) if pool is None else _pool(pool, count, candidates)
    refuse_beyond(24 * size**2 + 16 * size * count, device, f"a pool of {size} weights", "Lower n or pool")
    posterior = Diagonal(curvature="ggn").fit(problem, batches)
    if posterior.problem.learn_prior:
        posterior = MaximiseEvidence()(start_near_optimum(posterior))
    phi, added = dispersion_of(posterior), posterior.problem.prior.vector.double()
    kept = torch.arange(candidates, device=device)
    if size < candidates:
        alone = squared_gradients(problem, batches) / (curvature_diagonal(posterior) / phi + added)
        kept = alone.argsort(descending=True, stable=True)[:size].sort().values
    positions = positions_of(model, problem.network.selection).to(device)[kept]
    network = Network.build(model, batches.look()[1].inputs, Subnetwork(positions))
    gram, curvature = (
        full_curvature(Sweep(network, problem.likelihood, batches, Seeds(seeds), "pool", closed=False), network).matrix
        for seeds in ("jacobian", "ggn")
    )
    curvature /= phi
    curvature.diagonal().add_(added[kept])
    chosen = most_explaining(curvature, gram, count, float(added[kept].min()), batches.progress)
    return Subnetwork(positions[chosen].sort().values.cpu())


def _pool(pool: int, count: int, candidates: int) -> int:
    """Return the size of a given pool; raise if it is too small."""
    require_integer("pool", pool)
    if pool < count:
        raise UnsupportedError(f"pool is {pool}; expected at least the {count} weights that are chosen from it.")
    return min(pool, candidates)
