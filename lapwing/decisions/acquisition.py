"""The next inputs to label: those whose labels would tell the most about the network."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.utils.data import RandomSampler, SubsetRandomSampler, WeightedRandomSampler

from lapwing.data.inputs import Inputs
from lapwing.data.processes import samplers_of
from lapwing.decisions.collecting import as_batches, input_batches, refuse_tokens
from lapwing.errors import DataError, UnsupportedError
from lapwing.posteriors.base import Posterior
from lapwing.runtime.memory import working_memory
from lapwing.runtime.settings import NONE, Rule, integer, is_integer, one_of
from lapwing.values.gaussian import FunctionGaussian

if TYPE_CHECKING:
    from lapwing.fitted import Fitted

RULES = ("batch", "bald", "variance")
COPIES = 4  # float64 matrices of the joint covariance, or of the drawn functions, that exist at once
EXACT = 1000  # outputs of all candidates up to which their joint covariance is computed, by default
FUNCTIONS = 256  # that are drawn beyond
SHUFFLING = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)
SAMPLES = integer(2) | Rule("zero", lambda v: is_integer(v) and v == 0) | NONE


def choose_inputs(
    posterior: Fitted, pool: Inputs, n: int, *, by: str, candidates: int, samples: int | None, target_key: str | None,
    progress: bool | None,
) -> Tensor:  # fmt: skip
    """Return the numbers of the inputs to label; see ``Fitted.acquire``."""
    integer().check("n", n)
    one_of(RULES).check("by", by)
    integer(1).check("candidates", candidates)
    SAMPLES.check("samples", samples)
    refuse_tokens(posterior.network, "acquire")
    refuse_shuffled(pool, "pool")
    posterior._refuse_changed()
    with torch.no_grad():
        batches = input_batches(posterior, as_batches(posterior.network, pool), target_key, progress)
        if by != "batch":
            values = torch.cat([_values(posterior, batch, by) for batch in batches])
            _refuse_fewer(len(values), n)
            return values.argsort(descending=True, stable=True)[:n]
        outputs = posterior.network.output_shape[-1]
        kept = max(n, min(candidates, _most_candidates(posterior, samples)))
        numbers, inputs = _candidates(posterior, batches, kept)
        _refuse_fewer(len(numbers), n)
        few = samples == 0 or (samples is None and len(numbers) * outputs <= EXACT)
        blocks = _by_covariance(posterior, inputs) if few else _by_functions(posterior, inputs, samples)
        return numbers[greedy_information(*blocks, n).cpu()]


def refuse_shuffled(loader: object, name: str) -> None:
    """Raise if a loader shuffles: numbers of rows would be those of one pass, and say nothing about the data."""
    for sampler in samplers_of(loader):
        if isinstance(sampler, SHUFFLING) or getattr(sampler, "shuffle", False) is True:
            raise DataError(
                f"the {name} is a loader that shuffles, by {type(sampler).__name__}; expected one with a fixed order: "
                "rows are numbered in the order in which they come. Build it with shuffle=False, or give the inputs."
            )


def _refuse_fewer(count: int, n: int) -> None:
    if count < n:
        raise DataError(f"the pool has {count} inputs; expected at least n={n}. Ask for fewer, or give more.")


def _most_candidates(posterior: Fitted, samples: int | None) -> int:
    """Return how many inputs can be looked at together within the byte budget."""
    network = posterior.network
    numbers, outputs = working_memory(network.device) // (8 * COPIES), network.output_shape[-1]
    if samples == 0:
        return max(1, math.isqrt(numbers) // outputs)
    return max(1, numbers // ((samples or FUNCTIONS) * outputs))


def _values(posterior: Fitted, batch: Inputs, by: str) -> Tensor:
    """Return how much the label of each input by itself would tell, (B,) in float64 on the CPU."""
    if by == "bald":
        return posterior.posterior.predict(batch).mutual_information.double().cpu()
    belief = posterior.posterior(batch)
    if by == "variance":
        return belief.variance.double().sum(-1).cpu()
    weight = root_of(posterior, belief.mean).square().sum(-1)  # the diagonal of the Hessian in f
    return (belief.variance.double() * weight).sum(-1).cpu()


def root_of(posterior: Fitted, f: Tensor) -> Tensor:
    """Return R (B, C, K) in float64 with R Rᵀ the Fisher information of a target about the outputs f (B, C)."""
    likelihood, f = posterior.likelihood, f.double()
    certain = FunctionGaussian(f, f.new_zeros(*f.shape, f.shape[-1]))
    drawn = likelihood.predict(certain).sample(1, torch.Generator(f.device).manual_seed(0))[0]
    noise = likelihood.noise_variance
    if likelihood.ratios is not None and noise is not None:  # each output has its own noise
        return torch.diag_embed(noise.to(f).rsqrt().expand(f.shape))
    root: Tensor = likelihood.root(f, likelihood.targets(f, drawn))  # does not depend on the targets
    return root / likelihood.dispersion.to(root).sqrt()


def _candidates(posterior: Fitted, batches: Iterable[Inputs], kept: int) -> tuple[Tensor, Inputs]:
    """Return the numbers (m,) of the inputs that tell most by themselves, and these inputs as one batch.

    No more than twice as many inputs are held at a time.
    """
    network = posterior.network
    values, numbers, parts = torch.zeros(0, dtype=torch.float64), torch.zeros(0, dtype=torch.long), list[Inputs]()
    count = 0
    for batch in batches:
        own = _values(posterior, batch, "batch")
        best = own.argsort(descending=True, stable=True)[:kept].sort().values
        values, numbers = torch.cat([values, own[best]]), torch.cat([numbers, best + count])
        parts.append(network.take(batch, best))
        count += len(own)
        if len(values) > kept:
            best = values.argsort(descending=True, stable=True)[:kept].sort().values
            parts = [network.take(_one_batch(parts), best)]
            values, numbers = values[best], numbers[best]
    return numbers, _one_batch(parts)


def _one_batch(parts: list[Inputs]) -> Inputs:
    """Return the inputs of several batches as one."""
    if len(parts) == 1:
        return parts[0]
    if all(isinstance(part, Tensor) for part in parts):
        return torch.cat(parts)
    raise UnsupportedError(
        "by='batch' and a loader whose inputs are not one tensor; expected one tensor for each batch. Give the pool as "
        "one batch of inputs, or use by='bald'."
    )


# The diagonal blocks (m, k, k) of M = Rᵀ K R, with K the covariance of the outputs of m inputs and R the root of their
# Fisher information, and the function that returns the blocks of one input with all, (k, m, k).
Blocks = tuple[Tensor, Callable[[int], Tensor]]


def matrix_blocks(matrix: Tensor) -> Blocks:
    """Return the blocks of M (m, k, m, k)."""
    each = torch.arange(len(matrix), device=matrix.device)
    return matrix[each, :, each], lambda number: matrix[number].clone()


def feature_blocks(features: Tensor) -> Blocks:
    """Return the blocks of M = F Fᵀ, which is not formed, for features F (m, k, S)."""
    return features @ features.mT, lambda number: torch.einsum("ks,mls->kml", features[number], features)


def _by_covariance(posterior: Fitted, inputs: Inputs) -> Blocks:
    belief = posterior.posterior(inputs, True)
    root = root_of(posterior, belief.mean)  # (m, C, k)
    joint = belief.cov.double().reshape(*root.shape[:2], *root.shape[:2])
    return matrix_blocks(torch.einsum("bkad,adl->bkal", torch.einsum("bck,bcad->bkad", root, joint), root))


def _by_functions(posterior: Fitted, inputs: Inputs, samples: int | None) -> Blocks:
    """Return the blocks for Rᵀ d / √(S - 1) of the deviations d of S drawn functions from their mean."""
    posterior.base.require(Posterior.function_samples, "function samples; give samples=0")
    generator = torch.Generator(posterior.network.device).manual_seed(0)
    try:
        drawn = posterior.posterior.function_samples(inputs, samples or FUNCTIONS, generator).double()
    except UnsupportedError:  # a method with a few functions, whose joint covariance is one product
        if samples is not None:
            raise
        return _by_covariance(posterior, inputs)
    root = root_of(posterior, drawn.mean(0))
    steps = (drawn - drawn.mean(0)) / math.sqrt(len(drawn) - 1)
    return feature_blocks(torch.einsum("bck,sbc->bks", root, steps))


def greedy_information(diagonal: Tensor, row: Callable[[int], Tensor], n: int) -> Tensor:
    r"""Return n of m blocks, in the order in which each adds most to log det(I + M) of the chosen blocks.

    A pivoted Cholesky factorisation of I + M by blocks: the gain of block i is log det(I + S_ii), with S the
    complement of the chosen blocks. Its diagonal blocks are kept, and of the rest the rows of each choice are computed.

    Cost: n² m k³ multiplications besides the rows of M; memory for n m k² numbers.

    >>> matrix = torch.tensor([[4.0, 3.9, 0.0], [3.9, 3.9, 0.0], [0.0, 0.0, 1.0]])
    >>> greedy_information(*matrix_blocks(matrix.reshape(3, 1, 3, 1)), 2).tolist()
    [0, 2]
    """
    count, size, _ = diagonal.shape
    eye = torch.eye(size, dtype=diagonal.dtype, device=diagonal.device)
    complement = diagonal + eye
    rows = complement.new_zeros(n * size, count, size)
    free = torch.ones(count, dtype=torch.bool, device=complement.device)
    order = []
    for step in range(n):
        # Rounding may leave an eigenvalue of the complement below one, where it is at least that.
        gains = torch.linalg.cholesky_ex(complement).L.diagonal(dim1=-2, dim2=-1).clamp_min(1).log().sum(-1)
        best = int(torch.where(free, gains, -1.0).argmax())
        order.append(best)
        free[best] = False
        before = rows[: step * size]
        across = row(best) - torch.einsum("tk,tml->kml", before[:, best], before)
        across[:, best] += eye
        pivot = across[:, best]
        lower = torch.linalg.cholesky(0.5 * (pivot + pivot.mT))
        new = torch.linalg.solve_triangular(lower, across.reshape(size, -1), upper=False).reshape(size, count, size)
        rows[step * size : (step + 1) * size] = new
        complement = complement - torch.einsum("tmk,tml->mkl", new, new)
    return torch.tensor(order, device=complement.device)
