"""The mode "pretrained": functions that are pushed once, the posterior of the pushed weights, and its calibration."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lapwing.core.data import Data
from lapwing.core.gaussian import FunctionGaussian
from lapwing.core.inputs import Inputs, SampleRows, check_finite, map_tensors
from lapwing.core.pool import Pool
from lapwing.core.random import normal, sequential_normal
from lapwing.core.schema import SMALLEST, Array, ListOf, Real, Text
from lapwing.core.state import State, saved
from lapwing.curvature.sweep import Sweep
from lapwing.errors import DataError, FileError, InputError, NumericalError
from lapwing.methods.hfl.objective import Objective
from lapwing.methods.hfl.responder import Push
from lapwing.posteriors.protocols import Posterior
from lapwing.problem import STATISTICS, Problem, Statistics

VARIANTS = ("mean", "absolute", "random")

EVALUATED = 256  # training inputs that are averaged in every step of Adam, if no evaluation inputs are given
SCALES = (-12, 20)  # range of the log-scale that calibration searches


def evaluation_batches(given: Any, objective: Objective, data: Data, few: bool) -> list[Inputs]:
    """Return the batches of inputs to average over: those given, else the training inputs (``few``: some of them)."""
    if given is None and few:
        return [Pool.drawn(data, EVALUATED, torch.Generator().manual_seed(0)).inputs]
    if given is None:
        return [batch.inputs for batch in data.batches("evaluation")]
    one = isinstance(given, Tensor | Mapping | tuple) or not isinstance(given, Iterable)
    device = objective.network.device
    batches = [map_tensors(part, lambda t: t.to(device)) for part in ([given] if one else list(given))]
    _check_evaluation(objective, batches)
    return batches


def _check_evaluation(objective: Objective, batches: list[Inputs]) -> None:
    """Raise if evaluation inputs are empty, not finite, or do not fit the network."""
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


def averaged(objective: Objective, batches: list[Inputs], absolute: bool) -> Push:
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
class PushedWeights(Posterior):
    """f(x) ~ N(network output, a score from the outputs under pushed weights), for one push or K random ones.

    "mean": v = Δf/λ after a push of the average output over an evaluation set: the mean covariance of f(x) with that
    set, not a variance; negative values count as zero. "absolute": |Δf|/λ after a push of the average |f|. Both are
    *scores*: scale and ranking depend on the evaluation set, and ``scale`` is fitted on held-out data. "random": the
    mean of (Δf/λ)² over K pushes in random directions distributed as the posterior: an estimate of the variance, with
    a relative standard error of √(2/K).
    """

    problem: Problem
    moved: Tensor  # the change of the weights by each push, (K, P)
    strength: Tensor  # λ, (K,)
    variant: str
    statistics: Statistics
    theta: Tensor
    scale: float = 1.0
    findings: tuple[str, ...] = ()

    def scores(self, x: Inputs) -> tuple[Tensor, Tensor]:
        """Return f (B, [T,] C) and Δf/λ for every push, (K, B, [T,] C). Cost: K + 1 forward passes."""
        network = self.problem.network
        f = network(x).to(network.dtype)
        scores = []
        for row, strength in zip(self.moved, self.strength, strict=True):
            scores.append((network.at(row, x).to(network.dtype) - f) / strength.to(f))
        return f, torch.stack(scores)

    def __call__(self, x: Inputs, joint: bool = False) -> FunctionGaussian:
        f, scores = self.scores(x)
        if self.variant == "random":
            return FunctionGaussian.of_deviations(f, scores, len(scores) / self.scale, joint)
        variance = self.scale * (scores[0].abs() if self.variant == "absolute" else scores[0].clamp_min(0))
        if joint:
            return FunctionGaussian.across(f, torch.diag(variance.flatten()))
        return FunctionGaussian(f, torch.diag_embed(variance))

    def standard_error(self, x: Inputs) -> Tensor:
        """Return the standard error of the variances from K random pushes, (B, [T,] C); infinite for K = 1."""
        _, scores = self.scores(x)
        squares = self.scale * scores.square()
        return squares.std(0) / len(squares) ** 0.5 if len(squares) > 1 else torch.full_like(squares[0], torch.inf)

    def state(self) -> State:
        settings = {
            "statistics": asdict(self.statistics), "variant": self.variant, "scale": self.scale,
            "findings": self.findings,
        }  # fmt: skip
        tensors = {"theta": self.theta, "moved": self.moved, "strength": self.strength}
        return State("PushedWeights", settings, tensors)

    @classmethod
    def from_state(cls, state: State, problem: Problem) -> PushedWeights:
        theta = Array(("P",), dtype=problem.network.dtype)
        fields = state.read(
            theta=theta, moved=replace(theta, shape=("K", "P")), strength=replace(theta, shape=("K",), least=SMALLEST),
            variant=Text(VARIANTS), scale=Real(0), findings=ListOf(Text()), statistics=STATISTICS,
        )  # fmt: skip
        if not len(fields["moved"]) or (len(fields["moved"]) > 1 and fields["variant"] != "random"):
            raise FileError(f"{len(fields['moved'])} pushes of the variant {fields['variant']!r}; expected one")
        return cls(problem, **fields)


def fitted_scale(posterior: PushedWeights, data: Data) -> float:
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


def calibrated(posterior: PushedWeights, data: Data) -> PushedWeights:
    """Return the posterior with its scale fitted on held-out data, and a finding if the search reached an edge."""
    scale = fitted_scale(posterior, data)
    reason = ""
    if math.log(scale) <= SCALES[0] + 0.5:
        reason = "variances of zero: the network is calibrated, or too uncertain, without them"
    elif math.log(scale) >= SCALES[1] - 0.5:
        reason = "variances beyond its upper edge"
    finding = f"calibration reached the edge of the scale search at {scale:.2g}; the data ask for {reason}"
    return replace(posterior, scale=scale, findings=(*posterior.findings, *([finding] if reason else [])))
