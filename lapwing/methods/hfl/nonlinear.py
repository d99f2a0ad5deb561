"""The posterior of the mode "nonlinear": every prediction pushes the network and re-optimises it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from lapwing.core.data import Inputs
from lapwing.core.gaussian import FunctionGaussian
from lapwing.core.state import State
from lapwing.errors import UnsupportedError
from lapwing.losses import Statistics
from lapwing.methods.hfl.objective import flat_gradient
from lapwing.methods.hfl.pushes import Responds
from lapwing.methods.hfl.response import NO_FILE, Response
from lapwing.networks.forward import outside_inference
from lapwing.networks.functionals import Functional, output_slope, scalar, weight_slope
from lapwing.problem import Problem


@dataclass(frozen=True, eq=False)
class ResponsePosterior:
    """f(x) ~ N(network output, response to pushes of f(x)): the variance of Laplace with the full Hessian.

    ``responder`` holds the objective with its data, so this posterior cannot be saved. ``respond`` returns the details
    behind a prediction: how far each push came and how much to trust it.
    """

    problem: Problem
    responder: Responds
    statistics: Statistics
    theta: Tensor
    strength: float | None = None
    findings: tuple[str, ...] = ()
    drift: float = math.inf  # how far an unpushed twin may move, in posterior standard deviations

    def state(self) -> State:
        """Raise ``UnsupportedError``: predictions need the data, which a file does not hold."""
        raise UnsupportedError(NO_FILE)

    def __call__(self, x: Inputs, joint: bool = False) -> FunctionGaussian:
        network = self.problem.network
        f = network(x).to(network.dtype)
        cov = self.respond(x, joint).checked(self.responder.tolerance, self.drift).cov
        if joint:
            cov = cov.reshape(f.numel(), f.numel())
            return FunctionGaussian.across(f, 0.5 * (cov + cov.mT))
        size = f[0].numel()
        cov = cov.reshape(len(f), size, size)
        return FunctionGaussian(f, _per_token(0.5 * (cov + cov.mT), f).to(f))

    @outside_inference
    def respond(self, x: Inputs, joint: bool = False) -> Response:
        """Push every output at every input and return the responses of the outputs there, or at all inputs if joint.

        Shapes: the covariances are (B C, C), or (B C, B C) if joint; C counts all tokens.
        """
        objective = self.responder.objective
        x = objective.cast(x)
        network = self.problem.network
        size, outputs = network.count(x), torch.Size(network.output_shape).numel()
        index = torch.arange(size, device=objective.centre.device).repeat_interleave(outputs)
        inputs = network.take(x, index)
        eye = torch.eye(outputs).to(objective.centre)
        seeds = eye.repeat(size, 1).reshape(-1, *network.output_shape)
        push = lambda d: objective.slopes(d, inputs, seeds)
        if joint:
            everywhere = lambda d: objective.outputs(d, x).flatten(1)
            return self.responder.respond(push, everywhere, len(index), self.strength, torch.diagonal)
        value = lambda reading: (seeds.flatten(1) * reading).sum(1)
        return self.responder.respond(push, lambda d: self._row_outputs(d, inputs), len(index), self.strength, value)

    def _row_outputs(self, d: Tensor, inputs: Inputs) -> Tensor:
        """Return f(x_k) at row k of d, (K, C); a single row stands for all."""
        count = self.problem.network.count(inputs)
        if len(d) != count:
            d = d.expand(count, -1)
        return self.responder.objective.each_output(d, inputs).flatten(1)

    def variance_of(self, function: Functional, x: Inputs | None = None) -> Tensor:
        """Return the variance of a scalar function of the weights by name, or of the outputs at x, by pushing it."""
        response = self.respond_to(function, x).checked(self.responder.tolerance, self.drift)
        return response.cov.reshape(())

    @outside_inference
    def respond_to(self, function: Functional, x: Inputs | None = None) -> Response:
        """Push a scalar function of the weights, or of the outputs at x, and return its response."""
        objective, first = self.responder.objective, lambda reading: reading[:, 0]
        if x is None:
            weight_slope(self.problem.network, function)  # raises if this is no function of the weights
            push = lambda d: torch.stack([flat_gradient(objective, function, row) for row in d])
            read = lambda d: torch.stack([scalar(function(objective.weights(row))).reshape(1) for row in d])
            return self.responder.respond(push, read, 1, self.strength, first)
        inputs, size = objective.cast(x), self.problem.network.count(x)
        f = objective.outputs(torch.zeros_like(objective.centre)[None], inputs)[0]
        output_slope(function, f)  # raises if this is no function of the outputs
        value = lambda row: scalar(function(objective.run(row, inputs)), "outputs")
        push = lambda d: objective.each(torch.func.grad(value), d, size)
        read = lambda d: objective.each(value, d, size).unsqueeze(1)
        return self.responder.respond(push, read, 1, self.strength, first)


def _per_token(cov: Tensor, f: Tensor) -> Tensor:
    """Return the covariance of every token, (B, T, C, C), from (B, T C, T C); without tokens return it as it is."""
    if f.ndim == 2:
        return cov
    batch, tokens, classes = f.shape
    whole = cov.reshape(batch, tokens, classes, tokens, classes)
    return whole.diagonal(dim1=1, dim2=3).permute(0, 3, 1, 2)
