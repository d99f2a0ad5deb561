"""A lower bound of the evidence from blocks of data, for data too large for one pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, count, islice, repeat
from typing import Any

import torch
from torch import Tensor

from lapwing.core.data import Data
from lapwing.core.inputs import Inputs
from lapwing.core.processes import ALONE
from lapwing.core.settings import DATA, FLAG, NONE, POSITIVE, Rule, require, require_integer
from lapwing.curvature.seeds import root_seeds
from lapwing.errors import DataError, UnsupportedError
from lapwing.linalg.cholesky import cholesky
from lapwing.networks.forward import outside_autocast, refuse_training_mode
from lapwing.priors.kernel import prior_kernel
from lapwing.problem import Problem
from lapwing.tuners.evidence import Search
from lapwing.tuners.protocol import required_data

Term = Callable[[Problem], Tensor]  # the term of one block, under the prior and noise of a problem


def _term(inputs: Inputs, targets: Tensor, problem: Problem) -> Tensor:
    """Return a block's log-likelihood less half of log det(I + K/φ) of its kernel K, differentiable in prior and noise.

    The Jacobian is multiplied by the root of the likelihood's Hessian. Sums are float64.
    """
    network, likelihood = problem.network, problem.likelihood
    phi = likelihood.dispersion.to(network.device)
    tangent = network.linearise(inputs)
    f = tangent.f.double()
    y = likelihood.targets(f, targets)
    jacobians = tangent.jacobians(root_seeds(likelihood.root(f, y)).to(network.dtype)).double()
    kernel = prior_kernel(jacobians, problem.prior) / phi
    eye = torch.eye(len(kernel), dtype=kernel.dtype, device=kernel.device)
    logdet = 2 * cholesky(eye + kernel, "the kernel of a block of data").diagonal().log().sum()
    count = likelihood.count(f, y)
    fit = -likelihood.loss(f, y).sum() / phi - count * likelihood.log_normaliser(phi, network.output_shape[-1])
    return fit - 0.5 * logdet


def _no_term(problem: Problem) -> Tensor:
    """Return zero, for a process without data: it takes part in the sums over all."""
    return 0 * problem.prior.values.double().sum()


def terms(problem: Problem, data: Data, block: int, label: str = "blocks") -> Iterator[Term]:
    """Yield the term of each block; a batch is cut into blocks of at most ``block`` data."""
    for batch in data.batches(label):
        size = problem.network.count(batch.inputs)
        for start in range(0, size, block):
            rows = slice(start, min(start + block, size))
            yield partial(_term, problem.network.take(batch.inputs, rows), batch.targets[rows])


@outside_autocast
def evidence_bound(posterior: Any, data: Iterable[Any] | Data, block: int = 32) -> Tensor:
    r"""Return a lower bound of the log evidence of ``Full()``, from the kernels of blocks of data (Immer et al. 2023).

    $$ \log p(D \mid \tilde w) - \tfrac12 \|\tilde w - \mu\|_A^2
       - \tfrac12 \sum_b \log\det (I + J_b A^{-1} J_b^\top / \phi) $$

    By Fischer's inequality the log-determinant of the whole kernel is at most the sum over its diagonal blocks, so
    this is at most the evidence, and equal to it for one block.

    Cost: one pass over the data; memory (block C)², whatever the number of data or weights.

    Args:
        posterior: A posterior of any method, ``MapOnly()`` included: only its network, likelihood and prior are used.
        data: The training data in the form that ``fit`` takes.
        block: The largest number of data in a block; batches are not joined.

    Returns:
        The bound in nats, a scalar in float64.

    Raises:
        UnsupportedError: If ``block`` is not a positive integer.
        ModelError: If the model is in training mode, or its weights have changed since the fit.

    >>> import lapwing as lw
    >>> x = torch.linspace(-1, 1, 40).unsqueeze(1)
    >>> posterior = lw.fit(torch.nn.Linear(1, 1), [(x, x.sin())], "regression", method=lw.Full(), prior=1.0)
    >>> bool(lw.tuners.evidence_bound(posterior, [(x, x.sin())], block=10) < posterior.log_evidence())
    True
    """
    core = getattr(posterior, "posterior", posterior)  # the posterior inside the result of fit, or the one given
    Rule("a posterior that fit() made", lambda v: hasattr(v, "problem")).check("posterior", core)
    require_integer("block", block)
    network = core.problem.network
    refuse_training_mode(network.model)
    if core is not posterior:
        posterior.fingerprint.refuse_other(network.model)
    total = torch.zeros((), dtype=torch.float64, device=network.device)
    processes = getattr(posterior, "processes", ALONE)
    with processes.together():
        for term in terms(core.problem, network.reading(data, processes=processes), block):
            total = total + term(core.problem)
        total = processes.total(total)
    return total - 0.5 * core.problem.prior.penalty(core.theta.double())


@dataclass(frozen=True, eq=False)
class MaximiseBound:
    """A tuner that maximises ``evidence_bound`` by gradient steps on single blocks of data.

    A block's term times the number of blocks is an unbiased estimate of the bound, whatever the sizes of the blocks,
    and so is its gradient; nothing is summed over all data. The smaller the blocks, the looser the bound, and the
    more its optimal precisions exceed those of the evidence.

    Cost of a step: the layer-wise Jacobian of one block and a Cholesky factor of size block times C.

    Args:
        data: The training data; None takes those of ``fit``.
        block: The largest number of data in a block; batches are not joined.
        steps: The number of Adam steps.
        rate: The first learning rate of Adam; it falls linearly to zero.
        noise: Whether to learn the noise too, if the likelihood has one for all outputs.

    Raises:
        UnsupportedError: If a setting is out of range, or, when called, there are no data or no evidence.
        DivergedError: When called, if the last precision is out of range or the bound is not finite.

    >>> import lapwing as lw
    >>> x = torch.linspace(-1, 1, 40).unsqueeze(1)
    >>> tuner = lw.tuners.MaximiseBound(block=10, steps=20)
    >>> posterior = lw.fit(torch.nn.Linear(1, 1), [(x, x.sin())], "regression", tuner=tuner)
    >>> len(posterior.trace.steps)
    20
    """

    data: Iterable[Any] | Data | None = None
    block: int = 32
    steps: int = 300
    rate: float = 0.1
    noise: bool = False

    def __post_init__(self) -> None:
        require(self, data=DATA | NONE)
        require_integer("block", self.block)
        require_integer("steps", self.steps)
        POSITIVE.check("rate", self.rate)
        FLAG.check("noise", self.noise)

    def with_data(self, data: Data) -> MaximiseBound:
        """Return the tuner with these data, or unchanged if it has data."""
        return self if self.data is not None else replace(self, data=data)

    def __call__(self, posterior: Any) -> Any:
        """Return the posterior after the last step."""
        data = required_data("MaximiseBound", self.data, posterior.problem.network)
        search = Search.of(posterior, self.noise, "MaximiseBound", "estimate of the bound from one block")
        if search.noise and posterior.noise.ndim:
            raise UnsupportedError(
                "MaximiseBound(noise=True) learns one noise for all outputs, and this likelihood has one for each; "
                "use MaximiseEvidence, or Gaussian() with a single noise."
            )
        n_blocks, processes = sum(1 for _ in terms(posterior.problem, data, self.block, "counting")), data.processes
        if not any(processes.each(n_blocks)):
            raise DataError("the data have no blocks; expected at least one datum.")
        x = search.start.requires_grad_()
        optimiser = torch.optim.Adam([x], lr=self.rate)
        theta = posterior.theta.double()
        endless = chain.from_iterable(terms(posterior.problem, data, self.block) for _ in count())
        blocks = islice(endless, self.steps) if n_blocks else repeat(_no_term, self.steps)  # a part may be empty
        for number, term in enumerate(blocks):
            for group in optimiser.param_groups:
                group["lr"] = self.rate * (1 - number / self.steps)
            with torch.inference_mode(False), torch.enable_grad():
                own = n_blocks * term(search.at(*processes.entering(x)).problem)  # each process adds one of its blocks
                value = processes.total(own) - 0.5 * search.at(x).problem.prior.penalty(theta)
                search.record(x, float(value.detach()))
                optimiser.zero_grad()
                (-value / posterior.problem.network.selection.size).backward()
                optimiser.step()
        search.refuse_runaway()
        return search.finished(x)
