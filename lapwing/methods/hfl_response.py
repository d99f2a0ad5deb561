"""The response of a network to a small push of its loss: the loss, Newton steps, pushes, and checks of the result."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor, nn

from lapwing.data.batches import Data
from lapwing.data.inputs import Batch, Inputs, map_tensors
from lapwing.data.streams import shuffle_batches
from lapwing.errors import NumericalError
from lapwing.likelihoods.base import Likelihood
from lapwing.linalg.dense import eigvalsh, not_definite
from lapwing.linalg.krylov import block_conjugate_gradients
from lapwing.networks.forward import raw_output, select_kernels, with_output_dim
from lapwing.networks.network import Network
from lapwing.priors import BoundPrior
from lapwing.runtime.memory import batch_size_for
from lapwing.runtime.threads import ProgressBar, math_attention, quiet


@dataclass(frozen=True, eq=False)
class Objective:
    r"""U(θ) = Σ loss(f(x; θ), y)/φ + ½ ‖θ - μ‖²_A, at θ = centre + d for K rows d (K, P) in one call.

    Works on a copy of the model in ``dtype``; the model itself is not changed. All rows run in one vectorised call if
    the operations allow it, and row by row if they do not (recurrent kernels).
    """

    network: Network
    likelihood: Likelihood
    prior: BoundPrior
    batches: tuple[Batch, ...]
    model: nn.Module
    start: Tensor  # the weights in the copy of the model, in its dtype, (P,)
    phi: Tensor  # the dispersion, in the same dtype
    centre: Tensor  # θ, (P,)

    @classmethod
    def build(
        cls, network: Network, likelihood: Likelihood, prior: BoundPrior, data: Data, dtype: torch.dtype
    ) -> Objective:
        """Copy the model in ``dtype`` and keep the data; one forward pass to check the targets."""
        model = copy.deepcopy(network.replica).to(dtype)
        for parameter in model.parameters():
            parameter.requires_grad_(False)
        cast = lambda t: t.to(dtype) if t.is_floating_point() else t
        batches = []
        for batch in data.batches("data"):
            inputs = map_tensors(batch.inputs, cast)
            with torch.no_grad(), select_kernels(network.plain_kernels):
                f = with_output_dim(raw_output(model, inputs))
            batches.append(Batch(inputs, cast(likelihood.targets(f, batch.targets))))
        start = network.theta().to(dtype)
        return cls(network, likelihood, prior, tuple(batches), model, start, likelihood.dispersion.to(start), start)

    @property
    def dtype(self) -> torch.dtype:
        return self.centre.dtype

    @property
    def size(self) -> int:
        return len(self.centre)

    @cached_property
    def data(self) -> int:
        """The number of training samples."""
        return sum(self.network.count(batch.inputs) for batch in self.batches)

    @cached_property
    def _precision(self) -> Tensor:
        return self.prior.vector.detach().to(self.centre)

    @cached_property
    def _mean(self) -> Tensor:
        return torch.as_tensor(self.prior.mean, dtype=self.dtype, device=self.centre.device)

    @cached_property
    def _tensors(self) -> dict[str, Tensor]:
        return dict(self.model.named_parameters())

    def weights(self, d: Tensor) -> dict[str, Tensor]:
        """Return all parameters by name, the selected ones at θ = centre + d, d (P,)."""
        tensors = self._tensors
        steps = self.network.selection.split(d + (self.centre - self.start))
        return tensors | {name: tensors[name] + step for name, step in steps.items()}

    def move_centre(self, d: Tensor) -> Objective:
        """Return the objective with its centre moved by d (P,)."""
        return replace(self, centre=self.centre + d)

    def run(self, d: Tensor, inputs: Inputs) -> Tensor:
        """Return f (B, [T,] C) for one d (P,), differentiable in d."""
        return with_output_dim(raw_output(self.model, inputs, self.weights(d)))

    def _loss(self, d: Tensor, inputs: Inputs, targets: Tensor) -> Tensor:
        return self.likelihood.loss(self.run(d, inputs), targets).sum() / self.phi

    def outputs(self, d: Tensor, inputs: Inputs) -> Tensor:
        """Return f for every row of d, (K, B, [T,] C)."""
        inputs = self.cast(inputs)
        return self.each(lambda row: self.run(row, inputs), d, self.network.count(inputs))

    def cast(self, inputs: Inputs) -> Inputs:
        """Return the inputs with their real numbers in the dtype of the copy, and able to take part in a gradient."""
        differentiable = lambda t: t.clone() if t.is_inference() else t
        return map_tensors(inputs, lambda t: differentiable(t).to(self.dtype) if t.is_floating_point() else t)

    def value(self, d: Tensor) -> float:
        """Return U at one d (P,)."""
        gap = self.centre + d - self._mean
        total = 0.5 * (self._precision * gap.square()).sum()
        for batch in self.batches:
            total = total + self._loss(d, batch.inputs, batch.targets)
        return float(total.detach())

    def gradient(self, d: Tensor, batches: tuple[Batch, ...] | None = None) -> Tensor:
        """Return ∇U at every row of d, (K, P); with ``batches`` an estimate from these, scaled to all data."""
        chosen = self.batches if batches is None else batches
        share = 1.0 if batches is None else self.data / sum(self.network.count(batch.inputs) for batch in chosen)
        total = self._precision * (self.centre + d - self._mean)
        for batch in chosen:
            slope = torch.func.grad(lambda row, b=batch: self._loss(row, b.inputs, b.targets))
            total = total + share * self.each(slope, d, batch.n_samples)
        return total

    def hessian_product(self, v: Tensor) -> Tensor:
        """Return the Hessian of U at the centre times every row of v, (K, P)."""
        zero = torch.zeros_like(self.centre)
        total = self._precision * v
        for batch in self.batches:
            slope = torch.func.grad(lambda row, b=batch: self._loss(row, b.inputs, b.targets))
            product = lambda row, s=slope: torch.func.vjp(s, zero)[1](row)[0]  # the Hessian is symmetric
            total = total + self.each(product, v, 2 * batch.n_samples)
        return total

    def slopes(self, d: Tensor, inputs: Inputs, seeds: Tensor) -> Tensor:
        """Return the gradient of seeds_k · f(x_k; θ) at every row k of d, (K, P); seeds (K, [T,] C)."""
        weighted = lambda row, x, s: (self.run(row, x)[0] * s).sum()
        return self._each_sample(torch.func.grad(weighted), d, inputs, seeds)

    def each_output(self, d: Tensor, inputs: Inputs) -> Tensor:
        """Return f(x_k; centre + d_k) for every row k, (K, [T,] C)."""
        return self._each_sample(lambda row, x: self.run(row, x)[0], d, inputs)

    def _each_sample(self, function: Callable[..., Tensor], d: Tensor, inputs: Inputs, *others: Tensor) -> Tensor:
        """Return the function of row k of d, of sample k as a batch of one, and of row k of ``others``, for every k."""
        if isinstance(inputs, Tensor):
            return self.each(function, d, 1, inputs.unsqueeze(1), *others)
        samples = [self.network.take(inputs, slice(k, k + 1)) for k in range(len(d))]
        return torch.stack([function(*parts).detach() for parts in zip(d, samples, *others, strict=True)])

    def each(self, function: Callable[..., Tensor], rows: Tensor, samples: int, *others: Tensor) -> Tensor:
        """Return the function of every row: vectorised over chunks of rows, or row by row if vmap cannot."""
        sizes = self.network.footprint
        numbers = 4 * (samples * (sizes.width + sizes.graph) + self.size)
        chunk = batch_size_for(len(rows), numbers * self.centre.element_size(), self.centre.device)
        # Some versions of torch.func differentiate to zero while gradients are off.
        with torch.enable_grad(), quiet, select_kernels(self.network.plain_kernels), math_attention:
            try:
                return torch.func.vmap(function, chunk_size=chunk)(rows, *others).detach()
            except (RuntimeError, NotImplementedError, ValueError):  # an operation has no batching rule
                return torch.stack([function(*parts).detach() for parts in zip(rows, *others, strict=True)])


Rows = Callable[[Tensor], Tensor]  # (K, P) -> (K, P)

DENSE = 2048  # largest number of weights for which the Hessian is formed
FLAT = 1e-6  # a direction with less curvature than this share of the prior precision counts as flat
NEAR = 1e-4  # the same while searching for the minimum: near a flat minimum the curvature may be slightly negative
NOT_CONVERGED = (
    "The network is at no minimum of its regularised loss: train it further with this prior as weight decay, or use "
    "HFL(mode='linearised')."
)


@dataclass(frozen=True, eq=False)
class Hessian:
    """The Hessian H of the objective at its centre: a Cholesky factor up to ``DENSE`` weights, block CG above.

    A minimum may be flat in some directions: the weights of an attention head can rotate without any change of the
    outputs. There ``flat`` times the prior precision is added, so that H can be inverted. A push of outputs has no
    component in these directions; ``flat_variance`` bounds their contribution to a variance.
    """

    objective: Objective
    flat: float = FLAT

    @property
    def is_formed(self) -> bool:
        """Whether the matrix is formed; otherwise products with it are used."""
        return self.objective.size <= DENSE

    @cached_property
    def _ridge(self) -> Tensor:
        return self.flat * self.objective.prior.vector.detach().to(self.objective.centre)

    @cached_property
    def _matrix(self) -> Tensor | None:
        if not self.is_formed:
            return None
        eye = torch.eye(self.objective.size, dtype=self.objective.dtype, device=self.objective.centre.device)
        matrix = self.objective.hessian_product(eye).double()
        return 0.5 * (matrix + matrix.mT)

    @cached_property
    def root(self) -> Tensor | None:
        """L (P, P) with L Lᵀ = H; None if H is not formed, not positive definite, or flat in some direction."""
        if self._matrix is None:
            return None
        factor, info = torch.linalg.cholesky_ex(self._matrix)
        pivots = factor.diagonal().square()
        smallest = max(1e-13 * float(pivots.max()), float(self._ridge.min()))  # below it a direction is flat
        return factor if int(info) == 0 and float(pivots.min()) > smallest else None

    @cached_property
    def _factor(self) -> Tensor | None:
        matrix = self._matrix
        if matrix is None or self.root is not None:
            return self.root
        factor, info = torch.linalg.cholesky_ex(matrix + torch.diag(self._ridge).double())
        if int(info) == 0:
            return factor
        smallest = float(eigvalsh(matrix)[0])
        raise NumericalError(not_definite("the trained weights", smallest) + f" {NOT_CONVERGED}")

    def solve(self, rows: Tensor) -> Tensor:
        """Return H⁻¹ times every row, (K, P); raise if H is indefinite."""
        factor = self._factor
        if factor is not None:
            return torch.cholesky_solve(rows.double().mT, factor).mT.to(rows)
        product = lambda v: self.objective.hessian_product(v) + self._ridge * v
        try:
            solution = block_conjugate_gradients(product, rows, tolerance=1e-4, max_iterations=2000)
        except NumericalError as error:
            advice = f" {NOT_CONVERGED}" if "positive definite" in str(error) else ""
            raise NumericalError(f"{error}{advice}") from error
        return solution.x.to(rows)

    def flat_variance(self, solved: Tensor) -> Tensor:
        """Return an upper bound on the contribution of flat directions to rᵀ H⁻¹ r, (K,), given H⁻¹ r (K, P)."""
        return (self._ridge * solved.square()).sum(1)


def nearest_minimum(objective: Objective) -> tuple[Tensor, list[float]]:
    """Return the step (P,) from the weights to the minimum they belong to, and the Newton decrements on the way."""
    start = torch.zeros_like(objective.centre)
    solve = lambda d, rows: Hessian(objective.move_centre(d), NEAR).solve(rows)
    tolerance = 1e-18 if objective.dtype == torch.float64 else 1e-9
    return newton(objective.gradient, solve, objective.value, start, tolerance=tolerance)


def distance_in_words(objective: Objective) -> str:
    """Return how far the weights are from a minimum of the regularised loss U, without its Hessian.

    The words have the length of the gradient, and by how much the best of 20 steps along it lowers U.
    """
    zero = torch.zeros_like(objective.centre)
    slope, here = objective.gradient(zero.unsqueeze(0))[0], objective.value(zero)
    longest = objective.centre.norm().clamp_min(1) / slope.norm().clamp_min(torch.finfo(slope.dtype).tiny)
    values = (objective.value(-(longest / 4**i) * slope) for i in range(20))
    fall = max((here - value for value in values if math.isfinite(value)), default=0.0)
    return (
        f"the gradient of the regularised loss has the length {float(slope.norm()):.3g} at the trained weights; "
        f"expected about zero. A single step along it lowers the loss by {max(fall, 0.0):.3g}, from {here:.3g}; "
        "expected far below 1."
    )


@dataclass(frozen=True, eq=False)
class PushedMinima:
    """Perturbed minima d (K, P), with ∇U(d_k) = λ_k ∇g_k(d_k) up to the relative residual of each row."""

    d: Tensor
    residuals: Tensor  # |λ ∇g - ∇U| in the metric of H⁻¹, relative to the start, (K,)
    missing: Tensor  # share of the response g_k(d_k) - g_k(start) that one more step would add, (K,)
    steps: int


def push_minima(
    gradient: Rows, push: Rows, solve: Rows, strength: Tensor, start: Tensor, *, tolerance: float, max_steps: int = 50
) -> PushedMinima:
    """Minimise U - λ_k g_k for every row k, with steps H⁻¹ (λ ∇g - ∇U) and the Hessian H at the start.

    ``gradient`` returns ∇U at each row, ``push`` returns ∇g_k at row k, ``solve`` applies H⁻¹ and ``strength`` is λ
    (K,). For small λ each step reduces the error, in the metric of H, and the residual, in the metric of H⁻¹, by a
    factor of about λ. Rows that stop improving keep their best iterate; their residual says how good it is.

    >>> minima = push_minima(lambda d: 2 * d, torch.ones_like, lambda r: r / 2, torch.tensor([3.0]), torch.zeros(1, 1),
    ...                 tolerance=1e-6)
    >>> minima.d, minima.steps
    (tensor([[1.5000]]), 1)
    """
    weight, tiny = strength.unsqueeze(1), torch.finfo(start.dtype).tiny
    d = kept = start
    ahead, whole = torch.zeros_like(start), torch.ones_like(strength)
    best = torch.full_like(strength, torch.inf)
    for step in range(max_steps + 1):
        gap = weight * push(d) - gradient(d)
        overflow = ~torch.isfinite(gap).all(1)  # the last step was too long
        more = solve(gap.masked_fill(overflow.unsqueeze(1), 0))
        sizes = (gap * more).sum(1).clamp_min(0).sqrt().masked_fill(overflow, torch.inf)
        whole = whole if step else sizes.clamp_min(tiny)
        better = sizes / whole < best
        best = torch.where(better, sizes / whole, best)
        kept, ahead = (torch.where(better.unsqueeze(1), new, old) for new, old in ((d, kept), (more, ahead)))
        going = better & (best > tolerance)
        if not bool(going.any()) or step == max_steps:
            break
        d = torch.where(going.unsqueeze(1), d + more, kept)
    slopes = push(kept)
    rest, response = (slopes * ahead).sum(1).abs(), (slopes * (kept - start)).sum(1).abs()
    return PushedMinima(kept, best, rest / (response + rest).clamp_min(tiny), step)


def newton(
    gradient: Rows, solve: Callable[[Tensor, Tensor], Tensor], value: Callable[[Tensor], float], start: Tensor, *,
    tolerance: float, max_steps: int = 30,
) -> tuple[Tensor, list[float]]:  # fmt: skip
    """Minimise U from ``start`` (P,) by Newton's method; return the minimum and the decrement gᵀH⁻¹g of every step.

    ``solve(d, r)`` applies the inverse Hessian at d to r (1, P). Half the decrement estimates how far U is above its
    minimum. ``value`` is the function U(d): a step that does not lower U enough is halved, so that a search from far
    away stays in the basin of its minimum. The search ends if the decrement is at most ``tolerance``, or if no length
    of the step helps; the last decrement is infinite if the gradient overflows.
    """
    d, decrements = start, []
    for _ in range(max_steps):
        slope = gradient(d.unsqueeze(0))
        if not bool(torch.isfinite(slope).all()):
            decrements.append(math.inf)
            break
        step = solve(d, slope)
        decrements.append(float((slope * step).sum()))
        length = 0.0 if decrements[-1] <= tolerance else _length(value, d, step[0], decrements[-1])
        if length == 0:
            break
        d = d - length * step[0]
    return d, decrements


def _length(value: Callable[[Tensor], float], d: Tensor, step: Tensor, decrement: float) -> float:
    """Return the largest power of a half by which the step lowers U by a tenth of the predicted decrease; or zero."""
    here, length = value(d), 1.0
    floor = 1e3 * torch.finfo(d.dtype).eps * abs(here)  # smaller differences are rounding
    while not value(d - length * step) <= here - 0.1 * length * decrement + floor:
        length /= 2
        if length < 1e-3:
            return 0.0
    return length


TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-2}  # of the variances
# Largest bend. The difference between up and down cancels the bend to first order and keeps its square, 6 % here, about
# the error that Adam is allowed. One side then moves 1.7 times as far as the other.
BENT = 0.25
TWIN = ", measured by how far an unpushed twin moves what is pushed"


@dataclass(frozen=True, eq=False)
class Response:
    """Responses to K pushes: covariances of the pushed functions with the values that were read, and their accuracy."""

    cov: Tensor  # of function k with its reading, (K, ...)
    strength: Tensor  # λ, (K,)
    residuals: Tensor  # relative residual of the worse of the two signs, (K,); NaN with Adam, which has none
    missing: Tensor  # share of the response that one more step would add, (K,)
    change: Tensor  # relative change between the last two strengths, (K,)
    bend: Tensor  # |g(up) + g(down) - 2 g(twin)| / |g(up) - g(down)|: 0 if straight, 1 if one side does not move, (K,)
    drift: Tensor  # how far the unpushed twin moved g, in posterior standard deviations of g, (K,)
    steps: int

    @classmethod
    def concat(cls, parts: Sequence[Response]) -> Response:
        """Return the responses of several runs of pushes as one; the number of steps is the largest of all runs."""
        if len(parts) == 1:
            return parts[0]
        names = [field.name for field in fields(cls) if field.name != "steps"]
        tensors = {name: torch.cat([getattr(part, name) for part in parts]) for name in names}
        return cls(**tensors, steps=max(part.steps for part in parts))

    def require_convergence(self, tolerance: float, drift: float = math.inf) -> Response:
        """Return the response itself; raise if it has not converged, is bent, or drifted further than ``drift``.

        An infinite tolerance accepts every finite response, without the checks of bend and drift.
        """
        rest = torch.maximum(self.missing, self.change)
        if not bool((rest <= tolerance).all()):
            worst, bad = largest(rest), ~(rest <= tolerance)
            residual = float(self.residuals[worst])
            known = "" if math.isnan(residual) else f" (relative residual {residual:.2g})"
            raise NumericalError(
                f"HFL: {int(bad.sum())} of {len(bad)} responses have not converged; the worst (push {worst}, strength "
                f"{float(self.strength[worst]):.3g}) is off by about {float(rest[worst]):.2g} of its value after "
                f"{self.steps} steps{known}; expected {tolerance:g}. {self._cause(worst)}, or use "
                "HFL(mode='linearised')."
            )
        if math.isinf(tolerance):
            return self
        if not bool((self.bend <= BENT).all()):
            worst, bad = largest(self.bend), ~(self.bend <= BENT)
            raise NumericalError(
                f"HFL: {int(bad.sum())} of {len(bad)} responses are not straight; the worst is that to push {worst}, "
                f"of strength {float(self.strength[worst]):.3g}. {_left_basin(float(self.bend[worst]))} give a smaller "
                "lam, leave lam out to have it chosen, or use HFL(mode='linearised')."
            )
        if not bool((self.drift <= drift).all()):
            raise NumericalError(far_from_minimum(float(self.drift.max()), drift, TWIN))
        return self

    def _cause(self, worst: int) -> str:
        """Return why a response has not converged, and what to do."""
        bend = float(self.bend[worst])
        if not bend <= BENT:
            return f"{_left_basin(bend)} give a smaller lam, or more steps if lam is None"
        if not bool(self.change[worst] <= self.missing[worst]):
            return "Two strengths of the push disagree down to the rounding error: give a larger tolerance"
        if math.isnan(self.residuals[worst]):
            return f"Up and down move alike (bend {bend:.2g}), so there were too few steps: give more steps"
        return (
            f"Newton's steps do not reach the pushed minimum (bend {bend:.2g} where they end): give a smaller lam, or "
            "a larger tolerance"
        )


def _left_basin(bend: float) -> str:
    return f"The push leaves the basin of the minimum (bend {bend:.2g}; expected at most {BENT}):"


def largest(values: Tensor) -> int:
    """Return the index of the largest value; NaN counts as infinite."""
    return int(values.nan_to_num(torch.inf).argmax())


def far_from_minimum(distance: float, limit: float, evidence: str = "") -> str:
    """Return the error message for weights that are not at a minimum; ``evidence`` says how that was measured."""
    return (
        f"HFL: the weights are {distance:.2g} posterior standard deviations from the minimum of their regularised "
        f"loss{evidence}; expected at most {limit:g}. The response would be that of another network: train this one "
        "further with this prior as weight decay, allow it with HFL(drift=...), or use HFL(mode='linearised')."
    )


def distance_finding(distance: float, evidence: str = "") -> tuple[str, ...]:
    """Return the finding that the weights are not quite at a minimum, if they are not."""
    if not distance > 0.01:
        return ()
    return (
        f"the weights are {distance:.2g} posterior standard deviations from the minimum of their regularised loss"
        f"{evidence}; the error bars are those at the minimum",
    )


Push = Callable[[Tensor], Tensor]  # ∇g_k at every row k of d, (K, P) -> (K, P)
Read = Callable[[Tensor], Tensor]  # a reading at every row of d, (K, P) -> (K, ...); a single row may stand for all
Value = Callable[[Tensor], Tensor]  # g_k as a linear function of reading k, (K, ...) -> (K,)


@dataclass(frozen=True, eq=False)
class Pushes:
    """K functions g_k to push: their gradients, the values that are read after a push, and both at the start."""

    push: Push
    read: Read
    value: Value
    start: Tensor  # d = 0, (K, P)
    slopes: Tensor  # ∇g_k at the start, (K, P)
    reading: Tensor  # at the start, (1, ...) or (K, ...)

    @classmethod
    def of(cls, push: Push, read: Read, start: Tensor, value: Value | None = None) -> Pushes:
        """Evaluate gradients and reading at the start.

        Without ``value`` the reading is the weights themselves, and g_k is linearised.
        """
        slopes = push(start)
        linear = lambda reading: (slopes * reading).sum(1)
        return cls(push, read, value or linear, start, slopes, read(start[:1]))

    def bend(self, up: Tensor, down: Tensor, twin: Tensor) -> Tensor:
        """Return |g(up) + g(down) - 2 g(twin)| / |g(up) - g(down)|, (K,); infinite if a push has no effect."""
        even, odd = self.value(up + down - 2 * twin).abs(), self.value(up - down).abs()
        unmoved = torch.where(self.slopes.any(1), torch.inf, 0.0).to(odd)
        return torch.where(odd == 0, unmoved, even / odd)


def central_difference(up: Tensor, down: Tensor, lam: Tensor) -> Tensor:
    """Return (up - down) / 2λ for readings (K, ...) and strengths (K,)."""
    return (up - down) / (2 * lam).reshape(-1, *[1] * (up.ndim - 1))


@dataclass(frozen=True, eq=False)
class Responder:
    """Pushes of the minimum of an objective, up and down, and the difference (g(θ_λ) - g(θ_-λ)) / 2λ."""

    objective: Objective
    hessian: Hessian
    tolerance: float
    max_steps: int = 50

    @property
    def goal(self) -> float:
        """The accuracy to work for: the tolerance, or that of the dtype if the tolerance is 1 or more."""
        return self.tolerance if self.tolerance < 1 else TOLERANCE[self.objective.dtype]

    @property
    def root(self) -> Tensor | None:
        """L (P, P) with L Lᵀ the Hessian; None if it is not known."""
        return self.hessian.root

    def respond(
        self, push: Push, read: Read, count: int, strength: float | None = None, value: Value | None = None
    ) -> Response:
        """Return the responses to ``count`` pushes.

        With ``strength=None`` the first λ moves a prediction by a hundredth of its standard deviation, or further where
        that is below rounding; it is halved until two estimates agree, and the λ² term is removed by extrapolation.
        """
        pushes = Pushes.of(push, read, torch.zeros(count, self.objective.size).to(self.objective.centre), value)
        first = self._first_order(pushes)
        size = torch.maximum(pushes.reading.abs().max(), first.sqrt())
        floor = torch.finfo(first.dtype).eps * size / (self.goal * first)  # λ whose difference is above rounding
        most = first.rsqrt()
        if strength is not None:
            low, high = float(floor.max()), float(most.min())
            if not low <= strength <= high:
                raise NumericalError(
                    f"HFL: lam is {strength:.3g}; expected between {low:.2g} (below that a difference in {first.dtype} "
                    f"is rounding) and {high:.2g} (above it a prediction moves by more than its standard deviation). "
                    "Leave lam out to have it chosen."
                )
            lam = torch.full_like(first, strength)
            return self.at(pushes, lam)
        lam = torch.maximum(0.01 * most, 4 * floor)  # the factor leaves room to halve it above rounding
        if self.tolerance < 1 and bool((lam > most).any()):
            raise NumericalError(
                f"HFL: no push is above rounding in {first.dtype} that moves a prediction by less than its standard "
                f"deviation ({float(first.min().sqrt()):.2g}), with a tolerance of {self.tolerance:g}. Give a larger "
                "tolerance, or HFL(dtype=torch.float64) if the dtype is another."
            )
        return self._halve_strengths(pushes, torch.minimum(lam, most), floor)

    def _first_order(self, pushes: Pushes) -> Tensor:
        """Return ∇gᵀ H⁻¹ ∇g, (K,); raise if it is negative or due to flat directions.

        A function that depends on no weight has variance zero, and its λ is arbitrary: it takes the largest of the
        others.
        """
        solved = self.hessian.solve(pushes.slopes)
        first = (pushes.slopes * solved).sum(1)
        depends = pushes.slopes.any(1)
        if bool((first <= 0)[depends].any()):
            raise NumericalError(
                f"HFL: a variance came out as {float(first.min()):.3g}; expected above zero. The network is at no "
                "minimum of its regularised loss: train it further with this prior, or use HFL(mode='linearised')."
            )
        share = self.hessian.flat_variance(solved) / torch.where(depends, first, 1.0)
        if bool((share > 0.1).any()):
            raise NumericalError(
                f"HFL: the loss is flat along what is pushed (push {largest(share)}): its curvature there is below "
                f"{FLAT:g} of the prior's, and the variance has no bound. This happens for weights that can rotate "
                "without any change of the outputs, as in attention heads. Push outputs, or use "
                "HFL(mode='linearised')."
            )
        return torch.where(depends, first, first.max() if bool(depends.any()) else 1.0)

    def _halve_strengths(self, pushes: Pushes, lam: Tensor, floor: Tensor) -> Response:
        """Halve λ for every push until two estimates agree."""
        response = self.at(pushes, lam)
        cov, steps, change = response.cov, response.steps, torch.full_like(lam, torch.inf)
        for _ in range(16):
            going = (torch.maximum(change, response.missing) > 0.3 * self.goal) & (lam / 2 > floor)
            if not bool(going.any()):
                break
            lam = torch.where(going, lam / 2, lam)
            coarser, response = response.cov, self.at(pushes, lam)
            finer, steps = response.cov, steps + response.steps
            gap = (finer - coarser) / 3  # the error falls with λ²
            size = finer.abs().flatten(1).amax(1).clamp_min(torch.finfo(lam.dtype).tiny)
            change = torch.where(going, gap.abs().flatten(1).amax(1) / size, change)
            cov = torch.where(going.reshape(-1, *[1] * (finer.ndim - 1)), finer + gap, cov)
        return replace(response, cov=cov, change=change, steps=steps)

    def at(self, pushes: Pushes, lam: Tensor) -> Response:
        """Return the responses at these strengths (K,), with the accuracy of the worse sign, unchecked."""
        both = torch.cat([lam, -lam])
        twice = lambda d: torch.cat([pushes.push(half) for half in d.chunk(2)])
        inner = max(1e-2 * self.goal, 30 * torch.finfo(lam.dtype).eps / float(lam.min()) ** 0.5)
        ends = push_minima(
            self.objective.gradient, twice, self.hessian.solve, both, torch.cat([pushes.start, pushes.start]),
            tolerance=min(inner, self.goal), max_steps=self.max_steps,
        )  # fmt: skip
        up, down = (pushes.read(half) for half in ends.d.chunk(2))
        bend = pushes.bend(up, down, pushes.reading)  # the twin is the minimum itself, and stays there
        residuals, missing = (torch.maximum(*t.chunk(2)) for t in (ends.residuals, ends.missing))
        cov, zero = central_difference(up, down, lam), torch.zeros_like(lam)
        return Response(cov, lam, residuals, missing, zero, bend, zero, ends.steps)

    def respond_alike(self, push: Push, count: int, tolerance: float) -> Response:
        """Return how the weights respond to ``count`` pushes with one λ, divided by four until they converge."""
        strength = self._common_strength(push, count)
        for _ in range(8):
            response = self.respond(push, lambda d: d, count, strength)
            if bool((response.missing <= tolerance).all() & (response.bend <= BENT).all()):
                break
            strength /= 4
        return response

    def _common_strength(self, push: Push, count: int) -> float:
        """Return a λ that moves the pushed functions by a small part of their standard deviation.

        Scores are one-sided differences with a relative error of about this part: 1e-4, or a hundredth in single
        precision, where rounding forbids smaller ones.
        """
        slopes = push(torch.zeros(count, self.objective.size).to(self.objective.centre))
        variance = (slopes * self.hessian.solve(slopes)).sum(1).max().double()
        if float(variance) == 0:
            raise NumericalError(
                "HFL: no weight moves what is pushed, the average over the evaluation inputs; expected one that does. "
                "Give other evaluation inputs, or another variant."
            )
        share = 1e-4 if self.objective.dtype == self.objective.network.dtype == torch.float64 else 0.01
        return float(share / variance.sqrt())


@dataclass(frozen=True, eq=False)
class FineTuner:
    """Fine-tuning of copies that are pushed up, pushed down and not pushed (the twin), on the same mini-batches.

    A second run of half as many steps shows how much of the response is still missing. The twin shows where the weights
    would have gone without a push, which distinguishes a bent response from a drift of all copies.
    """

    objective: Objective
    data: Data
    generator: torch.Generator
    tolerance: float
    steps: int
    learning_rate: float  # at the start; it falls to zero along a cosine
    batch_size: int
    root: ClassVar[Tensor | None] = None  # fine-tuning never forms the Hessian

    def respond(
        self, push: Push, read: Read, count: int, strength: float | None = None, value: Value | None = None
    ) -> Response:
        """Return the responses to ``count`` pushes.

        With ``strength=None`` λ is a tenth of one over the standard deviation under the prior: a prediction moves by at
        most a tenth of its posterior standard deviation, and yet far enough for steps of Adam's size.
        """
        objective = self.objective
        start = torch.zeros(count, objective.size).to(objective.centre)
        pushes = Pushes.of(push, read, start, value)
        if strength is None:
            variance = (pushes.slopes.double().square() / objective.prior.vector.detach()).sum(1)
            lam = 0.1 * torch.where(variance > 0, variance, 1.0).rsqrt().to(start)
        else:
            lam = torch.full_like(start[:, 0], strength)
        up, down, _ = map(read, self._fine_tune(push, lam, max(1, self.steps // 2)))
        half = central_difference(up, down, lam)
        up, down, twin = map(read, self._fine_tune(push, lam, self.steps))
        cov = central_difference(up, down, lam)
        whole, part = cov, half
        if value is None:  # the reading is the weights: compare the functions that were pushed
            whole, part = (pushes.value(each).unsqueeze(1) for each in (cov, half))
        tiny = torch.finfo(lam.dtype).tiny
        missing = (whole - part).abs().flatten(1).amax(1) / whole.abs().flatten(1).amax(1).clamp_min(tiny)
        distance = pushes.value((twin - pushes.reading).expand_as(up)).abs()
        drift = distance / pushes.value(cov).abs().clamp_min(tiny).sqrt()
        unknown, zero = torch.full_like(lam, torch.nan), torch.zeros_like(lam)
        return Response(cov, lam, unknown, missing, zero, pushes.bend(up, down, twin), drift, self.steps)

    def respond_alike(self, push: Push, count: int, tolerance: float) -> Response:
        """Return how the weights respond to ``count`` pushes, each with its λ."""
        return self.respond(push, lambda d: d, count)

    def _fine_tune(self, push: Push, lam: Tensor, steps: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return the weights after these steps, from the centre: pushed up (K, P), down (K, P), and the twin (1, P)."""
        objective, count = self.objective, len(lam)
        d = torch.zeros(2 * count + 1, objective.size).to(objective.centre)
        signs = torch.cat([lam, -lam])[:, None]
        first, second = torch.zeros_like(d), torch.zeros_like(d)
        same_batches = torch.Generator().manual_seed(self.generator.initial_seed())
        batches = shuffle_batches(self.data, self.batch_size, same_batches)
        for step in ProgressBar(range(steps), "fine-tuning", self.data.progress):
            batch = next(batches)
            f = objective.outputs(d[-1:], batch.inputs)[0]
            targets = objective.cast(objective.likelihood.targets(f, batch.targets))
            slope = objective.gradient(d, (replace(batch, inputs=objective.cast(batch.inputs), targets=targets),))
            slope[:-1] -= signs * torch.cat([push(half) for half in d[:-1].chunk(2)])
            first, second = 0.9 * first + 0.1 * slope, 0.999 * second + 0.001 * slope.square()
            rate = self.learning_rate * 0.5 * (1 + math.cos(math.pi * step / steps))
            unbiased = (second / (1 - 0.999 ** (step + 1))).sqrt() + 1e-12
            d = d - rate * first / (1 - 0.9 ** (step + 1)) / unbiased
        return d[:count], d[count:-1], d[-1:]


AnyResponder = Responder | FineTuner
