"""HFL, Hessian-free Laplace: posteriors, settings and fit (McInerney & Kallus 2024)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from lapwing.curvature.base import Sweep
from lapwing.data.batches import Data
from lapwing.data.inputs import Inputs, SampleRows, check_finite, map_tensors
from lapwing.data.streams import DrawnRows
from lapwing.errors import DataError, FileError, InputError, NumericalError, UnsupportedError
from lapwing.linalg.dense import symmetrise
from lapwing.linalg.krylov import block_conjugate_gradients
from lapwing.linalg.operators import Solution, gram_product
from lapwing.methods.base import Conformance, Cost, Exactness, Method, Work, Workload, refuse_g_prior
from lapwing.methods.hfl_response import (
    DENSE,
    TOLERANCE,
    TWIN,
    AnyResponder,
    FineTuner,
    Hessian,
    Objective,
    Push,
    Responder,
    Response,
    distance_finding,
    distance_in_words,
    far_from_minimum,
    nearest_minimum,
)
from lapwing.networks.forward import outside_inference
from lapwing.networks.passes import Functional, output_slope, scalar, weight_slope
from lapwing.networks.tangent import LayerJacobians
from lapwing.posteriors.base import ALL, Posterior, Trace
from lapwing.posteriors.weight_space import Linearised, jacobian_pieces, outputs_in_pieces
from lapwing.problem import STATISTICS, Problem, Statistics, summed_loss
from lapwing.runtime.memory import PIECE_SHARE, chunks, concat_chunks
from lapwing.runtime.settings import DATA, NONE, POSITIVE, Rule, integer, is_data, is_real, one_of, setting
from lapwing.runtime.states import SMALLEST, WEIGHTS, Array, ListOf, Real, State, Stored, Text, saved, stored
from lapwing.runtime.threads import generator_or_default, normal, sequential_normal
from lapwing.tangent import NetworkDesign, refuse_reordered
from lapwing.values.gaussian import ChosenOutputs, FunctionGaussian, Query

ROWS = 256  # outputs that "linearised" solves for at once
VECTORS = 24  # float64 vectors of P numbers that a solve holds for each of them
PUSHES = 48  # vectors of P numbers that Newton steps and Adam hold for each push
NO_FILE = (
    "this HFL posterior re-optimises on its data at every prediction, and a file does not hold those; fit it again "
    "where it is needed, or save HFL(mode='pretrained')."
)


@dataclass(frozen=True, eq=False)
class ResponsePosterior(Posterior):
    """f(x) ~ N(network output, response to pushes of f(x)): the variance of Laplace with the full Hessian.

    ``responder`` holds the objective with its data, so this posterior cannot be saved. ``respond`` returns the details
    behind a prediction: how far each push came and how much to trust it.
    """

    problem: Problem
    responder: AnyResponder
    statistics: Statistics
    theta: Tensor
    strength: float | None = None
    findings: tuple[str, ...] = ()
    drift: float = math.inf  # how far an unpushed twin may move, in posterior standard deviations
    no_file: ClassVar[str] = NO_FILE

    def belief(self, x: Inputs, query: Query = ALL) -> FunctionGaussian:
        network = self.problem.network
        f = query.of(network(x).to(network.dtype))
        response = self.respond(x, query.joint, query.outputs)
        cov = response.require_convergence(self.responder.tolerance, self.drift).cov
        if query.joint:
            cov = cov.reshape(f.numel(), f.numel())
            return FunctionGaussian.across(f, 0.5 * (cov + cov.mT))
        size = f[0].numel()
        cov = cov.reshape(len(f), size, size)
        return FunctionGaussian(f, _per_token(0.5 * (cov + cov.mT), f).to(f))

    @outside_inference
    def respond(self, x: Inputs, joint: bool = False, outputs: ChosenOutputs | None = None) -> Response:
        """Push all or some outputs at every input and return the responses of the outputs there, or at all if joint.

        Shapes: the covariances are (B C, C), or (B C, B C) if joint; C counts all tokens.
        """
        objective, network = self.responder.objective, self.problem.network.for_inputs(x)
        x = objective.cast(x)
        size, shape, device = network.count(x), network.output_shape, objective.centre.device
        chosen = ChosenOutputs(None, None, len(shape) == 2) if outputs is None else outputs
        places = chosen.numbers(shape, device).flatten(1).expand(size, -1)  # (B, C)
        count = places.numel()
        respond = lambda run: self._respond(x, shape, chosen, places, run, joint)
        each = PUSHES * objective.centre.nbytes
        return Response.concat([respond(run) for run in chunks(count, each, device, 2 * PIECE_SHARE)])

    def _respond(
        self, x: Inputs, shape: tuple[int, ...], chosen: ChosenOutputs, places: Tensor, run: slice, joint: bool
    ) -> Response:
        """Push a run of the outputs with these places (B, C) at the inputs x, and return the responses.

        ``shape`` is the shape of all outputs of an input.
        """
        objective, network = self.responder.objective, self.problem.network
        outputs = places.shape[1]
        number = torch.arange(run.start, run.stop, device=places.device)
        index, column = number // outputs, number % outputs
        inputs = network.take(x, index)
        own = places[index, column]
        seeds = one_hot(own, torch.Size(shape).numel()).to(objective.centre)
        push = lambda d: objective.slopes(d, inputs, seeds.reshape(-1, *shape))
        if joint:
            read_all = lambda d: chosen.of(objective.outputs(d, x)).flatten(1)
            value = lambda reading: reading.gather(1, number[:, None])[:, 0]
            return self.responder.respond(push, read_all, len(number), self.strength, value)
        read = lambda d: objective.each_output(d.expand(len(number), -1), inputs).flatten(1).gather(1, places[index])
        value = lambda reading: reading.gather(1, column[:, None])[:, 0]
        return self.responder.respond(push, read, len(number), self.strength, value)

    def variance_of(self, function: Functional, x: Inputs | None = None) -> Tensor:
        """Return the variance of a scalar function of the weights by name, or of the outputs at x, by pushing it."""
        response = self.respond_to(function, x).require_convergence(self.responder.tolerance, self.drift)
        return response.cov.reshape(())

    @outside_inference
    def respond_to(self, function: Functional, x: Inputs | None = None) -> Response:
        """Push a scalar function of the weights, or of the outputs at x, and return its response."""
        objective, network = self.responder.objective, self.problem.network
        if x is None:
            weight_slope(network, function)  # raises if this is not a function of the weights
            value, size = (lambda row: scalar(function(objective.weights(row)))), 1
        else:
            inputs, size = objective.cast(x), network.count(x)
            f = objective.outputs(torch.zeros_like(objective.centre)[None], inputs)[0]
            output_slope(function, f)  # raises if this is not a function of the outputs
            value = lambda row: scalar(function(objective.run(row, inputs)), "outputs")
        push = lambda d: objective.each(torch.func.grad(value), d, size)
        read = lambda d: objective.each(value, d, size).unsqueeze(1)
        return self.responder.respond(push, read, 1, self.strength, lambda reading: reading[:, 0])


def _per_token(cov: Tensor, f: Tensor) -> Tensor:
    """Return the covariance of every token, (B, T, C, C), from (B, T C, T C); without tokens return it as it is."""
    if f.ndim == 2:
        return cov
    batch, tokens, classes = f.shape
    whole = cov.reshape(batch, tokens, classes, tokens, classes)
    return whole.diagonal(dim1=1, dim2=3).permute(0, 3, 1, 2)


@dataclass(frozen=True, eq=False)
class LinearisedResponse(Linearised):
    """f(x) ~ N(network output, J Λ⁻¹ Jᵀ) with Λ = G/φ + A, by block conjugate gradients for the rows of J at x.

    The tangent model's loss is quadratic, so its response does not depend on the strength of the push, and equals the
    GGN-Laplace variance. Needs the data at every prediction. ``wide`` takes products in float64 also for factors in
    float32, because single precision cannot resolve a variance that is a millionth of the prior's.
    """

    problem: Problem
    design: NetworkDesign
    statistics: Statistics
    theta: Tensor
    tolerance: float  # of the residuals, and of the error they cause in a variance
    wide: bool = False
    max_iterations: int = 2000
    trace: Trace | None = None
    solves_for_inputs: ClassVar[bool] = True
    differentiable: ClassVar[bool] = False  # there is no gradient through the iterations
    no_file: ClassVar[str] = NO_FILE

    def with_trace(self, trace: Trace) -> LinearisedResponse:
        return replace(self, trace=trace)

    def with_problem(self, problem: Problem) -> LinearisedResponse:
        """Return the posterior under another prior or noise; the data are not read again."""
        if problem.prior.needs_curvature:
            raise UnsupportedError("HFL(mode='linearised') keeps no curvature, and g_prior() needs one; use Full().")
        return replace(self, problem=problem)

    def solve(self, rows: Tensor) -> Solution:
        """Return Λ⁻¹ times every row (K, P), with residuals.

        Works in units of the prior, where Λ is at least one and most directions converge at once: a residual r then
        leaves out at most r² of a variance.
        """
        root = self.problem.prior.vector.detach().double().rsqrt()
        phi = self.problem.likelihood.dispersion.detach().to(root)
        product = lambda v: root * self._gram(root * v) / phi + v
        b, tolerance = rows.double() * root, self.tolerance
        while True:
            solution = block_conjugate_gradients(product, b, tolerance=tolerance, max_iterations=self.max_iterations)
            missing, variance = (solution.residuals * b.norm(dim=1)).square(), (solution.x * b).sum(1)
            most = float(torch.where(missing > 0, missing / variance, 0.0).max())
            if most <= self.tolerance:
                return replace(solution, x=solution.x * root)
            tolerance *= 0.5 * (self.tolerance / most) ** 0.5

    def _gram(self, v: Tensor) -> Tensor:
        if not self.wide:
            return gram_product(self.design, v)
        total = torch.zeros_like(v)
        for part in self.design.own_parts():
            total += part.jacobians.double().gram(v)
        return total

    def belief(self, x: Inputs, query: Query = ALL) -> FunctionGaussian:
        return self._joint(x, query.outputs) if query.joint else super().belief(x, query)

    def _joint(self, x: Inputs, outputs: ChosenOutputs | None = None) -> FunctionGaussian:
        """Return the joint belief: every row of J is solved for once, and multiplied by J at all inputs."""
        network = self.problem.network
        f, pieces = outputs_in_pieces(network, x, outputs)
        count, size = len(f), f[0].numel()
        total = torch.empty(count, size, count, size, dtype=torch.float64, device=f.device)
        for (samples, run), rows in jacobian_pieces(network, x, pieces, outputs):
            exact = rows.double()
            for part, solved in self._solve_rows(exact):
                number = torch.arange(part.start, part.stop, device=f.device)
                sample, output = samples.start + number // rows.outputs, run.start + number % rows.outputs
                again = jacobian_pieces(network, x, pieces, outputs) if len(pieces) > 1 else ((pieces[0], rows),)
                for (others, columns), jacobian in again:
                    total[sample, output, others, columns] = jacobian.double().jvp(solved)
        matrix = total.flatten(2).flatten(0, 1)
        symmetrise(matrix)
        return FunctionGaussian.across(f, matrix)

    def cross(self, jacobian: LayerJacobians, other: LayerJacobians | None = None) -> Tensor:
        exact = jacobian.double()
        second = exact if other is None else other.double()
        rows = (second.jvp(solved).flatten(1) for _, solved in self._solve_rows(exact))
        cov = concat_chunks(rows, exact.batch * exact.outputs)
        return cov if other is not None else 0.5 * (cov + cov.mT)

    def covariance(self, jacobian: LayerJacobians) -> Tensor:
        """Return J Λ⁻¹ Jᵀ of each datum, (B, S, C, C); only rows that are solved for together are in memory."""
        exact, classes = jacobian.double(), jacobian.outputs // jacobian.tokens
        rows = []
        for part, solved in self._solve_rows(exact):
            number = torch.arange(part.start, part.stop, device=solved.device)
            products = exact.jvp(solved)[number - part.start, number // jacobian.outputs]  # with outputs of its sample
            token = number % jacobian.outputs // classes
            rows.append(products.unflatten(1, (jacobian.tokens, classes))[number - part.start, token])
        cov = torch.cat(rows).reshape(jacobian.batch, jacobian.tokens, classes, classes)
        return (0.5 * (cov + cov.mT)).to(jacobian.dtype)

    def _solve_rows(self, jacobian: LayerJacobians) -> Iterator[tuple[slice, Tensor]]:
        """Yield Λ⁻¹ Jᵀ in runs of the B K rows of J that fit the byte budget, (run, P), in float64."""
        count, size = jacobian.batch * jacobian.outputs, len(self.theta)
        for run in chunks(count, 8 * VECTORS * size, self.theta.device, most=ROWS):
            seeds = torch.zeros(run.stop - run.start, count, dtype=torch.float64, device=self.theta.device)
            seeds.diagonal(run.start).fill_(1)
            rows = jacobian.vjp(seeds.unflatten(1, (jacobian.batch, jacobian.outputs)))
            yield run, self.solve(rows).x

    def variance_of(self, function: Functional, x: Inputs | None = None) -> Tensor:
        """Return the variance of a scalar function of the weights by name, or of the outputs at x, to first order."""
        slope = weight_slope(self.problem.network, function, x).double()
        return self.solve(slope.unsqueeze(0)).x[0] @ slope


VARIANTS = ("mean", "absolute", "random")

EVALUATED = 256  # training inputs that are averaged in every step of Adam, if no evaluation inputs are given
SCALES = (-12, 20)  # range of the log-scale that calibration searches


def evaluation_batches(given: Any, objective: Objective, data: Data, subsample: bool) -> list[Inputs]:
    """Return the batches of inputs to average over: those given, else the training inputs, or a subsample of them.

    Raise if evaluation inputs are empty, not finite, or do not fit the network.
    """
    if given is None and subsample:
        return [DrawnRows.draw(data, EVALUATED, torch.Generator().manual_seed(0)).inputs]
    if given is None:
        return [batch.inputs for batch in data.batches("evaluation")]
    one = isinstance(given, Tensor | Mapping | tuple) or not isinstance(given, Iterable)
    device = objective.network.device
    batches = [map_tensors(part, lambda t: t.to(device)) for part in ([given] if one else list(given))]
    sizes = [SampleRows().count(part) for part in batches]
    if not sizes or 0 in sizes:
        raise DataError(f"evaluation holds batches of {sizes} inputs; expected at least one batch, and inputs in each.")
    for part in batches:
        check_finite(part, "evaluation inputs")
        try:
            f = objective.outputs(torch.zeros_like(objective.centre)[None], part)
        except InputError as error:
            raise DataError(
                f"the network does not take the evaluation inputs ({error!s:.200}); expected inputs alone, without "
                "targets: one batch, or a list of batches."
            ) from error
        check_finite(f, "outputs of the network at the evaluation inputs")
    return batches


def push_of_average(objective: Objective, batches: list[Inputs], absolute: bool) -> Push:
    """Return the gradient of the average over inputs of Σ_c f_c, or of Σ_c |f_c|, as a function of d (K, P)."""
    parts = [objective.cast(part) for part in batches]
    sizes = [objective.network.count(part) for part in batches]
    total, size = sum(sizes), torch.abs if absolute else lambda f: f

    def push(d: Tensor) -> Tensor:
        gradient = torch.zeros_like(d)
        for part, n_samples in zip(parts, sizes, strict=True):
            average = lambda row, x=part: size(objective.run(row, x)).sum() / total
            gradient = gradient + objective.each(torch.func.grad(average), d, n_samples)
        return gradient

    return push


def random_forces(
    problem: Problem, data: Data, count: int, generator: torch.Generator, root: Tensor | None = None
) -> Tensor:
    """Draw ξ ~ N(0, H), (count, P), with the ``root`` of the Hessian: then H⁻¹ ξ are draws from the posterior.

    Without a root draw ξ ~ N(0, G/φ + A) with the GGN G, which needs no matrix. Cost: one pass over the data.
    """
    network, likelihood = problem.network, problem.likelihood
    theta = network.theta().double()
    if root is not None:
        return normal((count, len(theta)), generator, theta) @ root.mT.to(theta)
    total = normal((count, len(theta)), generator, theta) * problem.prior.vector.detach().to(theta).sqrt()
    phi = likelihood.dispersion.detach().to(theta)
    for jacobians in Sweep(network, likelihood, data, label="random pushes"):
        eps = sequential_normal((jacobians.batch, count, jacobians.outputs), generator, theta).transpose(0, 1)
        total = total + jacobians.vjp(eps).to(theta) / phi.sqrt()
    return total


@saved
@dataclass(frozen=True, eq=False)
class PushedWeights(Stored, Posterior):
    """f(x) ~ N(network output, a score from the outputs under pushed weights), for one push or K random ones.

    "mean": v = Δf/λ after a push of the average output over an evaluation set: the mean covariance of f(x) with that
    set, not a variance; negative values count as zero. "absolute": |Δf|/λ after a push of the average |f|. Both are
    *scores*: scale and ranking depend on the evaluation set, and ``scale`` is fitted on held-out data. "random": the
    mean of (Δf/λ)² over K pushes in random directions distributed as the posterior: an estimate of the variance, with
    a relative standard error of √(2/K).
    """

    problem: Problem
    moved: Tensor = stored(Array(("K", "P"), dtype="weights"))  # the change of the weights by each push, (K, P)
    strength: Tensor = stored(Array(("K",), SMALLEST, dtype="weights"))  # λ, (K,)
    variant: str = stored(Text(VARIANTS))
    statistics: Statistics = stored(STATISTICS)
    theta: Tensor = stored(WEIGHTS)
    scale: float = stored(Real(0), 1.0)
    findings: tuple[str, ...] = stored(ListOf(Text()), ())

    def scores(self, x: Inputs) -> tuple[Tensor, Tensor]:
        """Return f (B, [T,] C) and Δf/λ for every push, (K, B, [T,] C). Cost: K + 1 forward passes."""
        network = self.problem.network
        f = network(x).to(network.dtype)
        scores = []
        for row, strength in zip(self.moved, self.strength, strict=True):
            scores.append((network.at(row, x).to(network.dtype) - f) / strength.to(f))
        return f, torch.stack(scores)

    def belief(self, x: Inputs, query: Query = ALL) -> FunctionGaussian:
        f, scores = self.scores(x)
        if self.variant == "random":
            return query.of_belief(FunctionGaussian.of_deviations(f, scores, len(scores) / self.scale, query.joint))
        variance = self.scale * (scores[0].abs() if self.variant == "absolute" else scores[0].clamp_min(0))
        if query.joint:
            return query.of_belief(FunctionGaussian.across(f, torch.diag(variance.flatten())))
        return query.of_belief(FunctionGaussian(f, torch.diag_embed(variance)))

    def standard_error(self, x: Inputs) -> Tensor:
        """Return the standard error of the variances from K random pushes, (B, [T,] C); infinite for K = 1."""
        _, scores = self.scores(x)
        squares = self.scale * scores.square()
        return squares.std(0) / len(squares) ** 0.5 if len(squares) > 1 else torch.full_like(squares[0], torch.inf)

    @classmethod
    def from_state(cls, state: State, owner: Any = None) -> PushedWeights:
        posterior: PushedWeights = super().from_state(state, owner)
        if not len(posterior.moved) or (len(posterior.moved) > 1 and posterior.variant != "random"):
            raise FileError(f"{len(posterior.moved)} pushes of the variant {posterior.variant!r}; expected one")
        return posterior


def fit_scale(posterior: PushedWeights, data: Data) -> float:
    """Return the factor on the variances that maximises the likelihood of held-out data.

    A grid on the log-scale, then golden-section search. Cost: one prediction of the data.
    """
    parts = []
    for batch in data.batches("calibration"):
        belief = posterior(batch.inputs)
        y = posterior.problem.likelihood.targets(belief.mean, batch.targets)
        parts.append((belief.mean.double(), belief.cov.double(), y))
    if not any(bool(cov.any()) for _, cov, _ in parts):
        raise DataError(
            "the scores are zero at all calibration inputs, so any scale fits them alike; expected some above zero. "
            "Give other calibration data, other evaluation inputs, or variant='absolute'."
        )

    def cost(log_scale: float) -> float:
        factor = math.exp(log_scale)
        predicted = (posterior.problem.likelihood.predict(FunctionGaussian(f, factor * cov)).log_prob(y)
                     for f, cov, y in parts)  # fmt: skip
        try:
            total = -sum(float(part.sum()) for part in predicted)
        except torch.linalg.LinAlgError:  # type: ignore[attr-defined]  # a variance so large that it overflows
            return math.inf
        return total if math.isfinite(total) else math.inf

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


def calibrate(posterior: PushedWeights, data: Data) -> PushedWeights:
    """Return the posterior with its scale fitted on held-out data, and a finding if the search reached an edge."""
    scale = fit_scale(posterior, data)
    reason = ""
    if math.log(scale) <= SCALES[0] + 0.5:
        reason = "variances of zero: the network is calibrated, or too uncertain, without them"
    elif math.log(scale) >= SCALES[1] - 0.5:
        reason = "variances beyond its upper edge"
    finding = f"calibration reached the edge of the scale search at {scale:.2g}; the data ask for {reason}"
    return replace(posterior, scale=scale, findings=(*posterior.findings, *([finding] if reason else [])))


MODES = ("nonlinear", "linearised", "pretrained")
SOLVERS = ("newton", "adam")
WIDE = 1_000_000  # largest number of weights for which everything runs in float64
TUNED = 0.05  # default tolerance of variances by Adam
ITERATIONS = 100  # products with the curvature that a system is assumed to take
EPOCHS = 30  # gradients over all data that the response of an output is assumed to take
EXACT = 20_000  # largest number of weights for which Newton steps are the default

HFLPosterior = ResponsePosterior | LinearisedResponse | PushedWeights

ACCEPTED = Rule(
    "a positive number, or None for the default", lambda v: v is None or (is_real(v) and v > 0)
)  # infinity accepts every result
DRIFT = Rule("at least zero; math.inf allows any", lambda v: is_real(v) and v >= 0)
DTYPE = Rule("torch.float64, torch.float32 or None", lambda v: v is None or v in TOLERANCE)
PARTS = Rule(
    "inputs, a list of batches of inputs, or None",
    lambda v: isinstance(v, torch.Tensor | dict | None) or is_data(v),
    DataError,
)


@dataclass(frozen=True)
class HFL(Method):
    """Hessian-free Laplace: push the regularised loss a little towards a prediction and measure how far it moves.

    The response of a prediction to a push of strength λ is its variance under Laplace with the *full Hessian*. The
    weights must be at a minimum of the loss under this prior, except in the mode "linearised".

    Args:
        mode: "nonlinear" pushes every prediction up and down and re-optimises the network each time. "linearised" does
            the same for the tangent model: one block solve without λ, with the variances of ``Full``. "pretrained"
            pushes once, in the fit; a prediction then costs one more forward pass. Its scores are not variances, except
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
        NumericalError: In ``fit``, if the weights are not at a minimum; in predictions, if a response has not
            converged.
        DataError: In ``fit``, if evaluation or calibration data do not fit the network.

    Cost of a prediction: "nonlinear", for each output some tens of gradients over all data; "linearised", one product
    with the GGN for each iteration and all outputs together; "pretrained", one more forward pass.

    >>> from lapwing.api import fit
    >>> from lapwing.likelihoods.numbers import Gaussian
    >>> x, net = torch.tensor([[-1.0], [1.0]]), torch.nn.Linear(1, 1)
    >>> fit(net, [(x, x)], Gaussian(noise_std=1.0), method=HFL("linearised"), prior=1.0).functions(x).std
    tensor([[0.8165],
            [0.8165]])
    """

    mode: str = setting("nonlinear", one_of(MODES))
    lam: float | None = setting(None, POSITIVE | NONE)
    solver: str | None = setting(None, one_of(SOLVERS) | NONE)
    tolerance: float | None = setting(None, ACCEPTED)
    steps: int = setting(1000, integer())
    learning_rate: float = setting(1e-3, POSITIVE)
    batch_size: int = setting(128, integer())
    dtype: torch.dtype | None = setting(None, DTYPE)
    drift: float = setting(1.0, DRIFT)
    variant: str | None = setting(None, one_of(VARIANTS) | NONE)
    pushes: int = setting(32, integer())
    evaluation: Any = setting(None, PARTS, repr=False)
    calibration: Any = setting(None, DATA | NONE, repr=False)
    needs_prior: ClassVar[bool] = True
    timed: ClassVar[bool] = False  # it takes weights at a minimum, and as long as they are far from it
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
        super().__post_init__()
        if self.mode != "pretrained" and self.calibration is not None:
            raise UnsupportedError(
                f"calibration data for the mode {self.mode!r}, whose variances have their scale; leave them out, or "
                "use HFL(mode='pretrained')."
            )
        if self.mode == "linearised" and self.tolerance is not None and self.tolerance >= 1:
            raise UnsupportedError(
                f"tolerance is {self.tolerance}; expected below 1 in the mode 'linearised', where a residual of 1 is "
                "no solution at all."
            )

    def fit(self, problem: Problem, data: Data, generator: torch.Generator | None = None) -> HFLPosterior:
        """Return the posterior of the chosen mode."""
        refuse_g_prior(self, problem.prior)
        if self.mode == "linearised":
            return self._fit_linearised(problem, data)
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
            fit = Work(workload.repeated_products(0, 1))
            predict = Work(ITERATIONS * data * workload.products(workload.outputs))
            note = "at every prediction one linear system for each output"
            return workload.cost(wide + workload.kept, workload.jacobian_bytes(), fit, predict, note=note)
        if self._uses_adam(size):
            steps = 2 * self.steps * self.batch_size * workload.outputs  # a push up and one down
            fit, predict = Work(workload.forward), Work(steps * workload.training)
            return workload.cost(wide, 6 * wide, fit, predict, note="by Adam, at every prediction")
        products = 3 * (size if size <= DENSE else ITERATIONS)
        stored = wide * (size + 1 if size <= DENSE else 1)
        double = Work(4 * workload.training)  # two passes in float64
        predict = EPOCHS * data * workload.outputs * double
        note = "at every prediction some tens of epochs for each output"
        return workload.cost(stored, 2 * stored, products * double, predict, note=note)

    def _fit_linearised(self, problem: Problem, data: Data) -> LinearisedResponse:
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
        centred = objective.move_centre(minimum)
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
        response = response.require_convergence(tolerance, self.drift)
        # Half the difference between both pushes, in which drift cancels.
        displacements = response.cov * response.strength[:, None]
        findings = (*findings, *distance_finding(float(response.drift.max()), TWIN))
        posterior = PushedWeights(
            problem, displacements.to(theta), response.strength.to(theta), variant, statistics, theta, 1.0, findings
        )
        if self.calibration is None:
            return posterior
        return calibrate(
            posterior, problem.network.read_data(self.calibration, "calibration", target_key=data.target_key)
        )

    def _push(
        self, problem: Problem, responder: AnyResponder, data: Data, variant: str, generator: torch.Generator
    ) -> tuple[Push, int]:
        """Return the gradient of the functions that "pretrained" pushes, and their number."""
        objective = responder.objective
        if variant == "random":
            force = random_forces(problem, data, self.pushes, generator, responder.root).to(objective.centre)
            return (lambda d: force), self.pushes
        batches = evaluation_batches(self.evaluation, objective, data, subsample=self._uses_adam(objective.size))
        return push_of_average(objective, batches, variant == "absolute"), 1
