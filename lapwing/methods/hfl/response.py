"""Error bars as the response of a prediction to a small push of the objective (McInerney & Kallus 2024)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NoReturn

import torch
from torch import Tensor

from lapwing.core.data import Inputs
from lapwing.core.gaussian import FunctionGaussian
from lapwing.errors import NumericalError
from lapwing.linalg.block_cg import block_conjugate_gradients
from lapwing.linalg.cholesky import not_definite
from lapwing.linalg.newton import pushed
from lapwing.losses import Statistics
from lapwing.methods.hfl.objective import Objective, flat_gradient
from lapwing.networks.functionals import Functional, output_slope
from lapwing.networks.network import scalar
from lapwing.problem import Problem

DENSE = 2048  # weights up to which the Hessian is formed
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-2}  # of the variances
# The bend cancels between up and down; what does not is of the order of its square, 6 % here, as much as Adam may
# leave out. One side then moves 1.7 times as far as the other.
BENT = 0.25
FLAT = 1e-6  # of the prior precision: less curvature than that is none
UNSETTLED = (
    "The network is at no minimum of its regularised loss: train it further with this prior as weight decay, or use "
    "HFL(mode='linearised')."
)
TWIN = ", so far an unpushed twin moves what is pushed"


@dataclass(frozen=True, eq=False)
class Hessian:
    """The Hessian of the objective at its centre, to solve with: factorised where it is small, else by block CG.

    At a minimum it may be flat: the weights of an attention head can turn together without any change of the outputs.
    ``flat`` of the prior holds what is so. A push of outputs has nothing in these directions, and ``held`` tells.
    """

    objective: Objective
    flat: float = FLAT

    @cached_property
    def _hold(self) -> Tensor:
        return self.flat * self.objective.prior.vector.detach().to(self.objective.centre)

    @cached_property
    def _matrix(self) -> Tensor | None:
        if self.objective.size > DENSE:
            return None
        eye = torch.eye(self.objective.size, dtype=self.objective.dtype, device=self.objective.centre.device)
        matrix = self.objective.curved(eye).double()
        return 0.5 * (matrix + matrix.mT)

    @cached_property
    def root(self) -> Tensor | None:
        """L (P, P) with L Lᵀ = H; None where H is too large to be formed, or flat or worse in some direction."""
        if self._matrix is None:
            return None
        factor, info = torch.linalg.cholesky_ex(self._matrix)
        pivots = factor.diagonal().square()
        return factor if int(info) == 0 and float(pivots.min()) > 1e-13 * float(pivots.max()) else None

    @cached_property
    def _factor(self) -> Tensor | None:
        matrix = self._matrix
        if matrix is None or self.root is not None:
            return self.root
        factor, info = torch.linalg.cholesky_ex(matrix + torch.diag(self._hold).double())
        if int(info) == 0:
            return factor
        smallest = float(torch.linalg.eigvalsh(matrix)[0])
        raise NumericalError(not_definite("the trained weights", smallest) + f" {UNSETTLED}")

    def solve(self, rows: Tensor) -> Tensor:
        """H⁻¹ times every row, (K, P)."""
        factor = self._factor
        if factor is not None:
            return torch.cholesky_solve(rows.double().mT, factor).mT.to(rows)
        product = lambda v: self.objective.curved(v) + self._hold * v
        try:
            found = block_conjugate_gradients(product, rows, tolerance=1e-4, max_iterations=2000)
        except NumericalError as error:
            told = f" {UNSETTLED}" if "positive definite" in str(error) else ""
            raise NumericalError(f"{error}{told}") from error
        return found.x.to(rows)

    def held(self, solved: Tensor) -> Tensor:
        """rᵀ H⁻¹ r as far as it may be due to flat directions alone, for H⁻¹ r (K, P): (K,)."""
        return (self._hold * solved.square()).sum(1)


@dataclass(frozen=True, eq=False)
class Response:
    """What pushes did: covariances of the pushed functionals with all outputs, and how far to trust them."""

    cov: Tensor  # of functional k with what was read off, (K, ...)
    strength: Tensor  # λ, (K,)
    residuals: Tensor  # of the worse of the two signs, (K,); NaN by Adam, who knows none
    missing: Tensor  # share of the response that one more step would add, (K,)
    change: Tensor  # between the last two strengths, relative, (K,)
    bend: Tensor  # |g(up) + g(down) - 2 g(twin)| / |g(up) - g(down)|: nought if straight, 1 if one side stays, (K,)
    drift: Tensor  # how far the unpushed twin moved g, in posterior standard deviations of it, (K,)
    steps: int

    def settled(self, tolerance: float, drift: float = math.inf) -> Response:
        """Itself; an error with the cause where the answer is not finished, or is that of another network.

        An infinite tolerance takes what comes: what is not finished has no deviation yet to measure a drift in.
        """
        rest = torch.maximum(self.missing, self.change)
        if not bool((rest <= tolerance).all()):
            self._refuse_unfinished(rest, tolerance)
        if math.isinf(tolerance):
            return self
        if not bool((self.bend <= BENT).all()):
            self._refuse_bent()
        if not bool((self.drift <= drift).all()):
            raise NumericalError(away(float(self.drift.max()), drift, TWIN))
        return self

    def _refuse_unfinished(self, rest: Tensor, tolerance: float) -> NoReturn:
        worst, bad = _worst(rest), ~(rest <= tolerance)
        residual = float(self.residuals[worst])
        known = "" if math.isnan(residual) else f" (relative residual {residual:.2g})"
        raise NumericalError(
            f"HFL: {int(bad.sum())} of {len(bad)} responses are not finished; the worst (push {worst}, strength "
            f"{float(self.strength[worst]):.3g}) is off by about {float(rest[worst]):.2g} of its value after "
            f"{self.steps} steps{known}; expected {tolerance:g}. {self._cause(worst)}, or use HFL(mode='linearised')."
        )

    def _cause(self, worst: int) -> str:
        """Why an answer is not finished, and what to do."""
        bend = float(self.bend[worst])
        if not bend <= BENT:
            return f"{_left(bend)} give a smaller lam, or more steps where it was chosen here"
        if not bool(self.change[worst] <= self.missing[worst]):
            return "Two strengths of the push give two answers down to where all is rounding: give a larger tolerance"
        if math.isnan(self.residuals[worst]):
            return f"Up and down move alike (bend {bend:.2g}), so steps ran out: give more steps"
        return (
            f"Newton's steps do not reach the pushed minimum (bend {bend:.2g} where they end): give a smaller lam, or "
            "a larger tolerance"
        )

    def _refuse_bent(self) -> NoReturn:
        worst, bad = _worst(self.bend), ~(self.bend <= BENT)
        raise NumericalError(
            f"HFL: {int(bad.sum())} of {len(bad)} responses are not straight; the worst is that to push {worst}, of "
            f"strength {float(self.strength[worst]):.3g}. {_left(float(self.bend[worst]))} give a smaller lam, "
            "leave it out to have it chosen, or use HFL(mode='linearised')."
        )


def _left(bend: float) -> str:
    return f"The push leaves the basin of the minimum (bend {bend:.2g}; expected at most {BENT}):"


def _worst(figures: Tensor) -> int:
    return int(figures.nan_to_num(torch.inf).argmax())


def away(distance: float, limit: float, told: str = "") -> str:
    """The refusal of weights that are at no minimum; ``told`` is by what that was seen."""
    return (
        f"HFL: the weights are {distance:.2g} posterior standard deviations from the minimum of their regularised "
        f"loss{told}; expected at most {limit:g}. The response would be that of another network: train this one "
        "further with this prior as weight decay, allow it with HFL(drift=...), or use HFL(mode='linearised')."
    )


Push = Callable[[Tensor], Tensor]  # ∇g_k at every row k of d, (K, P) -> (K, P)
Read = Callable[[Tensor], Tensor]  # what is read off at every row of d, (K, P) -> (K, ...); one row may stand for all
Own = Callable[[Tensor], Tensor]  # g_k, linearly, out of what was read off at row k, (K, ...) -> (K,)


@dataclass(frozen=True, eq=False)
class Pushes:
    """K functionals: how they push, what is read off, which part of that is their own; and both before any push."""

    push: Push
    read: Read
    own: Own
    start: Tensor  # d = 0, (K, P)
    slopes: Tensor  # (K, P)
    seen: Tensor  # (1, ...) or (K, ...)

    @classmethod
    def of(cls, push: Push, read: Read, start: Tensor, own: Own | None = None) -> Pushes:
        """None for ``own`` is for weights that are read off: judged by what was pushed, to first order."""
        slopes = push(start)
        return cls(push, read, own or (lambda seen: (slopes * seen).sum(1)), start, slopes, read(start[:1]))

    def bend(self, up: Tensor, down: Tensor, twin: Tensor) -> Tensor:
        """How far from straight what was pushed moves, (K,); what stays where it is in spite of a push has left."""
        even, odd = self.own(up + down - 2 * twin).abs(), self.own(up - down).abs()
        still = torch.where(self.slopes.any(1), torch.inf, 0.0).to(odd)
        return torch.where(odd == 0, still, even / odd)


@dataclass(frozen=True, eq=False)
class Ends:
    """How far the pushes of both signs came: the worse of the two, (K,)."""

    residuals: Tensor
    missing: Tensor
    bend: Tensor
    steps: int


@dataclass(frozen=True, eq=False)
class Responder:
    """Pushes the minimum of an objective, with central differences: (g(θ_λ) - g(θ_-λ)) / 2λ."""

    objective: Objective
    hessian: Hessian
    tolerance: float
    max_steps: int = 50

    @property
    def goal(self) -> float:
        """What is worked for: the tolerance, or that of the dtype where any answer will do."""
        return self.tolerance if self.tolerance < 1 else TOLERANCE[self.objective.dtype]

    def respond(
        self, push: Push, read: Read, count: int, strength: float | None = None, own: Own | None = None
    ) -> Response:
        """The responses to ``count`` pushes; λ is chosen where none is given, and None for ``own`` reads weights off.

        Chosen: the first one moves a prediction by a hundredth of its standard deviation, or further where that would
        be rounding; it is halved until two estimates agree, and what their difference says about λ² is taken off.
        """
        pushes = Pushes.of(push, read, torch.zeros(count, self.objective.size).to(self.objective.centre), own)
        slopes = pushes.slopes
        solved = self.hessian.solve(slopes)
        first = (slopes * solved).sum(1)  # the variance to first order
        moved = slopes.any(1)  # what no weight moves has no variance, and any push will do
        if bool((first <= 0)[moved].any()):
            raise NumericalError(
                f"HFL: a variance came out as {float(first.min()):.3g}; expected above nought. The network is at no "
                "minimum of its regularised loss: train it further with this prior, or use HFL(mode='linearised')."
            )
        _refuse_flat(self.hessian.held(solved) / torch.where(moved, first, 1.0))
        first = torch.where(moved, first, first.max() if bool(moved.any()) else 1.0)
        floor, most = self._floor(first, pushes.seen), first.rsqrt()
        if strength is not None:
            _refuse_strength(strength, float(floor.max()), float(most.min()), first.dtype)
            lam = torch.full_like(first, strength)
            found, ends = self.at(pushes, lam)
            return _response(found, lam, ends, torch.zeros_like(lam), ends.steps)
        lam = torch.maximum(0.01 * most, 4 * floor)  # rounding leaves room to halve it
        if self.tolerance < 1 and bool((lam > most).any()):
            raise NumericalError(
                f"HFL: no push is above rounding in {first.dtype} that moves a prediction by less than its standard "
                f"deviation ({float(first.min().sqrt()):.2g}), with a tolerance of {self.tolerance:g}. Give a larger "
                "tolerance, or HFL(dtype=torch.float64) where it is another."
            )
        return self._refined(pushes, torch.minimum(lam, most), floor)

    def _refined(self, pushes: Pushes, lam: Tensor, floor: Tensor) -> Response:
        """λ halved for every push until two estimates agree."""
        raw, ends = self.at(pushes, lam)
        found, total, change = raw, ends.steps, torch.full_like(lam, torch.inf)
        for _ in range(16):
            going = (torch.maximum(change, ends.missing) > 0.3 * self.goal) & (lam / 2 > floor)
            if not bool(going.any()):
                break
            lam = torch.where(going, lam / 2, lam)
            finer, ends = self.at(pushes, lam)
            total += ends.steps
            gap = (finer - raw) / 3  # the error falls with λ²
            size = finer.abs().flatten(1).amax(1).clamp_min(torch.finfo(lam.dtype).tiny)
            change = torch.where(going, gap.abs().flatten(1).amax(1) / size, change)
            found = torch.where(going.reshape(-1, *[1] * (finer.ndim - 1)), finer + gap, found)
            raw = finer
        return _response(found, lam, ends, change, total)

    def at(self, pushes: Pushes, lam: Tensor) -> tuple[Tensor, Ends]:
        """The responses at these strengths (K,), and how far the pushes came; nothing is refused."""
        both = torch.cat([lam, -lam])
        twice = lambda d: torch.cat([pushes.push(half) for half in d.chunk(2)])
        inner = max(1e-2 * self.goal, 30 * torch.finfo(lam.dtype).eps / float(lam.min()) ** 0.5)
        ends = pushed(
            self.objective.gradient, twice, self.hessian.solve, both, torch.cat([pushes.start, pushes.start]),
            tolerance=min(inner, self.goal), max_steps=self.max_steps,
        )  # fmt: skip
        up, down = (pushes.read(half) for half in ends.d.chunk(2))
        bend = pushes.bend(up, down, pushes.seen)  # the twin is the minimum itself: settled before, and it stays
        worst = lambda t: torch.maximum(*t.chunk(2))
        found = Ends(worst(ends.residuals), worst(ends.missing), bend, ends.steps)
        return (up - down) / (2 * lam).reshape(-1, *[1] * (up.ndim - 1)), found

    def _floor(self, first: Tensor, value: Tensor) -> Tensor:
        """The smallest λ whose difference is above the rounding of values of this size, or of a deviation."""
        size = torch.maximum(value.abs().max(), first.sqrt())
        return torch.finfo(first.dtype).eps * size / (self.goal * first)


def _refuse_strength(strength: float, low: float, high: float, dtype: torch.dtype) -> None:
    if not low <= strength <= high:
        raise NumericalError(
            f"HFL: lam is {strength:.3g}; expected between {low:.2g} (below that a difference in {dtype} is rounding) "
            f"and {high:.2g} (above it a prediction moves by more than its standard deviation). Leave lam out to have "
            "it chosen."
        )


def _refuse_flat(share: Tensor) -> None:
    """What is pushed in directions that nothing holds has no variance; ``share`` of it is due to such, (K,)."""
    if bool((share > 0.1).any()):
        raise NumericalError(
            f"HFL: the loss is flat along what is pushed (push {_worst(share)}): its curvature there is below {FLAT:g} "
            "of the prior's, and the variance has no bound. So it is with weights that can turn together without any "
            "change of the outputs, as in attention heads. Push outputs, or use HFL(mode='linearised')."
        )


def _response(cov: Tensor, lam: Tensor, ends: Ends, change: Tensor, steps: int) -> Response:
    return Response(cov, lam, ends.residuals, ends.missing, change, ends.bend, torch.zeros_like(lam), steps)


@dataclass(frozen=True, eq=False)
class ResponsePosterior:
    """f(x) ~ N(network output, response to pushes of f(x)): the variance of Laplace with the full Hessian.

    ``responder`` holds the objective with its data, so this posterior cannot be saved. Every prediction re-optimises:
    ``respond`` gives the details that ``functions`` sums up.
    """

    problem: Problem
    responder: Responder
    statistics: Statistics
    theta: Tensor
    strength: float | None = None
    findings: tuple[str, ...] = ()
    drift: float = math.inf  # how far an unpushed twin may move, where the weights are at no minimum found before

    def __call__(self, x: Inputs, joint: bool = False) -> FunctionGaussian:
        network = self.problem.network
        f = network(x).to(network.dtype)
        found = self.respond(x, joint).settled(self.responder.tolerance, self.drift)
        size = f[0].numel()
        if joint:
            cov = found.cov.reshape(f.numel(), f.numel())
            return FunctionGaussian.across(f, 0.5 * (cov + cov.mT))
        cov = found.cov.reshape(len(f), size, size)
        cov = 0.5 * (cov + cov.mT)
        return FunctionGaussian(f, _tokens(cov, f).to(f))

    def respond(self, x: Inputs, joint: bool = False) -> Response:
        """A push of every output at every input, read off at that input (or, joint, at all): (B C, ...)."""
        objective = self.responder.objective
        x = objective.cast(x)
        network = self.problem.network
        size, outputs = network.count(x), torch.Size(network.output_shape).numel()
        index = torch.arange(size, device=objective.centre.device).repeat_interleave(outputs)
        inputs = network.take(x, index)
        eye = torch.eye(outputs).to(objective.centre)
        seeds = eye.repeat(size, 1).reshape(-1, *network.output_shape)
        push = lambda d: objective.slopes(d, inputs, seeds)
        everywhere = lambda d: objective.outputs(d, x).flatten(1)
        read = everywhere if joint else lambda d: self._own(d, inputs)
        own = torch.diagonal if joint else lambda seen: (seeds.flatten(1) * seen).sum(1)
        return self.responder.respond(push, read, len(index), self.strength, own)

    def _own(self, d: Tensor, inputs: Inputs) -> Tensor:
        """f(x_k) at row k: (K, C)."""
        count = self.problem.network.count(inputs)
        if len(d) != count:  # one row stands for all
            d = d.expand(count, -1)
        return self.responder.objective.each_output(d, inputs).flatten(1)

    def variance_of(self, function: Functional, x: Inputs | None = None) -> Tensor:
        """Of a scalar function of the weights by name, or of the outputs at x, through the same push."""
        found = self.respond_to(function, x).settled(self.responder.tolerance, self.drift)
        return found.cov.reshape(())

    def respond_to(self, function: Functional, x: Inputs | None = None) -> Response:
        """The response of a scalar function of the weights, or of the outputs at x, to a push of it."""
        objective, own = self.responder.objective, lambda seen: seen[:, 0]
        if x is None:
            self.problem.network.slope(function)  # refuses what is no function of the weights
            push = lambda d: torch.stack([flat_gradient(objective, function, row) for row in d])
            read = lambda d: torch.stack([scalar(function(objective.weights(row))).reshape(1) for row in d])
            return self.responder.respond(push, read, 1, self.strength, own)
        inputs, size = objective.cast(x), self.problem.network.count(x)
        output_slope(function, objective.outputs(torch.zeros_like(objective.centre)[None], inputs)[0])  # refuses
        value = lambda row: scalar(function(objective.run(row, inputs)), "outputs")
        push = lambda d: objective.each(torch.func.grad(value), d, size)
        read = lambda d: objective.each(value, d, size).unsqueeze(1)
        return self.responder.respond(push, read, 1, self.strength, own)


def _tokens(cov: Tensor, f: Tensor) -> Tensor:
    """(B, T C, T C) as the covariance of every token, (B, T, C, C)."""
    if f.ndim == 2:
        return cov
    batch, tokens, classes = f.shape
    whole = cov.reshape(batch, tokens, classes, tokens, classes)
    return whole.diagonal(dim1=1, dim2=3).permute(0, 3, 1, 2)
