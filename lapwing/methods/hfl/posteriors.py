"""The posteriors of the modes "nonlinear" and "linearised", which need the data at every prediction."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from lapwing.core.chosen import ChosenOutputs
from lapwing.core.gaussian import FunctionGaussian
from lapwing.core.inputs import Inputs
from lapwing.core.memory import PIECE, gathered, runs
from lapwing.core.state import State
from lapwing.core.trace import Trace
from lapwing.errors import UnsupportedError
from lapwing.linalg.cg import block_conjugate_gradients
from lapwing.linalg.design import gram_product
from lapwing.linalg.gram import symmetrise
from lapwing.linalg.operators import Solution
from lapwing.methods.hfl.responder import AnyResponder
from lapwing.methods.hfl.response import Response
from lapwing.networks.forward import outside_inference
from lapwing.networks.functionals import Functional, output_slope, scalar, weight_slope
from lapwing.networks.jacobians import LayerJacobians
from lapwing.posteriors.protocols import Linearised, Posterior
from lapwing.posteriors.pushforward import jacobian_pieces, outputs_in_pieces
from lapwing.problem import Problem, Statistics
from lapwing.tangent.design import NetworkDesign

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

    def state(self) -> State:
        """Raise ``UnsupportedError``: predictions need the data, which a file does not hold."""
        raise UnsupportedError(NO_FILE)

    def __call__(self, x: Inputs, joint: bool = False) -> FunctionGaussian:
        return self._belief(x, joint)

    def chosen(self, x: Inputs, outputs: ChosenOutputs, joint: bool = False) -> FunctionGaussian:
        return self._belief(x, joint, outputs)

    def _belief(self, x: Inputs, joint: bool, outputs: ChosenOutputs | None = None) -> FunctionGaussian:
        network = self.problem.network
        f = network(x).to(network.dtype)
        f = f if outputs is None else outputs.of(f)
        cov = self.respond(x, joint, outputs).checked(self.responder.tolerance, self.drift).cov
        if joint:
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
        return Response.joined([respond(run) for run in runs(count, each, device, 2 * PIECE)])

    def _respond(
        self, x: Inputs, shape: tuple[int, ...], chosen: ChosenOutputs, places: Tensor, run: slice, joint: bool
    ) -> Response:
        """Push a run of the outputs with these places (B, C) at the inputs x, and return the responses.

        ``shape`` is that of all outputs of an input.
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
        response = self.respond_to(function, x).checked(self.responder.tolerance, self.drift)
        return response.cov.reshape(())

    @outside_inference
    def respond_to(self, function: Functional, x: Inputs | None = None) -> Response:
        """Push a scalar function of the weights, or of the outputs at x, and return its response."""
        objective, network = self.responder.objective, self.problem.network
        if x is None:
            weight_slope(network, function)  # raises if this is no function of the weights
            value, size = (lambda row: scalar(function(objective.weights(row)))), 1
        else:
            inputs, size = objective.cast(x), network.count(x)
            f = objective.outputs(torch.zeros_like(objective.centre)[None], inputs)[0]
            output_slope(function, f)  # raises if this is no function of the outputs
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

    def with_trace(self, trace: Trace) -> LinearisedResponse:
        return replace(self, trace=trace)

    def with_problem(self, problem: Problem) -> LinearisedResponse:
        """Return the posterior under another prior or noise; the data are not read again."""
        if problem.prior.needs_curvature:
            raise UnsupportedError("HFL(mode='linearised') keeps no curvature, and g_prior() needs one; use Full().")
        return replace(self, problem=problem)

    def solved(self, rows: Tensor) -> Solution:
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

    def state(self) -> State:
        """Raise ``UnsupportedError``: predictions need the data, which a file does not hold."""
        raise UnsupportedError(NO_FILE)

    def __call__(self, x: Inputs, joint: bool = False) -> FunctionGaussian:
        return self._joint(x) if joint else self.marginal(x)

    def chosen(self, x: Inputs, outputs: ChosenOutputs, joint: bool = False) -> FunctionGaussian:
        return self._joint(x, outputs) if joint else self.marginal(x, outputs)

    def _joint(self, x: Inputs, outputs: ChosenOutputs | None = None) -> FunctionGaussian:
        """Return the joint belief: every row of J is solved for once, and multiplied by J at all inputs."""
        network = self.problem.network
        f, pieces = outputs_in_pieces(network, x, outputs)
        count, size = len(f), f[0].numel()
        total = torch.empty(count, size, count, size, dtype=torch.float64, device=f.device)
        for (samples, run), rows in jacobian_pieces(network, x, pieces, outputs):
            exact = rows.double()
            for part, solved in self._solved_rows(exact):
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
        rows = (second.jvp(solved).flatten(1) for _, solved in self._solved_rows(exact))
        cov = gathered(rows, exact.batch * exact.outputs)
        return cov if other is not None else 0.5 * (cov + cov.mT)

    def covariance(self, jacobian: LayerJacobians) -> Tensor:
        """Return J Λ⁻¹ Jᵀ of each datum, (B, S, C, C); only rows that are solved for together are in memory."""
        exact, classes = jacobian.double(), jacobian.outputs // jacobian.tokens
        rows = []
        for part, solved in self._solved_rows(exact):
            number = torch.arange(part.start, part.stop, device=solved.device)
            products = exact.jvp(solved)[number - part.start, number // jacobian.outputs]  # with outputs of its sample
            token = number % jacobian.outputs // classes
            rows.append(products.unflatten(1, (jacobian.tokens, classes))[number - part.start, token])
        cov = torch.cat(rows).reshape(jacobian.batch, jacobian.tokens, classes, classes)
        return (0.5 * (cov + cov.mT)).to(jacobian.dtype)

    def _solved_rows(self, jacobian: LayerJacobians) -> Iterator[tuple[slice, Tensor]]:
        """Yield Λ⁻¹ Jᵀ in runs of the B K rows of J that fit the byte budget, (run, P), in float64."""
        count, size = jacobian.batch * jacobian.outputs, len(self.theta)
        for run in runs(count, 8 * VECTORS * size, self.theta.device, most=ROWS):
            seeds = torch.zeros(run.stop - run.start, count, dtype=torch.float64, device=self.theta.device)
            seeds.diagonal(run.start).fill_(1)
            rows = jacobian.vjp(seeds.unflatten(1, (jacobian.batch, jacobian.outputs)))
            yield run, self.solved(rows).x

    def variance_of(self, function: Functional, x: Inputs | None = None) -> Tensor:
        """Return the variance of a scalar function of the weights by name, or of the outputs at x, to first order."""
        slope = weight_slope(self.problem.network, function, x).double()
        return self.solved(slope.unsqueeze(0)).x[0] @ slope
