"""Mean-field variational inference over the weights of the last layer, with the features of the trained network."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lapwing.data.batches import Data
from lapwing.data.inputs import Inputs
from lapwing.errors import NumericalError, UnsupportedError
from lapwing.likelihoods.base import Likelihood
from lapwing.methods.base import NUMBER, Conformance, Cost, Method, Work, Workload, refuse_g_prior
from lapwing.networks.network import Network
from lapwing.networks.passes import is_single_map
from lapwing.networks.selection import LastLayer, Weights
from lapwing.posteriors.sampled import MeanFieldPosterior, feature_function
from lapwing.problem import FeatureTable, Problem, Statistics
from lapwing.runtime.memory import chunks, refuse_large_result
from lapwing.runtime.settings import POSITIVE, integer, setting
from lapwing.runtime.threads import ProgressBar, derived_generator, normal

ITERATIONS = 10  # of L-BFGS in a step of the progress bar
HISTORY = 20  # steps that L-BFGS remembers
COPIES = 6  # numbers that a drawn output takes while its gradient is computed
USUAL = 150  # evaluations of the bound in a usual fit


@dataclass(frozen=True)
class VariationalLastLayer(Method):
    """A mean-field Gaussian over the last layer's weights, as a baseline: the one with the highest evidence bound.

    The features come from the trained network and are computed once. For Gaussian noise the optimum has a closed form:
    the exact posterior mean, and variances that are one over the diagonal of the exact precision. For other
    likelihoods L-BFGS maximises the bound, an average over fixed draws of the logits (local reparameterisation), from
    the diagonal Laplace approximation. Only the last layer is uncertain, which is what ``fit`` selects for it.

    Args:
        samples: Number of draws of the outputs at every datum, an even number: each comes with its mirror image.
        tolerance: The largest slope of the bound at which the search ends; about the error of a mean in units of its
            standard deviation.
        max_steps: The largest number of iterations of L-BFGS.
        seed: Seed of the draws.

    Raises:
        UnsupportedError: If a setting is not such a number; in ``fit``, for other weights than those of a last layer
            that is one linear map and makes the outputs, a g-prior, or features of all data that take more than four
            times the byte budget.
        NumericalError: In ``fit``, if the bound is not finite, or the search did not converge.

    Cost: one pass over the data, and for likelihoods other than Gaussian some hundred products of all features with
    the weights. A prediction takes one forward pass. Without a prior, ``fit`` learns one with ``Kron`` beforehand.
    Exact when: the likelihood is Gaussian and the features are orthogonal.

    >>> from lapwing.api import fit
    >>> x = torch.linspace(-1, 1, 20).unsqueeze(1)
    >>> net = torch.nn.Sequential(torch.nn.Linear(1, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    >>> fit(net, [(x, x.sin())], "regression", method=VariationalLastLayer(), prior=1.0).weight_samples(3).shape
    torch.Size([3, 9])
    """

    samples: int = setting(8, integer(2))
    tolerance: float = setting(1e-5, POSITIVE)
    max_steps: int = setting(1000, integer())
    seed: int = setting(0, integer(0))
    needs_prior: ClassVar[bool] = True
    timed: ClassVar[bool] = False  # the number of iterations is not known before
    weights: ClassVar[Weights] = LastLayer()
    conformance: ClassVar[Conformance] = Conformance(
        never_exact="its covariance is diagonal, and its mean that of the last layer",
        small=lambda model: {"": VariationalLastLayer(samples=4)},
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.samples % 2:
            raise UnsupportedError(f"samples is {self.samples}; expected an even number.")

    def fit(self, problem: Problem, data: Data, generator: torch.Generator | None = None) -> MeanFieldPosterior:
        """Return the posterior; ``generator`` is not used, ``seed`` fixes the result."""
        network = problem.network
        _refuse_other_weights(network)
        refuse_g_prior(self, problem.prior)
        rows, statistics = read_features(problem, data, self.samples)
        problem = problem.with_residual_noise(statistics).with_known_prior()
        bound = Bound.of(rows, problem, statistics)
        if problem.likelihood.noise_variance is not None:
            mean, variance = bound.gaussian_optimum(problem.likelihood.noise_variance)
            elbo = bound.gaussian(problem.likelihood.noise_variance, mean, variance)
        else:
            mean, variance, elbo = BoundSearch.of(self, bound).run(data.progress)
        return MeanFieldPosterior(problem, mean, variance, statistics, network.theta(), elbo)

    def cost(self, workload: Workload) -> Cost:
        heads = [block.size for block in workload.blocks if block.closed]
        if not heads or len(workload.output_shape) > 1:
            return Cost.unsupported("the network does not end in one linear layer that each input uses once")
        size, outputs = heads[-1], workload.outputs
        width = size // outputs
        held = 8 * workload.data * (width + (1 + self.samples // 2) * outputs)
        each = 6 * size + NUMBER * COPIES * self.samples * outputs
        fit, predict = Work(workload.forward, USUAL * each), Work(workload.forward, 2 * size)
        note = "only the last layer; for Gaussian noise it takes one pass"
        return workload.cost(16 * size, held + workload.activations, fit, predict, note=note)


def _refuse_other_weights(network: Network) -> None:
    """Raise unless the selected weights belong to one linear map."""
    if network.selection.index is not None or not is_single_map(network):
        raise UnsupportedError(
            f"VariationalLastLayer() with the weights {', '.join(network.selection.names)!s:.80}; expected those of a "
            "last layer that is one linear map. Leave out weights=..., or use Diagonal()."
        )


def read_features(problem: Problem, data: Data, samples: int) -> tuple[FeatureTable, Statistics]:
    """Return the features of all data, and the loss of the network itself, by one pass over the data.

    Raise once the features so far, with ``samples`` draws of every output, take too much memory.
    """
    network, likelihood, count = problem.network, problem.likelihood, 0
    run, weights = feature_function(network), _matrix(network, network.theta().double())
    draws = 1 if likelihood.noise_variance is not None else samples

    def features(inputs: Inputs) -> tuple[Tensor, Tensor]:
        nonlocal count
        a = network.in_chunks(inputs, run)
        f = a @ weights.mT
        count += len(a)
        refuse_large_result(
            16 * count * (a.shape[1] + draws * f.shape[-1]), network.device,
            f"VariationalLastLayer() with the features of {count} data",
            "Use fewer data, or Kron() with weights=lw.last_layer",
        )  # fmt: skip
        return a, f

    return FeatureTable.read(network, likelihood, data, features)


def _matrix(network: Network, theta: Tensor) -> Tensor:
    """Return the weights theta (P,) of the last layer as a matrix (C, D), with the bias as its last column."""
    return network.layout[0].arrange(network.selection.split(theta))[0]


@dataclass(frozen=True, eq=False)
class Bound:
    """The evidence bound E_q log p(y | f) - KL(q | prior) of q = N(mean, diag(variance)), in nats."""

    a: Tensor  # the features, (n, D)
    y: Tensor
    likelihood: Likelihood
    precision: Tensor  # A of the prior, (C, D)
    centre: Tensor  # the mean of the prior, (C, D)
    start: Tensor  # the weights of the network, (C, D)
    constant: float  # the normaliser of the likelihood

    @classmethod
    def of(cls, rows: FeatureTable, problem: Problem, statistics: Statistics) -> Bound:
        network, prior, likelihood = problem.network, problem.prior, problem.likelihood
        theta = network.theta().double()
        precision = _matrix(network, prior.vector.detach().to(theta))
        centre = _matrix(network, torch.zeros_like(theta) + prior.mean)
        normaliser = likelihood.log_normaliser(likelihood.dispersion, statistics.outputs)
        constant = -statistics.data * float(normaliser)
        return cls(rows.u, rows.y, likelihood, precision, centre, _matrix(network, theta), constant)

    def kl(self, mean: Tensor, variance: Tensor) -> Tensor:
        """Return KL(q | prior)."""
        scaled = self.precision * variance
        return 0.5 * (scaled - 1 - scaled.log() + self.precision * (mean - self.centre).square()).sum()

    def gaussian_optimum(self, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Return the optimum for Gaussian noise of this variance, () or (C,).

        The exact posterior mean of every output, and one over the diagonal of its exact precision.
        """
        a, noise = self.a, self._each_output(noise)
        gram, target = a.mT @ a, (self._y - a @ self.centre.mT).mT @ a / noise[:, None]
        means = []
        for scale, precision, right in zip(noise, self.precision, target, strict=True):
            factor = torch.linalg.cholesky(gram / scale + precision.diag())
            means.append(torch.cholesky_solve(right[:, None], factor)[:, 0])
        mean = self.centre + torch.stack(means)
        variance = 1 / (gram.diagonal() / noise[:, None] + self.precision)
        if not bool(torch.isfinite(mean).all()):
            raise NumericalError("the posterior mean of the last layer is not finite; scale inputs and targets.")
        return mean, variance

    def gaussian(self, noise: Tensor, mean: Tensor, variance: Tensor) -> float:
        """Return the bound for Gaussian noise of this variance, () or (C,), in closed form."""
        a, noise = self.a, self._each_output(noise)
        squares = (self._y - a @ mean.mT).square() + a.square() @ variance.mT
        likelihood = -0.5 * (squares / noise + (2 * math.pi * noise).log()).sum()
        return float(likelihood - self.kl(mean, variance))

    @property
    def _y(self) -> Tensor:
        return self.y.reshape(len(self.a), -1)

    def _each_output(self, noise: Tensor) -> Tensor:
        return noise.to(self.a).expand(len(self.start))

    def laplace_variance(self) -> Tensor:
        """Return the variances of the diagonal Laplace approximation at the network's weights, (C, D)."""
        f = self.a @ self.start.mT
        if self.likelihood.has_hessian:
            diagonal = self.likelihood.hessian(f, self.y).diagonal
        else:
            diagonal = self.likelihood.root(f, self.y).square().sum(-1)
        curvature = diagonal.to(f).mT @ self.a.square() / float(self.likelihood.dispersion)
        return 1 / (self.precision + curvature)


@dataclass(frozen=True, eq=False)
class BoundSearch:
    """The search for the optimum: the bound as an average over fixed draws, in units of the Laplace approximation."""

    settings: VariationalLastLayer
    bound: Bound
    noise: Tensor  # (S/2, n, C)
    unit: Tensor  # standard deviations of the start, (C, D)

    @classmethod
    def of(cls, settings: VariationalLastLayer, bound: Bound) -> BoundSearch:
        generator = derived_generator(torch.Generator().manual_seed(settings.seed), torch.empty(0))
        a, outputs = bound.a, len(bound.start)
        # Row by row, so that the draws of a datum do not depend on the number of data.
        noise = normal((len(a), settings.samples // 2, outputs), generator, a).transpose(0, 1).contiguous()
        return cls(settings, bound, noise, bound.laplace_variance().sqrt())

    def run(self, progress: bool) -> tuple[Tensor, Tensor, float]:
        """Return mean and variance of the optimum, and its bound; raise if it is not reached."""
        step, width = (torch.zeros_like(self.unit, requires_grad=True) for _ in range(2))
        optimiser = torch.optim.LBFGS(
            [step, width], max_iter=ITERATIONS, history_size=HISTORY, tolerance_grad=self.settings.tolerance,
            tolerance_change=0.0, line_search_fn="strong_wolfe",
        )  # fmt: skip
        bar = ProgressBar(range(0, self.settings.max_steps, ITERATIONS), "evidence bound", progress)
        slope = math.inf
        for _ in bar:
            optimiser.step(lambda: self._loss(step, width))
            value = float(self._loss(step, width))
            slope = float(torch.stack([t.grad.abs().max() for t in (step, width)]).max())  # type: ignore[union-attr]
            if not (math.isfinite(value) and math.isfinite(slope)):
                raise NumericalError(
                    f"VariationalLastLayer: the evidence bound is {-value} with a slope of {slope}; expected finite "
                    "numbers. Scale the inputs, or raise the prior precision."
                )
            bar.show(bound=-value)
            if slope <= self.settings.tolerance:
                mean, deviation = self._weights(step.detach(), width.detach())
                return mean, deviation.square(), -value
        raise NumericalError(
            f"VariationalLastLayer: the slope of the evidence bound is {slope:.2g} after {self.settings.max_steps} "
            f"iterations; expected {self.settings.tolerance:g}. Raise max_steps, tolerance or the prior precision."
        )

    def _weights(self, step: Tensor, width: Tensor) -> tuple[Tensor, Tensor]:
        """Return means and standard deviations, (C, D)."""
        return self.bound.start + self.unit * step, self.unit * width.exp()

    def _loss(self, step: Tensor, width: Tensor) -> Tensor:
        """Return the negative bound, with its gradients in ``step.grad`` and ``width.grad``."""
        step.grad = width.grad = None
        bound = self.bound
        phi, count = float(bound.likelihood.dispersion), 2 * len(self.noise)
        each = 8 * COPIES * self.settings.samples * len(bound.start) + 8 * bound.a.shape[1]
        total = torch.zeros((), dtype=torch.float64, device=bound.a.device)
        with torch.enable_grad():
            for part in chunks(len(bound.a), each, bound.a.device):
                mean, deviation = self._weights(step, width)
                a, noise = bound.a[part], self.noise[:, part]
                spread = noise * (a.square() @ deviation.square().mT).sqrt()
                f = a @ mean.mT + torch.cat([spread, -spread])  # (S, B, C)
                y = bound.y[part].expand(count, *bound.y[part].shape)
                loss = bound.likelihood.loss(f.flatten(0, 1), y.flatten(0, 1)).sum() / (count * phi)
                loss.backward()
                total = total + loss.detach()
            mean, deviation = self._weights(step, width)
            divergence = bound.kl(mean, deviation.square())
            divergence.backward()
        return total + divergence.detach() - bound.constant
