"""Variational inducing points for linearised Laplace (Ortega, Rodríguez-Santana, Hernández-Lobato 2024)."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor

from lapwing.data.batches import Data
from lapwing.data.streams import Pool
from lapwing.errors import UnsupportedError
from lapwing.likelihoods.base import refuse_energy
from lapwing.methods.base import Conformance, Exactness, Method, with_validation
from lapwing.methods.cost import Cost, Work, Workload
from lapwing.methods.inducing.learning import STEPS, learn_collapsed, learn_stochastic
from lapwing.methods.inducing.points import STARTS, InducingPoints, Placement
from lapwing.posteriors.weight_space import WeightPosterior
from lapwing.priors.base import starting_precisions
from lapwing.problem import Problem, summed_loss
from lapwing.runtime.settings import NONE, POSITIVE, Rule, integer, is_real, one_of, setting
from lapwing.runtime.threads import independent_generator
from lapwing.runtime.trace import Trace

TRIAL = 5  # steps that are timed
SHARE = Rule("a number between 0 and 1", lambda v: is_real(v) and 0 <= v <= 1)
FEW_ROWS, FEW_BYTES = 20_000, 2**30  # outputs of all data, and bytes of their layer factors, up to which L-BFGS is used


@dataclass(frozen=True)
class VaLLA(Method):
    r"""Linearised Laplace approximation with ``num_inducing`` inducing points at learned inputs.

    An inducing point is one output of the network at one input. The mean of the posterior stays the network's output;
    given the points, its covariance is known in closed form. Their locations are learned by gradient on a lower bound
    of the evidence (``alpha=0``), together with the prior precision if no prior was given. ``alpha=1``, as published,
    learns on the predictive log-likelihood of the training data instead. It then learns covariance, prior and noise,
    and the result is not the Laplace posterior of a given prior.

    Args:
        num_inducing: The number M of points.
        alpha: 0 for the evidence bound, 1 for the predictive log-likelihood, between the two for ``Gaussian`` only.
        start: Initial locations: training outputs with the largest remaining variance ("greedy"), training outputs
            that lower the sum of all variances most ("trace"), centres of the inputs of each class ("kmeans") or random
            training data ("random"). None is "greedy"; with L-BFGS also "trace", and the better bound is kept.
        optimiser: "lbfgs" on all data, "adam" on batches (time and memory of a step do not depend on the number of
            data), or "none" for points that stay at their initial locations. None is "lbfgs" for at most 20,000 outputs
            whose layer factors fit in a gigabyte, with ``alpha=0`` and without validation data; otherwise "adam".
        steps: The largest number of steps. None is 300 for L-BFGS, 500 for Adam and 200 if only the covariance is
            learned.
        learning_rate: Step size of Adam, for locations in units of their standard deviation.
        batch_size: Rows in a batch of Adam; it does not depend on the batches of the data.
        patience: With validation data, ``fit(..., validation=data)``, Adam keeps the locations, prior and noise with
            their highest log-likelihood, and stops after so many checks without improvement.
        candidates: Training outputs from which "greedy" and "trace" choose, and data from which the others draw.

    Raises:
        UnsupportedError: A setting is out of range, or settings exclude each other. ``fit`` also raises it for a
            likelihood without this ``alpha``, for token-level outputs with ``alpha`` above 0 and for ``g_prior``.

    Cost: a step of Adam takes the work of C backward passes over a batch, a differentiable backward pass over the M
    points, their (B C, M) kernel and M³; one of L-BFGS takes the kernel with all data. At the end one pass over the
    data (``alpha=0``). A prediction takes C backward passes and the kernel with M points.
    Exact when: the points are at all outputs of all data.

    >>> import lapwing as lw
    >>> x = torch.linspace(-1, 1, 20)[:, None].double()
    >>> net = torch.nn.Linear(1, 1).double()
    >>> posterior = lw.fit(net, [(x, x)], "regression", method=lw.VaLLA(num_inducing=5), prior=1.0)
    >>> posterior.functions(x).cov.shape
    torch.Size([20, 1, 1])
    """

    num_inducing: int = setting(100, integer())
    alpha: float = setting(0.0, SHARE)
    start: str | None = setting(None, one_of(STARTS) | NONE)
    optimiser: str | None = setting(None, one_of(STEPS) | NONE)
    steps: int | None = setting(None, integer() | NONE)
    learning_rate: float = setting(0.01, POSITIVE)
    batch_size: int = setting(100, integer())
    patience: int = setting(5, integer())
    candidates: int = setting(1000, integer())
    validation: Data | None = field(default=None, init=False, repr=False, compare=False)  # those of fit
    spans_processes: ClassVar[bool] = True
    conformance: ClassVar[Conformance] = Conformance(
        (Exactness(lambda weights, rows: VaLLA(num_inducing=rows), "network"),),
        small=lambda model: {"": VaLLA(num_inducing=3, steps=2)},
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.alpha > 0 and self.optimiser in ("lbfgs", "none"):
            raise UnsupportedError(
                f'optimiser is "{self.optimiser}" and alpha is {self.alpha}; the collapsed bound belongs to alpha=0; '
                'use optimiser="adam" with others.'
            )

    def stopped_by(self, validation: Data) -> VaLLA:
        """Return the method with validation data for Adam; unchanged if it has another optimiser."""
        return self if self.optimiser in ("lbfgs", "none") else with_validation(self, validation)

    def fit(self, problem: Problem, data: Data, generator: torch.Generator | None = None) -> WeightPosterior:
        """Return the posterior; ``lw.fit`` calls this.

        Args:
            problem: Network, likelihood and prior.
            data: The training data.
            generator: Source of randomness for initial locations and batches; seed 0 if None.
        """
        self._refuse_problem(problem)
        network, generator = problem.network, independent_generator(generator)
        statistics = summed_loss(network, problem.likelihood, data)
        problem = problem.with_residual_noise(statistics)
        if problem.learn_prior:
            rows = statistics.data * statistics.outputs
            precision = starting_precisions(problem.prior, network.theta(), rows)
            problem = problem.with_precisions(precision)
        pool = Pool.draw(data, max(self.candidates, self.num_inducing), generator)
        placement = Placement(network, pool, generator)
        rows = pool.total * placement.outputs
        place = lambda start: placement.start(start, self.num_inducing, problem.prior, self.candidates)
        if self.num_inducing >= rows:
            anchors, movable = placement.every_output(), False
            optimiser = "none" if self.alpha == 0 and self.validation is None else "adam"
        else:
            anchors = place(self.start or "greedy")
            movable = isinstance(anchors.inputs, Tensor) and anchors.inputs.is_floating_point()
            optimiser = self.optimiser or self.optimiser_for(network.footprint.width, rows)
        points = InducingPoints(problem, anchors, statistics, pool.total, movable)
        if optimiser == "lbfgs" and movable:
            starts = [points] if self.start else [points, replace(points, anchors=place("trace"))]
            ends = [learn_collapsed(each, data, self.steps or STEPS["lbfgs"]) for each in starts]
            return max(ends, key=lambda each: each.score).posterior(data)
        return self._learn_on_batches(points, data, generator) if optimiser == "adam" else points.posterior(data)

    def _refuse_problem(self, problem: Problem) -> None:
        """Raise if this method cannot fit the likelihood, the prior or the outputs."""
        refuse_energy(problem.likelihood, self.alpha)
        if problem.prior.needs_curvature:
            raise UnsupportedError(
                "g_prior() takes its scale from the curvature, and VaLLA() has no curvature before its points; use "
                "Kron(), or another prior."
            )
        if self.alpha > 0 and len(problem.network.output_shape) > 1:
            raise UnsupportedError(
                f"alpha is {self.alpha} for token-level outputs (B, T, C); expected outputs (B, C). Use alpha=0."
            )

    def optimiser_for(self, width: int, rows: int) -> str:
        """Return the default optimiser for data with ``rows`` outputs in total, ``width`` numbers of factors each."""
        few = 8.0 * rows * width < FEW_BYTES and rows <= FEW_ROWS
        return "lbfgs" if few and self.alpha == 0 and self.validation is None else "adam"

    def _learn_on_batches(self, start: InducingPoints, data: Data, generator: torch.Generator) -> WeightPosterior:
        """Return the posterior as learned by Adam, or the one at the initial locations if its bound is higher.

        Batches are noisy, and ReLU kernels are discontinuous, so a gradient step can lower the bound. With alpha
        above 0 or validation data another criterion chose the state, which then stays.
        """
        learned = learn_stochastic(start, data, self, generator)
        posterior = learned.posterior(data)
        if self.alpha > 0 or not start.movable or self.validation is not None:
            return posterior
        initial = replace(start, log_scale=learned.log_scale).posterior(data)
        if float(initial.log_evidence()) <= float(posterior.log_evidence()):
            return posterior
        finding = "the initial locations have a higher bound than the learned ones and are kept"
        return initial.with_trace(Trace("VaLLA", "bound", learned.steps, (*learned.findings, finding)))

    def cost(self, workload: Workload) -> Cost:
        rows, data = workload.rows, workload.data
        points = min(self.num_inducing, rows)
        pairs = Work(products=workload.outputs * points * workload.gradient)  # the kernel of one datum with the points
        once = workload.kernel(min(max(self.candidates, points), rows))
        note = f"{points} points"
        if points < rows:
            optimiser = self.optimiser or self.optimiser_for(workload.footprint.width, rows)
            all_data, steps = optimiser == "lbfgs", self.steps or STEPS[optimiser]
            starts = 2 if all_data and self.start is None else 1
            batch = data if all_data else min(self.batch_size, data)
            at_points = points * Work(4 * workload.jacobians(1), 3 * points * workload.gradient, points**2)
            at_data = 3 * pairs + Work(0.0 if all_data else workload.jacobians())
            once += starts * steps * (batch * at_data + at_points)
            note += f", {steps} steps of {batch} data"
        fit = Work(workload.jacobians(), workload.squares) + pairs
        predict = Work(workload.jacobians(), workload.quadratic) + pairs
        stored = points * (workload.itemsize * workload.input_size + 8 * (1 + points)) + 8 * workload.weights
        candidates = min(max(self.candidates, points), rows)
        peak = workload.jacobian_bytes(True) + 8 * candidates * (workload.gradient + 3 * candidates)
        return workload.cost(stored, peak, fit, predict, once, note)

    def trial(self, workload: Workload) -> VaLLA:
        """Return the method with a few steps of the optimiser that it takes for these data."""
        optimiser = self.optimiser or self.optimiser_for(workload.footprint.width, workload.rows)
        return replace(self, steps=min(TRIAL, self.steps or TRIAL), optimiser=optimiser)
