"""IVON: a variational optimiser that learns a Gaussian over all weights while it trains (Shen et al. 2024)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from lapwing.data.batches import Data
from lapwing.data.inputs import Batch
from lapwing.data.streams import shuffle_batches, steps_of_pass
from lapwing.errors import NumericalError, UnsupportedError
from lapwing.methods.base import NUMBER, Conformance, Cost, Method, Work, Workload, refuse_g_prior
from lapwing.posteriors.sampled import Drawn, mean_of
from lapwing.priors import Isotropic
from lapwing.problem import Problem, Statistics, summed_loss
from lapwing.runtime.settings import BELOW_ONE, NONE, POSITIVE, integer, setting
from lapwing.runtime.states import SMALLEST, WEIGHTS, saved, stored
from lapwing.runtime.threads import ProgressBar, Stream, derived_generator, normal

DECAY = 1e-4  # weight decay without a prior, the default of the package
FORGOTTEN = 5.0  # after many steps the initial curvature has the weight exp(-FORGOTTEN), unless beta2 is given
LEAST_BETA2 = 0.999  # an average over fewer steps would be noise: a step sees the curvature at one drawn point
FAR = 10.0  # rise of the loss, in nats for each datum or times the loss at the start, that counts as divergence


@dataclass(frozen=True)
class IVON(Method):
    """A diagonal Gaussian over the weights, learned by the variational optimiser IVON, as a baseline.

    The optimiser goes on from the weights of the model, trained or not, on mini-batches. It maximises the evidence
    bound over the mean and the variance of every weight, and costs about as much as Adam. The model is not changed: a
    copy of its weights moves, in evaluation mode, so that normalisation layers keep their statistics and dropout is
    off. Predictions put draws of the weights into the network; their mean is not the network's output.

    Needs the package ``ivon-opt``: ``pip install 'lapwing[ivon]'``.

    Args:
        epochs: Passes over the data.
        learning_rate: The first learning rate; it falls to zero by a cosine.
        batch_size: Rows in a mini-batch.
        hess_init: The curvature of the mean loss that every weight starts with; the first variance is
            φ/(n (hess_init + weight decay)).
        beta1: Momentum of the gradient.
        beta2: Momentum of the curvature. None takes 1 - 5/steps, with which ``hess_init`` is forgotten at the end, but
            0.999 at least: below 5,000 steps the curvature stays near ``hess_init``.
        weight_decay: Weight decay. None takes that of a given prior with precision A, φ A/n for the dispersion φ and n
            data; without a prior 1e-4.
        samples: Number of draws behind a prediction.
        seed: Seed of the mini-batches and of the weights drawn in training; draw k of a prediction has ``seed + k``.

    Raises:
        UnsupportedError: If a setting is not one of the above; in ``fit``, without the package, for a g-prior, or for a
            prior with several precisions in one parameter.
        NumericalError: In ``fit``, if the loss is not finite, or rises too far.

    Cost: ``epochs`` of training; two numbers for each weight. A prediction takes ``samples`` forward passes.
    Exact when: never; it is a baseline.

    >>> IVON(epochs=10).learning_rate
    0.1
    """

    epochs: int = setting(50, integer())
    learning_rate: float = setting(0.1, POSITIVE)
    batch_size: int = setting(128, integer())
    hess_init: float = setting(1.0, POSITIVE)
    beta1: float = setting(0.9, BELOW_ONE)
    beta2: float | None = setting(None, BELOW_ONE | NONE)
    weight_decay: float | None = setting(None, POSITIVE | NONE)
    samples: int = setting(32, integer(2))  # the spread of one sample is not defined
    seed: int = setting(0, integer(0))
    conformance: ClassVar[Conformance] = Conformance(
        never_exact="its Gaussian has independent weights, and comes from stochastic steps",
        small=lambda model: {"": IVON(2, 1e-3, batch_size=4, samples=2)},
    )

    def fit(self, problem: Problem, data: Data, generator: torch.Generator | None = None) -> GaussianDrawsPosterior:
        """Return the posterior; ``generator`` is not used, ``seed`` fixes the result."""
        package()
        network = problem.network
        start = summed_loss(network, problem.likelihood, data)
        problem, *moments = VariationalDescent.of(self, problem, data, start).run(data.progress)
        posterior = GaussianDrawsPosterior(
            problem.with_known_prior(), start, network.theta(), self.samples, self.seed, *moments
        )
        statistics = summed_loss(mean_of(posterior.outputs), problem.likelihood, data, "outputs of a draw")
        return replace(posterior, statistics=statistics)

    def cost(self, workload: Workload) -> Cost:
        stored = workload.itemsize * 2 * workload.weights
        fit = Work(self.epochs * workload.training + (1 + self.samples) * workload.forward)
        steps = self.epochs * max(1.0, workload.data / self.batch_size)
        once = Work(16 * NUMBER * steps * workload.weights)
        predict = Work(self.samples * workload.forward)
        peak = 12 * workload.itemsize * workload.weights + workload.activations
        return workload.cost(stored, peak, fit, predict, once, f"{self.epochs} epochs; needs lapwing[ivon]")

    def trial(self, workload: Workload) -> IVON:
        """Return the method with one epoch."""
        return replace(self, epochs=1)


def package() -> Any:
    """Return the module ``ivon``; raise if it is not installed."""
    try:
        import ivon
    except ImportError as error:
        raise UnsupportedError(
            "IVON() needs the package ivon-opt, which is not installed: pip install 'lapwing[ivon]'."
        ) from error
    return ivon


@dataclass(frozen=True, eq=False)
class VariationalDescent:
    """IVON on the mean loss at unit dispersion.

    With the effective sample size n/φ and the weight decay δ = φ A/n the variance 1/(n/φ (h + δ)) is 1/(n h/φ + A),
    where h estimates the diagonal of the Hessian of the mean loss.
    """

    settings: IVON
    problem: Problem
    data: Data
    start: Statistics
    steps: int  # in one pass over the data
    pieces: tuple[slice, ...]  # of the weights, each with one precision

    @classmethod
    def of(cls, settings: IVON, problem: Problem, data: Data, start: Statistics) -> VariationalDescent:
        """Return the training; raise if the prior is none that the optimiser can take."""
        prior, selection = problem.prior, problem.network.selection
        problem = problem.with_residual_noise(start)
        refuse_g_prior(settings, prior)
        quiet = replace(data, progress=False)  # there is one progress bar, for the steps
        steps = steps_of_pass(quiet, settings.batch_size)
        pieces, vector = tuple(selection.slices.values()), prior.vector
        if settings.weight_decay is not None or problem.learn_prior or prior.is_isotropic:
            pieces = (slice(0, selection.size),)
        elif selection.index is not None:
            raise UnsupportedError(
                f"the prior {type(prior.given).__name__} with single weights; expected isotropic() for a subnetwork, "
                "or whole parameters."
            )
        elif any(bool((vector[piece] != vector[piece][0]).any()) for piece in pieces):
            raise UnsupportedError(
                f"the prior {type(prior.given).__name__} has several precisions in one parameter; expected one for "
                "each, as isotropic() and per_layer() have."
            )
        return cls(settings, problem, quiet, start, steps, pieces)

    def run(self, progress: bool) -> tuple[Problem, Tensor, Tensor]:
        """Return the problem with the noise and the prior of the end, and mean (steps from w̃) and variance, (P,)."""
        settings, network = self.settings, self.problem.network
        centre = 0.0 if self._own_decay else self.problem.prior.mean  # towards which weights decay
        phi, origin = float(self.problem.likelihood.dispersion), network.theta() - centre
        parameters = [nn.Parameter(origin[piece].clone()) for piece in self.pieces]
        optimiser, total = self._optimiser(parameters), settings.epochs * self.steps
        order = derived_generator(torch.Generator().manual_seed(settings.seed), torch.empty(0))
        batches = shuffle_batches(self.data, settings.batch_size, order, fresh=True)
        stream = Stream(order.initial_seed() + 1, network.device)  # no numbers that data of the same seed have
        bar, summed, seen = ProgressBar(range(total), "IVON", progress), 0.0, 0
        for step in bar:
            if step % self.steps == 0:
                if step and self.problem.likelihood.learns_dispersion:  # the best one for the last epoch's weights
                    phi = 2 * summed / (seen * self.start.outputs)
                summed, seen = 0.0, 0
                for group, decay in zip(optimiser.param_groups, self._decay(phi), strict=True):
                    group["ess"], group["weight_decay"] = self.start.data / phi, decay
            for group in optimiser.param_groups:
                group["lr"] = 0.5 * settings.learning_rate * (1 + math.cos(math.pi * step / total))
            loss, count = self._step(optimiser, parameters, origin, next(batches), stream)
            summed, seen = summed + loss, seen + count
            bar.show(loss=loss / count)
            if not math.isfinite(loss):
                break
        self._refuse_diverged(summed / max(seen, 1), parameters)
        variance = torch.cat([self._variance(group) for group in optimiser.param_groups])
        return self._final_problem(phi), torch.cat([p.detach() for p in parameters]) - origin, variance

    @property
    def _own_decay(self) -> bool:
        """Whether the weight decay is that of the settings, and not of a given prior."""
        return self.settings.weight_decay is not None or self.problem.learn_prior

    def _decay(self, phi: float) -> list[float]:
        """Return the weight decay of every piece, for the dispersion φ."""
        if self._own_decay:
            return [DECAY if self.settings.weight_decay is None else self.settings.weight_decay]
        vector = self.problem.prior.vector
        return [phi * float(vector[piece][0]) / self.start.data for piece in self.pieces]

    def _optimiser(self, parameters: Sequence[nn.Parameter]) -> Any:
        settings, total = self.settings, self.settings.epochs * self.steps
        beta2 = max(LEAST_BETA2, 1 - FORGOTTEN / total) if settings.beta2 is None else settings.beta2
        return package().IVON(
            [{"params": [parameter]} for parameter in parameters], lr=settings.learning_rate, ess=self.start.data,
            hess_init=settings.hess_init, beta1=settings.beta1, beta2=beta2, weight_decay=DECAY,
        )  # fmt: skip

    def _step(
        self, optimiser: Any, parameters: Sequence[nn.Parameter], origin: Tensor, batch: Batch, stream: Stream
    ) -> tuple[float, int]:
        """Take a step with the gradient at drawn weights; return the loss there, summed, and the number of data."""
        with ExitStack() as stack:
            with stream.drawing():  # the package draws from the global generators
                stack.enter_context(optimiser.sampled_params(train=True))
            with torch.enable_grad():
                weights = self.problem.network.weights(torch.cat(list(parameters)) - origin)
                loss, count = self.problem.batch_loss(weights, batch)
                grads = torch.autograd.grad(loss / count, list(parameters))
            for parameter, grad in zip(parameters, grads, strict=True):
                parameter.grad = grad
        optimiser.step()
        return float(loss.detach()), count

    def _variance(self, group: dict[str, Any]) -> Tensor:
        """Return the variance of the weights of a group, from the state of the optimiser."""
        variance: Tensor = 1 / (group["ess"] * (group["hess"] + group["weight_decay"]))
        if not bool((variance > 0).all() & torch.isfinite(variance).all()):
            raise NumericalError(
                "IVON: the optimiser has curvatures that are not positive; expected none. Lower learning_rate, or "
                "raise hess_init or beta2."
            )
        return variance.detach()

    def _refuse_diverged(self, loss: float, parameters: Sequence[nn.Parameter]) -> None:
        """Raise if the mean loss of the last epoch is far above that at the start, or a weight is not finite."""
        start = self.start.loss / self.start.data
        allowed = start + FAR * max(abs(start), float(self.problem.likelihood.dispersion))
        if not loss <= allowed or not all(bool(torch.isfinite(p).all()) for p in parameters):
            raise NumericalError(
                f"IVON: the loss went from {start:.4g} to {loss:.4g} at learning_rate={self.settings.learning_rate:g}; "
                "expected it to fall or to stay near. Lower learning_rate, or raise hess_init."
            )

    def _final_problem(self, phi: float) -> Problem:
        """Return the problem with the noise of the last epoch, and the prior that the weight decay is equal to."""
        problem, network = self.problem, self.problem.network
        if problem.likelihood.learns_dispersion:
            noise = torch.tensor(phi, dtype=torch.float64, device=network.device)
            problem = problem.with_likelihood(problem.likelihood.with_dispersion(noise))
        if not self._own_decay:
            return problem
        precision = self.start.data * self._decay(phi)[0] / phi
        return problem.with_prior(Isotropic(precision).bound(network.selection, network.theta()))


@saved
@dataclass(frozen=True, eq=False)
class GaussianDrawsPosterior(Drawn):
    """The outputs of the network under draws θ - w̃ ~ N(mean, diag(variance))."""

    mean: Tensor = stored(WEIGHTS)
    variance: Tensor = stored(replace(WEIGHTS, least=SMALLEST))

    def draw_step(self, generator: torch.Generator | None) -> Tensor:
        return self.mean + self.variance.sqrt() * normal(tuple(self.mean.shape), generator, self.mean)
