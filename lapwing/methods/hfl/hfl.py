"""Hessian-free Laplace: variance as the response of a prediction to a small push (McInerney & Kallus 2024)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from lapwing.core.data import Data, Inputs, batch_size, check_finite, map_tensors
from lapwing.core.gaussian import FunctionGaussian
from lapwing.core.pool import Pool, shuffled
from lapwing.core.progress import ProgressBar
from lapwing.core.random import generator_or_default, normal
from lapwing.core.settings import is_real, require_integer, require_positive
from lapwing.curvature.sweep import Sweep
from lapwing.errors import DataError, LapwingError, NumericalError, UnsupportedError
from lapwing.likelihoods.categorical import Categorical
from lapwing.linalg.newton import newton
from lapwing.losses import Statistics, summed_loss
from lapwing.methods.hfl.linearised import LinearisedResponse
from lapwing.methods.hfl.objective import Objective
from lapwing.methods.hfl.pushed_weights import VARIANTS, PushedWeights
from lapwing.methods.hfl.response import (
    BENT,
    DENSE,
    TOLERANCE,
    TWIN,
    Hessian,
    Own,
    Push,
    Pushes,
    Read,
    Responder,
    Response,
    ResponsePosterior,
    away,
)
from lapwing.methods.protocol import Conformance, Cost, Exactness, Workload
from lapwing.problem import Problem
from lapwing.tangent.design import NetworkDesign, refuse_reordered

MODES = ("nonlinear", "linearised", "pretrained")
SOLVERS = ("newton", "adam")
WIDE = 1_000_000  # weights up to which everything runs in float64
NEAR = 1e-4  # of the prior precision: a minimum that is flat one way curves so little either way beside it
TUNED = 0.05  # what fine-tuning by Adam may leave out of a variance
SEEN = 256  # training inputs that Adam pushes, where no evaluation inputs are given
SCALES = (-12, 20)  # logarithms between which calibration data choose the scale of scores
EXACT = 20_000  # weights up to which Newton steps are the default

HFLPosterior = ResponsePosterior | LinearisedResponse | PushedWeights


@dataclass(frozen=True)
class HFL:
    """Error bars by fine-tuning: push the regularised loss a little towards a prediction and see how far it moves.

    "nonlinear": every prediction is pushed up and down by ``lam`` (None: chosen, and halved until two estimates
    agree) and the network re-optimised; the response is the variance of Laplace with the *full Hessian*, not the GGN.
    The weights must be at a minimum of the loss under this prior (``drift``: how many posterior standard deviations
    they may be away from it; by Adam, how many an unpushed twin may move what is pushed). "linearised": the same for
    the tangent model, one block solve without ``lam``; equals ``Full``.
    "pretrained": one push of the average prediction over ``evaluation`` (inputs, or a list of batches of them; the
    training inputs where None), then scores anywhere for one more forward pass. Those are no variances (see
    ``variant`` in ``PushedWeights``); ``calibration`` data fit their scale, and ``variant="random"`` with ``pushes``
    random pushes estimates variances.

    ``solver``: "newton" with all data (a Hessian up to 2,048 weights, block CG above), or "adam" with ``steps`` steps
    on batches, pushes and an unpushed twin side by side on the same batches. Works in float64 up to a million weights.
    What does not come within ``tolerance`` is refused, with the cause; an infinite one takes what comes (not in
    "linearised").

    Cost of a prediction: nonlinear, for each output some tens of gradients over all data; linearised, one product with
    the GGN for each iteration and all outputs together; pretrained, one forward pass more.

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
        for name, value, known in (("mode", self.mode, MODES), ("variant", self.variant or "mean", VARIANTS)):
            if value not in known:
                raise UnsupportedError(f"{name} is {value!r}; expected one of {', '.join(known)}.")
        if self.solver is not None and self.solver not in SOLVERS:
            raise UnsupportedError(f"solver is {self.solver!r}; expected one of {', '.join(SOLVERS)}.")
        for name in ("pushes", "steps", "batch_size"):
            require_integer(name, getattr(self, name))
        require_positive("learning_rate", self.learning_rate)
        if self.lam is not None:
            require_positive("lam", self.lam)
        if not is_real(self.drift) or not self.drift >= 0:
            raise UnsupportedError(f"drift is {self.drift!r:.80}; expected at least nought; math.inf allows any.")
        if self.tolerance is not None and not (is_real(self.tolerance) and self.tolerance > 0):
            raise UnsupportedError(
                f"tolerance is {self.tolerance!r:.80}; expected a positive number, or None for the usual."
            )
        if self.mode == "linearised" and self.tolerance is not None and self.tolerance >= 1:
            raise UnsupportedError(
                f"tolerance is {self.tolerance}; expected below 1 in the mode 'linearised', where a residual of 1 is "
                "no solution at all."
            )
        if self.mode != "pretrained" and self.calibration is not None:
            raise UnsupportedError(
                f"calibration data for the mode {self.mode!r}, whose variances have their scale; leave them out, or "
                "use HFL(mode='pretrained')."
            )
        if self.dtype is not None and self.dtype not in TOLERANCE:
            raise UnsupportedError(f"dtype is {self.dtype}; expected torch.float64 or torch.float32.")

    def fit(self, problem: Problem, data: Data, generator: torch.Generator | None = None) -> HFLPosterior:
        network = problem.network
        if problem.prior.needs_curvature:
            raise UnsupportedError("HFL() forms no curvature, and g_prior() needs one; use Kron() or Full().")
        generator = generator_or_default(generator)
        if self.mode == "linearised":
            design = NetworkDesign.build(network, problem.likelihood, data)
            refuse_reordered(design)
            problem = problem.with_residual_noise(design.statistics).with_known_prior()
            exact = network.dtype == torch.float64
            wide = not exact and self._dtype(network.selection.size) == torch.float64
            tolerance = self.tolerance or (1e-10 if exact else 1e-4 if wide else 1e-3)
            return LinearisedResponse(problem, design, design.statistics, network.theta(), tolerance, wide)
        statistics = summed_loss(network, problem.likelihood, data)
        problem = problem.with_residual_noise(statistics).with_known_prior()
        objective = Objective.build(
            network, problem.likelihood, problem.prior, data, self._dtype(network.selection.size)
        )
        tolerance = self.tolerance or (TUNED if self._solver(objective.size) == "adam" else TOLERANCE[objective.dtype])
        responder, findings = self._responder(objective, data, tolerance, generator)
        if self.mode == "nonlinear":
            return ResponsePosterior(problem, responder, statistics, network.theta(), self.lam, findings, self.drift)
        return self._pretrained(problem, responder, data, statistics, findings, generator)

    def cost(self, workload: Workload) -> Cost:
        """Return the cost of two Newton steps and the Hessian at their end: two gradients for each product with it."""
        size = workload.weights
        if self.mode == "linearised":
            return workload.cost(
                8 * size, workload.all_outputs, "at every prediction one linear system for each output"
            )
        if self._solver(size) == "adam":
            return workload.cost(8 * size, workload.forward, "by Adam, at every prediction")
        products = 3 * (size if size <= DENSE else 100)
        stored = 8 * size * (size + 1 if size <= DENSE else 1)
        return Cost(stored, 2.0 * products, "at every prediction some tens of epochs for each output")

    def _dtype(self, weights: int) -> torch.dtype:
        return self.dtype or (torch.float64 if weights <= WIDE else torch.float32)

    def _solver(self, weights: int) -> str:
        return self.solver or ("newton" if weights <= EXACT else "adam")

    def _responder(
        self, objective: Objective, data: Data, tolerance: float, generator: torch.Generator
    ) -> tuple[Any, tuple[str, ...]]:
        """What re-optimises, around the minimum."""
        if self._solver(objective.size) == "adam":
            return FineTuner(objective, self, data, generator, tolerance), ()
        minimum, decrements = settled(objective)
        distance = math.sqrt(max(decrements[0], 0.0))
        if decrements[-1] > 1e-10 * max(1.0, decrements[0]) and decrements[-1] > 1e-12:
            raise NumericalError(
                "HFL: the weights are at no minimum of their regularised loss, and Newton's steps find none (it would "
                f"still fall by {0.5 * decrements[-1]:.3g}). Train the network to convergence with this prior as "
                "weight decay, raise the prior precision, or use HFL(mode='linearised')."
            )
        if distance > self.drift:
            raise NumericalError(away(distance, self.drift))
        centred = objective.moved(minimum)
        return Responder(centred, Hessian(centred), tolerance), noticed(distance)

    def _pretrained(
        self, problem: Problem, responder: Any, data: Data, statistics: Statistics, findings: tuple[str, ...],
        generator: torch.Generator,
    ) -> PushedWeights:  # fmt: skip
        objective = responder.objective
        # The sum of all logits is the one direction that a softmax does not see: a push of it says nothing.
        variant = self.variant or ("absolute" if isinstance(problem.likelihood, Categorical) else "mean")
        if variant == "random":
            root = responder.hessian.root if isinstance(responder, Responder) else None
            force = random_forces(problem, data, self.pushes, generator, root).to(objective.centre)
            push, read, count = (lambda d: force), (lambda d: d), self.pushes
        else:
            inputs = self._evaluation(problem, data)
            if self.evaluation is not None:
                _refuse_evaluation(objective, inputs)
            push, read, count = averaged(objective, inputs, variant == "absolute"), (lambda d: d), 1
        found = self._pushed(responder, push, read, count)
        theta = problem.network.theta()
        moved = found.cov * found.strength[:, None]  # half the way between the two pushes: drift cancels
        posterior = PushedWeights(
            problem, moved.to(theta), found.strength.to(theta), variant, statistics, theta, 1.0,
            (*findings, *noticed(float(found.drift.max()), TWIN)),
        )  # fmt: skip
        if self.calibration is None:
            return posterior
        held = Data(self.calibration, problem.network.device, data.target_key, name="calibration")
        scale = fitted_scale(posterior, held)
        return replace(posterior.scaled(scale), findings=(*posterior.findings, *_at_an_end(scale)))

    def _pushed(self, responder: Any, push: Push, read: Read, count: int) -> Response:
        """With λ as given; else so small that the network can follow."""
        tolerance = max(responder.tolerance, 1e-2)
        if self.lam is not None or isinstance(responder, FineTuner):
            only: Response = responder.respond(push, read, count, self.lam)
            return only.settled(tolerance, self.drift)
        strength = self._strength(responder, push, count)
        for _ in range(8):
            found: Response = responder.respond(push, read, count, strength)
            if bool((found.missing <= tolerance).all() & (found.bend <= BENT).all()):
                break
            strength /= 4
        return found.settled(tolerance)

    def _strength(self, responder: Responder, push: Push, count: int) -> float:
        """One λ for all: it moves the pushed average by a small part of its standard deviation.

        A score is a difference to one side, off by a share that falls with λ; single precision leaves a hundredth.
        """
        objective = responder.objective
        start = torch.zeros(count, objective.size).to(objective.centre)
        slopes = push(start)
        spread = (slopes * responder.hessian.solve(slopes)).sum(1).max().double()
        if float(spread) == 0:
            raise NumericalError(
                "HFL: no weight moves what is pushed, the average over the evaluation inputs; expected one that does. "
                "Give other evaluation inputs, or another variant."
            )
        share = 1e-4 if objective.dtype == objective.network.dtype == torch.float64 else 0.01
        return float(share / spread.sqrt())

    def _evaluation(self, problem: Problem, data: Data) -> list[Inputs]:
        if self.evaluation is None and self._solver(problem.network.selection.size) == "adam":
            return [Pool.drawn(data, SEEN, torch.Generator().manual_seed(0)).inputs]  # looked at in every step
        if self.evaluation is None:
            return [batch.inputs for batch in data.batches("evaluation")]
        one = isinstance(self.evaluation, Tensor | Mapping | tuple)
        parts = [self.evaluation] if one or not isinstance(self.evaluation, Iterable) else list(self.evaluation)
        return [map_tensors(part, lambda t: t.to(problem.network.device)) for part in parts]


def settled(objective: Objective) -> tuple[Tensor, list[float]]:
    """The minimum that the weights belong to, as a step from them, and the decrements on the way."""
    start = torch.zeros_like(objective.centre)
    solve = lambda d, rows: Hessian(objective.moved(d), NEAR).solve(rows)
    tolerance = 1e-18 if objective.dtype == torch.float64 else 1e-9
    return newton(objective.gradient, solve, start, tolerance=tolerance, value=objective.value)


def noticed(distance: float, told: str = "") -> tuple[str, ...]:
    """The finding that weights are not quite at a minimum; ``told`` is by what that was seen."""
    if not distance > 0.01:
        return ()
    return (
        f"the weights are {distance:.2g} posterior standard deviations from the minimum of their regularised loss"
        f"{told}; the error bars are those at the minimum",
    )


def _refuse_evaluation(objective: Objective, inputs: list[Inputs]) -> None:
    """What the network does not take, or what is no number."""
    sizes = [batch_size(part) for part in inputs]
    if not sizes or min(sizes) == 0:
        raise DataError(f"evaluation holds batches of {sizes} inputs; expected at least one batch, and inputs in each.")
    for part in inputs:
        check_finite(part, "evaluation inputs")
        try:
            f = objective.outputs(torch.zeros_like(objective.centre)[None], part)
        except LapwingError:
            raise
        except (TypeError, RuntimeError, ValueError, LookupError, AttributeError) as error:
            raise DataError(
                f"the network does not take the evaluation inputs ({error!s:.200}); expected inputs alone, without "
                "targets: one batch, or a list of batches."
            ) from error
        check_finite(f, "outputs of the network at the evaluation inputs")


def averaged(objective: Objective, inputs: list[Inputs], absolute: bool) -> Push:
    """∇ of the average over inputs of Σ_c f_c, or of Σ_c |f_c|."""
    parts = [objective.cast(part) for part in inputs]
    total = sum(objective.network.count(part) for part in inputs)

    def push(d: Tensor) -> Tensor:
        gradient = torch.zeros_like(d)
        for part in parts:
            size = lambda row, x=part: (
                (objective.run(row, x).abs() if absolute else objective.run(row, x)).sum() / total
            )
            gradient = gradient + objective.each(torch.func.grad(size), d, batch_size(part))
        return gradient

    return push


def random_forces(
    problem: Problem, data: Data, count: int, generator: torch.Generator, root: Tensor | None = None
) -> Tensor:
    """ξ ~ N(0, H), (count, P), by a ``root`` of the Hessian: the posterior answers with draws of its own, H⁻¹ ξ.

    Where there is none, ξ ~ N(0, G/φ + A) with the GGN, of which draws are known without any matrix.
    """
    network, likelihood = problem.network, problem.likelihood
    theta = network.theta().double()
    if root is not None:
        return normal((count, len(theta)), generator, theta) @ root.mT.to(theta)
    total = normal((count, len(theta)), generator, theta) * problem.prior.vector.detach().to(theta).sqrt()
    phi = likelihood.dispersion.detach().to(theta)
    for jacobians in Sweep(network, likelihood, data, label="random pushes"):
        eps = normal((count, jacobians.batch, jacobians.outputs), generator, theta)
        total = total + jacobians.vjp(eps).to(theta) / phi.sqrt()
    return total


def fitted_scale(posterior: PushedWeights, data: Data) -> float:
    """The factor on the variances under which held-out data are likeliest: golden section on its logarithm."""
    kept = []
    for batch in data.batches("calibration"):
        belief = posterior(batch.inputs)
        y = posterior.problem.likelihood.targets(belief.mean, batch.targets)
        kept.append((belief.mean.double(), belief.cov.double(), y))
    if not any(bool(cov.any()) for _, cov, _ in kept):
        raise DataError(
            "the scores are nought at all calibration inputs, which then say nothing of their scale; expected some "
            "above. Give other calibration data, other evaluation inputs, or variant='absolute'."
        )

    def cost(log_scale: float) -> float:
        factor = math.exp(log_scale)
        predicted = (posterior.problem.likelihood.predict(FunctionGaussian(f, factor * cov)).log_prob(y)
                     for f, cov, y in kept)  # fmt: skip
        try:
            found = -sum(float(part.sum()) for part in predicted)
        except torch.linalg.LinAlgError:  # type: ignore[attr-defined]  # a variance so large that it overflows
            return math.inf
        return found if math.isfinite(found) else math.inf

    start = min((k / 2 for k in range(2 * SCALES[0], 2 * SCALES[1] + 1)), key=cost)
    if math.isinf(cost(start)):
        raise NumericalError(
            "HFL: the calibration data have no finite likelihood under any scale of the scores. Check that their "
            "targets are of the kind that the network was trained on, and its outputs there for overflow."
        )
    low, high, ratio = start - 0.5, start + 0.5, (math.sqrt(5) - 1) / 2
    for _ in range(30):
        a, b = high - ratio * (high - low), low + ratio * (high - low)
        low, high = (low, b) if cost(a) < cost(b) else (a, high)
    return math.exp(0.5 * (low + high))


def _at_an_end(scale: float) -> tuple[str, ...]:
    """What is to be said of a scale where the search for it ended for lack of room."""
    low, high = (math.log(scale) <= SCALES[0] + 0.5, math.log(scale) >= SCALES[1] - 0.5)
    if not (low or high):
        return ()
    told = "none at all: the network is calibrated, or too wide, as it stands" if low else "ever larger ones"
    return (f"the calibration data want {told}; the scale ended at {scale:.2g}, where the search does",)


@dataclass(frozen=True, eq=False)
class FineTuner:
    """Pushes up, pushes down and an unpushed twin, fine-tuned together by Adam on the same batches.

    What is left undone is judged by a second run of half as many steps: where it falls short, so may the whole one.
    Where the twin goes is where the weights would have gone anyway: it tells a push that bends from a drift of both.
    """

    objective: Objective
    method: HFL
    data: Data
    generator: torch.Generator
    tolerance: float

    def respond(
        self, push: Push, read: Read, count: int, strength: float | None = None, own: Own | None = None
    ) -> Response:
        """The responses to ``count`` pushes; None for ``own`` reads weights off."""
        objective, method = self.objective, self.method
        start = torch.zeros(count, objective.size).to(objective.centre)
        pushes = Pushes.of(push, read, start, own)
        if strength is None:
            # A part of one over the deviation under the prior: it moves a prediction by at most that part of its
            # posterior deviation, and yet far enough for steps of Adam's size.
            spread = (pushes.slopes.double().square() / objective.prior.vector.detach()).sum(1)
            lam = 0.1 * torch.where(spread > 0, spread, 1.0).rsqrt().to(start)
        else:
            lam = torch.full_like(start[:, 0], strength)
        half, _ = self._difference(read, self._tuned(push, lam, max(1, method.steps // 2)), lam)
        found, (up, down, twin) = self._difference(read, self._tuned(push, lam, method.steps), lam)
        whole, part = found, half
        if own is None:  # weights: judged by the pushed functional, which is what they are for
            whole, part = (pushes.own(each).unsqueeze(1) for each in (found, half))
        tiny = torch.finfo(lam.dtype).tiny
        missing = (whole - part).abs().flatten(1).amax(1) / whole.abs().flatten(1).amax(1).clamp_min(tiny)
        went = pushes.own((twin - pushes.seen).expand_as(up)).abs()
        drift = went / pushes.own(found).abs().clamp_min(tiny).sqrt()
        unknown, nought = torch.full_like(lam, torch.nan), torch.zeros_like(lam)
        return Response(found, lam, unknown, missing, nought, pushes.bend(up, down, twin), drift, method.steps)

    def _tuned(self, push: Push, lam: Tensor, steps: int) -> Tensor:
        """Where so many steps of Adam lead, its rate falling to nought: up, down and the twin, (2 K + 1, P)."""
        objective, method, count = self.objective, self.method, len(lam)
        d = torch.zeros(2 * count + 1, objective.size).to(objective.centre)
        signs = torch.cat([lam, -lam])[:, None]
        first, second = torch.zeros_like(d), torch.zeros_like(d)
        same = torch.Generator().manual_seed(self.generator.initial_seed())
        batches = shuffled(self.data, method.batch_size, same)
        for step in ProgressBar(range(steps), "fine-tuning", self.data.progress):
            batch = next(batches)
            f = objective.outputs(d[-1:], batch.inputs)[0]
            targets = objective.cast(objective.likelihood.targets(f, batch.targets))
            slope = objective.gradient(d, (replace(batch, inputs=objective.cast(batch.inputs), targets=targets),))
            slope[:-1] -= signs * torch.cat([push(half) for half in d[:-1].chunk(2)])
            first, second = 0.9 * first + 0.1 * slope, 0.999 * second + 0.001 * slope.square()
            rate = method.learning_rate * 0.5 * (1 + math.cos(math.pi * step / steps))
            unbiased = (second / (1 - 0.999 ** (step + 1))).sqrt() + 1e-12
            d = d - rate * first / (1 - 0.9 ** (step + 1)) / unbiased
        return d

    def _difference(self, read: Read, d: Tensor, lam: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
        """The responses, and what was read off up, down and at the twin."""
        up, down, twin = read(d[: len(lam)]), read(d[len(lam) : 2 * len(lam)]), read(d[-1:])
        return (up - down) / (2 * lam).reshape(-1, *[1] * (up.ndim - 1)), (up, down, twin)
