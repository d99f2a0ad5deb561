"""The next inputs to label: those whose labels would tell the most about the network."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from lapwing.core.gaussian import FunctionGaussian
from lapwing.core.inputs import Inputs
from lapwing.core.memory import working
from lapwing.core.settings import integer, one_of, require_integer
from lapwing.decisions.collecting import input_batches, refuse_tokens
from lapwing.errors import DataError, UnsupportedError

RULES = ("batch", "bald", "variance")
COPIES = 4  # float64 matrices of the joint covariance that exist at once


def acquired(
    posterior: Any, pool: Inputs, n: int, *, by: str, candidates: int, target_key: str | None, progress: bool | None
) -> Tensor:
    """Return the numbers of the inputs to label; see ``Decides.acquire``."""
    require_integer("n", n)
    one_of(RULES).check("by", by)
    integer(1).check("candidates", candidates)
    refuse_tokens(posterior.network, "acquire")
    posterior._unchanged()
    with torch.no_grad():
        batches = input_batches(posterior, pool, target_key, progress)
        if by != "batch":
            values = torch.cat([_values(posterior, batch, by) for batch in batches])
            _refuse_fewer(len(values), n)
            return values.argsort(descending=True, stable=True)[:n]
        kept = max(n, min(candidates, _fitting(posterior)))
        numbers, inputs = _candidates(posterior, batches, kept)
        _refuse_fewer(len(numbers), n)
        return numbers[greedy_information(*_information(posterior, inputs), n).cpu()]


def _refuse_fewer(count: int, n: int) -> None:
    if count < n:
        raise DataError(f"the pool has {count} inputs; expected at least n={n}. Ask for fewer, or give more.")


def _fitting(posterior: Any) -> int:
    """Return how many inputs can have a joint covariance within the byte budget."""
    network = posterior.network
    return max(1, int(math.sqrt(working(network.device) / (8 * COPIES))) // network.output_shape[-1])


def _values(posterior: Any, batch: Inputs, by: str) -> Tensor:
    """Return how much the label of each input by itself would tell, (B,) in float64 on the CPU."""
    if by == "bald":
        information: Tensor = posterior.posterior.predict(batch).mutual_information
        return information.double().cpu()
    belief = posterior.posterior(batch)
    if by == "variance":
        return belief.variance.double().sum(-1).cpu()
    weight = root_of(posterior, belief.mean).square().sum(-1)  # the diagonal of the Hessian in f
    return (belief.variance.double() * weight).sum(-1).cpu()


def root_of(posterior: Any, f: Tensor) -> Tensor:
    """Return R (B, C, K) in float64 with R Rᵀ the Fisher information of a target about the outputs f (B, C)."""
    likelihood, f = posterior.likelihood, f.double()
    certain = FunctionGaussian(f, f.new_zeros(*f.shape, f.shape[-1]))
    drawn = likelihood.predict(certain).sample(1, torch.Generator(f.device).manual_seed(0))[0]
    if likelihood.ratios is not None:  # each output has its own noise
        return torch.diag_embed(likelihood.noise_variance.to(f).rsqrt().expand(f.shape))
    root: Tensor = likelihood.root(f, likelihood.targets(f, drawn))  # does not depend on the targets
    return root / likelihood.dispersion.to(root).sqrt()


def _candidates(posterior: Any, batches: Iterable[Inputs], kept: int) -> tuple[Tensor, Inputs]:
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


def _information(posterior: Any, inputs: Inputs) -> tuple[Tensor, int]:
    """Return Rᵀ K R (m k, m k) of the joint covariance K of the outputs, and k."""
    belief = posterior.posterior(inputs, True)
    root = root_of(posterior, belief.mean)  # (m, C, k)
    count, outputs, size = root.shape
    joint = belief.cov.double().reshape(count, outputs, count, outputs)
    half = torch.einsum("bck,bcad->bkad", root, joint)
    return torch.einsum("bkad,adl->bkal", half, root).reshape(count * size, count * size), size


def greedy_information(matrix: Tensor, size: int, n: int) -> Tensor:
    r"""Return n of m blocks, in the order in which each adds most to log det(I + M) of the chosen blocks.

    A pivoted Cholesky factorisation of I + M by blocks: the gain of block i is log det(I + S_ii), with S the
    complement of the chosen blocks, of which the diagonal blocks are kept and the columns of each choice are computed.

    Args:
        matrix: M (m k, m k), symmetric and positive semi-definite, float64.
        size: k, the rows of a block.
        n: How many to choose, at most m.

    Cost: n² m k³ multiplications; memory for n m k² numbers besides the matrix.

    >>> greedy_information(torch.tensor([[4.0, 3.9, 0.0], [3.9, 3.9, 0.0], [0.0, 0.0, 1.0]]), 1, 2).tolist()
    [0, 2]
    """
    count = len(matrix) // size
    blocks = matrix.reshape(count, size, count, size)
    eye = torch.eye(size, dtype=matrix.dtype, device=matrix.device)
    each = torch.arange(count, device=matrix.device)
    complement = blocks[each, :, each] + eye  # (m, k, k)
    columns = matrix.new_zeros(n * size, count, size)
    free = torch.ones(count, dtype=torch.bool, device=matrix.device)
    order = []
    for step in range(n):
        gains = torch.linalg.cholesky_ex(complement).L.diagonal(dim1=-2, dim2=-1).clamp_min(1).log().sum(-1)
        best = int(torch.where(free, gains, -1.0).argmax())
        order.append(best)
        free[best] = False
        before = columns[: step * size]
        across = blocks[best] - torch.einsum("tk,tml->kml", before[:, best], before)  # (k, m, k)
        across[:, best] += eye
        lower = torch.linalg.cholesky(0.5 * (across[:, best] + across[:, best].mT))
        new = torch.linalg.solve_triangular(lower, across.reshape(size, -1), upper=False).reshape(size, count, size)
        columns[step * size : (step + 1) * size] = new
        complement = complement - torch.einsum("tmk,tml->mkl", new, new)
    return torch.tensor(order, device=matrix.device)
