"""Hessian-free Laplace: settings and fit (McInerney & Kallus 2024)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from lapwing.core.data import Data
from lapwing.core.random import generator_or_default
from lapwing.core.settings import DATA, NONE, POSITIVE, Rule, is_data, is_real, one_of, require, require_integer
from lapwing.errors import DataError, NumericalError, UnsupportedError
from lapwing.methods.hfl.newton import DENSE, Hessian, distance_in_words, nearest_minimum
from lapwing.methods.hfl.objective import Objective
from lapwing.methods.hfl.posteriors import LinearisedResponse, ResponsePosterior
from lapwing.methods.hfl.pretrained import (
    VARIANTS,
    PushedWeights,
    averaged,
    calibrated,
    evaluation_batches,
    random_forces,
)
from lapwing.methods.hfl.responder import AnyResponder, FineTuner, Push, Responder
from lapwing.methods.hfl.response import TOLERANCE, TWIN, distance_finding, far_from_minimum
from lapwing.methods.protocol import Conformance, Cost, Exactness, Workload
from lapwing.problem import Problem, Statistics, summed_loss
from lapwing.tangent.design import NetworkDesign, refuse_reordered

MODES = ("nonlinear", "linearised", "pretrained")
SOLVERS = ("newton", "adam")
WIDE = 1_000_000  # largest number of weights for which everything runs in float64
TUNED = 0.05  # default tolerance of variances by Adam
ITERATIONS = 100  # products with the curvature that a system is assumed to take
EPOCHS = 30  # gradients over all data that the response of an output is assumed to take
EXACT = 20_000  # largest number of weights for which Newton steps are the default

HFLPosterior = ResponsePosterior | LinearisedResponse | PushedWeights

DTYPE = Rule("torch.float64, torch.float32 or None", lambda v: v is None or v in TOLERANCE)
PARTS = Rule(
    "inputs, a list of batches of inputs, or None",
    lambda v: isinstance(v, torch.Tensor | dict | None) or is_data(v),
    DataError,
)


@dataclass(frozen=True)
class HFL:
    """Hessian-free Laplace: push the regularised loss a little towards a prediction and measure how far it moves.

    The response of a prediction to a push of strength λ is its variance under Laplace with the *full Hessian*. The
    weights must be at a minimum of the loss under this prior, except in the mode "linearised".

    Args:
        mode: "nonlinear" pushes every prediction up and down and re-optimises the network each time. "linearised" does
            the same for the tangent model: one block solve without λ, with the variances of ``Full``. "pretrained"
            pushes once, in the fit; a prediction then costs one more forward pass. Its scores are no variances, except
            with ``variant="random"``.
        lam: λ, the strength of a push; None chooses it and halves it until two estimates agree.
        solver: "newton" uses all data, with a Hessian up to 2,048 weights and block CG above; "adam" fine-tunes on
            mini-batches. None takes "newton" up to 20,000 weights.
        tolerance: Relative error of the variances above which ``NumericalError`` is raised; infinity accepts every
            result. None takes 1e-6 (float32: 1e-2; Adam: 0.05). In "linearised": of residuals and variances, 1e-10
            (float32 networks: 1e-4).
        steps: Steps of Adam.
        learning_rate: Initial learning rate of Adam; it falls to zero along a cosine.
        batch_size: Mini-batch of Adam.
        dtype: torch.float64 or torch.float32 for the computation; None takes float64 up to a million weights.
        drift: How many posterior standard deviations the weights may be from the minimum. Adam measures it by how far
            an unpushed copy of the network moves the pushed quantity.
        variant: What "pretrained" pushes: "mean" (the average output), "absolute" (the average absolute output) or
            "random" (``pushes`` random directions, which estimate variances). None takes "absolute" for classes, else
            "mean".
        pushes: Number of random pushes.
        evaluation: Inputs, or a list of batches of inputs, to average over in "pretrained"; None takes the training
            inputs.
        calibration: Held-out data that fit one factor on the scores of "pretrained".

    Raises:
        UnsupportedError: If a setting is not one of the above; in ``fit``, for a g-prior.
        NumericalError: In ``fit``, if the weights are at no minimum; in predictions, if a response has not converged.
        DataError: In ``fit``, if evaluation or calibration data do not fit the network.

    Cost of a prediction: "nonlinear", for each output some tens of gradients over all data; "linearised", one product
    with the GGN for each iteration and all outputs together; "pretrained", one more forward pass.

    >>> from lapwing.api import fit
    >>> from lapwing.likelihoods.gaussian import Gaussian
    >>> x, net = torch.tensor([[-1.0], [1.0]]), torch.nn.Linear(1, 1)
    >>> fit(net, [(x, x)], Gaussian(noise_std=1.0), method=HFL("linearised"), prior=1.0).functions(x).std
    tensor([[0.8165],
            [0.8165]])
    """

    mode: str = "nonlinear"
    lam: float | None = None
    solver: str | None = None
    tolerance: float | None = None
    steps: int = 1000
    learning_rate: float = 1e-3
    batch_size: int = 128
    dtype: torch.dtype | None = None
    drift: float = 1.0
    variant: str | None = None
    pushes: int = 32
    evaluation: Any = field(default=None, repr=False)
    calibration: Any = field(default=None, repr=False)
    needs_prior: bool = field(default=True, init=False, repr=False)
    conformance: ClassVar[Conformance] = Conformance(
        (
            Exactness(lambda weights, rows: HFL(drift=math.inf), "linear", iterative=True,
                      no_laws="it needs weights at a minimum of the regularised loss"),
            Exactness(lambda weights, rows: HFL("linearised"), "network", name="linearised", iterative=True),
        ),
        small=lambda model: {
            "": HFL(drift=math.inf), "linearised": HFL("linearised"), "pretrained": HFL("pretrained", drift=math.inf),
        },
    )  # fmt: skip

    def __post_init__(self) -> None:
        require(self, mode=one_of(MODES), variant=one_of(VARIANTS) | NONE, solver=one_of(SOLVERS) | NONE)
        require(self, dtype=DTYPE, evaluation=PARTS, calibration=DATA | NONE)
        for name in ("pushes", "steps", "batch_size"):
            require_integer(name, getattr(self, name))
        POSITIVE.check("learning_rate", self.learning_rate)
        if self.lam is not None:
            POSITIVE.check("lam", self.lam)
        if not is_real(self.drift) or not self.drift >= 0:
            raise UnsupportedError(f"drift is {self.drift!r:.80}; expected at least zero; math.inf allows any.")
        if self.mode != "pretrained" and self.calibration is not None:
            raise UnsupportedError(
                f"calibration data for the mode {self.mode!r}, whose variances have their scale; leave them out, or "
                "use HFL(mode='pretrained')."
            )
        self._check_tolerance()

    def _check_tolerance(self) -> None:
        if self.tolerance is not None and not (is_real(self.tolerance) and self.tolerance > 0):
            raise UnsupportedError(
                f"tolerance is {self.tolerance!r:.80}; expected a positive number, or None for the default."
            )
        if self.mode == "linearised" and self.tolerance is not None and self.tolerance >= 1:
            raise UnsupportedError(
                f"tolerance is {self.tolerance}; expected below 1 in the mode 'linearised', where a residual of 1 is "
                "no solution at all."
            )

    def fit(self, problem: Problem, data: Data, generator: torch.Generator | None = None) -> HFLPosterior:
        """Return the posterior of the chosen mode."""
        if problem.prior.needs_curvature:
            raise UnsupportedError("HFL() forms no curvature, and g_prior() needs one; use Kron() or Full().")
        if self.mode == "linearised":
            return self._linearised(problem, data)
        generator = generator_or_default(generator)
        network = problem.network
        statistics = summed_loss(network, problem.likelihood, data)
        problem = problem.with_residual_noise(statistics).with_known_prior()
        dtype = self._dtype(network.selection.size)
        objective = Objective.build(network, problem.likelihood, problem.prior, data, dtype)
        responder, findings = self._responder(objective, data, generator)
        return self._posterior(problem, responder, data, statistics, findings, generator)

    def cost(self, workload: Workload) -> Cost:
        """Return the cost of two Newton steps and the Hessian at their end: two gradients for each product with it."""
        size, data, wide = workload.weights, workload.data, 8 * workload.weights
        if self.mode == "linearised":
            predict = ITERATIONS * data * workload.products(workload.outputs)
            note = "at every prediction one linear system for each output"
            return workload.cost(
                wide + workload.kept, workload.jacobian_bytes(), workload.repeated(0, 1), predict, note=note
            )
        if self._uses_adam(size):
            steps = 2 * self.steps * self.batch_size * workload.outputs  # a push up and one down
            return workload.cost(
                wide, 6 * wide, workload.forward, steps * workload.training, note="by Adam, at every prediction"
            )
        products = 3 * (size if size <= DENSE else ITERATIONS)
        stored = wide * (size + 1 if size <= DENSE else 1)
        predict = 2 * EPOCHS * data * workload.outputs * workload.training.in_double
        note = "at every prediction some tens of epochs for each output"
        return workload.cost(stored, 2 * stored, 2 * products * workload.training.in_double, predict, note=note)

    def trial(self, workload: Workload) -> None:
        """Return None: it takes only weights at a minimum, and how long it takes depends on how near they are."""
        return

    def _linearised(self, problem: Problem, data: Data) -> LinearisedResponse:
        network = problem.network
        design = NetworkDesign.build(network, problem.likelihood, data)
        refuse_reordered(design)
        problem = problem.with_residual_noise(design.statistics).with_known_prior()
        exact = network.dtype == torch.float64
        wide = not exact and self._dtype(network.selection.size) == torch.float64
        tolerance = self.tolerance or (1e-10 if exact else 1e-4 if wide else 1e-3)
        return LinearisedResponse(problem, design, design.statistics, network.theta(), tolerance, wide)

    def _dtype(self, weights: int) -> torch.dtype:
        return self.dtype or (torch.float64 if weights <= WIDE else torch.float32)

    def _uses_adam(self, weights: int) -> bool:
        return (self.solver or ("newton" if weights <= EXACT else "adam")) == "adam"

    def _responder(
        self, objective: Objective, data: Data, generator: torch.Generator
    ) -> tuple[AnyResponder, tuple[str, ...]]:
        """Return the responder of the solver, and findings; raise if Newton steps start too far from a minimum."""
        if self._uses_adam(objective.size):
            settings = self.tolerance or TUNED, self.steps, self.learning_rate, self.batch_size
            return FineTuner(objective, data, generator, *settings), ()
        try:
            minimum, decrements = nearest_minimum(objective)
        except NumericalError as error:
            raise NumericalError(f"HFL: {distance_in_words(objective)} {error}") from error
        distance = math.sqrt(max(decrements[0], 0.0))
        if decrements[-1] > 1e-10 * max(1.0, decrements[0]) and decrements[-1] > 1e-12:
            raise NumericalError(
                "HFL: the weights are at no minimum of their regularised loss, and Newton's steps find none (it would "
                f"still fall by {0.5 * decrements[-1]:.3g}): {distance_in_words(objective)} Train the network to "
                "convergence with this prior as weight decay, raise the prior precision, or use "
                "HFL(mode='linearised')."
            )
        if distance > self.drift:
            raise NumericalError(far_from_minimum(distance, self.drift))
        centred = objective.recentred(minimum)
        tolerance = self.tolerance or TOLERANCE[objective.dtype]
        return Responder(centred, Hessian(centred), tolerance), distance_finding(distance)

    def _posterior(
        self, problem: Problem, responder: AnyResponder, data: Data, statistics: Statistics, findings: tuple[str, ...],
        generator: torch.Generator,
    ) -> HFLPosterior:  # fmt: skip
        theta = problem.network.theta()
        if self.mode == "nonlinear":
            return ResponsePosterior(problem, responder, statistics, theta, self.lam, findings, self.drift)
        # A likelihood that ignores the sum of the logits ignores a push of their mean.
        variant = self.variant or ("absolute" if problem.likelihood.ignores_common_shift else "mean")
        push, count = self._push(problem, responder, data, variant, generator)
        tolerance = max(responder.tolerance, 1e-2)
        if self.lam is None:
            response = responder.respond_alike(push, count, tolerance)
        else:
            response = responder.respond(push, lambda d: d, count, self.lam)
        response = response.checked(tolerance, self.drift)
        # Half the difference between both pushes, in which drift cancels.
        displacements = response.cov * response.strength[:, None]
        findings = (*findings, *distance_finding(float(response.drift.max()), TWIN))
        posterior = PushedWeights(
            problem, displacements.to(theta), response.strength.to(theta), variant, statistics, theta, 1.0, findings
        )
        if self.calibration is None:
            return posterior
        return calibrated(
            posterior, problem.network.reading(self.calibration, "calibration", target_key=data.target_key)
        )

    def _push(
        self, problem: Problem, responder: AnyResponder, data: Data, variant: str, generator: torch.Generator
    ) -> tuple[Push, int]:
        """Return the gradient of the functions that "pretrained" pushes, and their number."""
        objective = responder.objective
        if variant == "random":
            force = random_forces(problem, data, self.pushes, generator, responder.root).to(objective.centre)
            return (lambda d: force), self.pushes
        batches = evaluation_batches(self.evaluation, objective, data, few=self._uses_adam(objective.size))
        return averaged(objective, batches, variant == "absolute"), 1
