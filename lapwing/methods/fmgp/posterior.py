"""The fixed-mean process: its kernels, and its posterior over outputs, without a distribution over weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from lapwing.core.chosen import ChosenOutputs
from lapwing.core.gaussian import Deferred, FunctionGaussian
from lapwing.core.inputs import Inputs
from lapwing.core.memory import gathered, runs
from lapwing.core.schema import ROUNDING, Array, Either, Maybe, Text
from lapwing.core.spectra import eigvalsh
from lapwing.core.state import Part, State, saved
from lapwing.core.trace import TRACE, Trace, trace_settings
from lapwing.errors import DataError, FileError
from lapwing.methods.fmgp.features import Sight
from lapwing.networks.network import Network
from lapwing.posteriors.protocols import Posterior
from lapwing.problem import STATISTICS, Problem, Statistics

LOGARITHM = 69.0  # largest log of a length-scale in a file: 1e30
WIDE = 32  # number of outputs above which covariances are built only when needed


class RBF:
    r"""$k = \exp(-\tfrac12 \sum_i (u_i - v_i)^2 / \ell_i^2)$ on the inputs, with a length-scale for each column."""

    uses_features = False

    def between(self, u: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
        """Return k(u, v) for u (B, D), v (M, D): (B, M)."""
        # Only differences matter; without the common part their squares are not lost to rounding.
        common = v.detach().mean(0)
        u, v = (u - common) / lengths, (v - common) / lengths
        distance = u.square().sum(-1)[:, None] + v.square().sum(-1) - 2 * (u @ v.mT)
        return torch.exp(-0.5 * distance.clamp_min(0))

    def variance(self, u: Tensor, lengths: Tensor) -> Tensor:
        """Return k(u, u), (1,): it is the same everywhere."""
        return torch.ones_like(u[:1, 0])


class Linear:
    r"""$k = 1 + u \cdot v / (D \ell^2)$: the tangent kernel of a linear last layer with input u. One length-scale."""

    uses_features = True

    def between(self, u: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
        """Return k(u, v) for u (B, D), v (M, D): (B, M)."""
        return 1 + (u / lengths) @ (v / lengths).mT / u.shape[-1]

    def variance(self, u: Tensor, lengths: Tensor) -> Tensor:
        """Return k(u, u), (B,)."""
        return 1 + (u / lengths).square().mean(-1)


KERNELS: dict[str, RBF | Linear] = {"rbf": RBF(), "features": Linear()}  # kernels of one output of unit variance


@dataclass(frozen=True, eq=False)
class FreeKernel:
    """Cov(f_c(u), f_d(v)) = k(u, v) (L Lᵀ)_cd between features u, v and outputs c, d.

    All parameters are logarithms or unconstrained, so that gradient steps can learn them.
    """

    kind: str  # a name in KERNELS
    log_lengths: Tensor  # (D,), or (1,) for all dimensions
    mixing: Tensor  # (C, C); its lower triangle is L

    @property
    def outputs(self) -> Tensor:
        """L Lᵀ, (C, C)."""
        root = self.mixing.tril()
        return root @ root.mT

    def _base(self, u: Tensor, v: Tensor) -> Tensor:
        return KERNELS[self.kind].between(u, v, self.log_lengths.exp())

    def points(self, u: Tensor, number: Tensor) -> Tensor:
        """Return the covariance of inducing points u (M, D), each for the output with this number (M,): (M, M)."""
        return self._base(u, u) * self.outputs[number][:, number]

    def between(self, u: Tensor, points: Tensor, number: Tensor) -> Tensor:
        """Return the covariance of all outputs at u (B, D) with the inducing points: (B, C, M)."""
        if u.shape[1] != points.shape[1]:
            raise DataError(
                f"inputs of {u.shape[1]} numbers; the kernel was learned on {points.shape[1]}. Give as many."
            )
        return self._base(u, points)[:, None] * self.outputs[:, number]

    def marginal(self, u: Tensor) -> Tensor:
        """Return the covariance of the outputs at each input, (B, C, C)."""
        variances = KERNELS[self.kind].variance(u, self.log_lengths.exp())
        return (variances[:, None, None] * self.outputs).expand(len(u), *self.mixing.shape)

    def variances(self, u: Tensor) -> Tensor:
        """Return the variance of each output at each input, (B, C)."""
        variances = KERNELS[self.kind].variance(u, self.log_lengths.exp())
        return (variances[:, None] * self.outputs.diagonal()).expand(len(u), -1)

    def joint(self, u: Tensor, v: Tensor | None = None) -> Tensor:
        """Return the covariance of all outputs at inputs u with those at inputs v, or at u itself, (B, C, B', C)."""
        return torch.einsum("ij,cd->icjd", self._base(u, u if v is None else v), self.outputs)


@saved
@dataclass(frozen=True, eq=False)
class FunctionPosterior(Posterior):
    """f(x) ~ N(network output, K - K_xZ mix mixᵀ K_Zx) with a kernel K and M inducing points Z.

    A prediction costs one forward pass, the kernel with M points and B C M².
    """

    problem: Problem
    sight: Sight
    kernel: FreeKernel
    points: Tensor  # Z, (M, D)
    numbers: Tensor  # (M,), the output that each point belongs to
    mix: Tensor  # (M, r)
    statistics: Statistics
    theta: Tensor
    trace: Trace | None = None

    def __call__(self, x: Inputs, joint: bool = False) -> FunctionGaussian:
        if not joint:
            return self._marginal(x)
        with torch.no_grad():
            u, f = self.sight(x)
            mean = f.to(self.problem.network.dtype)
            return FunctionGaussian.across(mean, self._joint(u, mean))

    def chosen(self, x: Inputs, outputs: ChosenOutputs, joint: bool = False) -> FunctionGaussian:
        return super().chosen(x, outputs, joint) if joint else self._marginal(x, outputs)

    def _rows(self, u: Tensor) -> Tensor:
        """Return K_xZ mix for features u (B, D): (B, C, r)."""
        return self.kernel.between(u, self.points, self.numbers) @ self.mix

    def _joint(self, u: Tensor, mean: Tensor) -> Tensor:
        """Return the covariance between all outputs at all inputs, (B C, B C), a few inputs at a time."""
        rows, size = self._rows(u), mean.numel()
        flat = rows.flatten(0, 1)

        def part(inputs: slice) -> Tensor:
            prior = self.kernel.joint(u[inputs], u).reshape(-1, size)
            return prior.addmm_(rows[inputs].flatten(0, 1), flat.mT, alpha=-1).to(mean)

        return gathered((part(each) for each in runs(len(u), 2 * 8 * mean.shape[-1] * size, u.device)), size)

    def _marginal(self, x: Inputs, outputs: ChosenOutputs | None = None) -> FunctionGaussian:
        """Return the belief about all or some outputs at each input; with many outputs variances come by themselves."""
        network, classes = self.problem.network, len(self.kernel.mixing)
        count, means = network.count(x), []
        each = 8 * (classes * (3 * len(self.points) + 3 * classes) + 3 * self.points.shape[1])

        def computed(compute: Any) -> Iterator[Tensor]:
            for part in runs(count, each, network.device):
                some = None if outputs is None else outputs.samples(part)
                with torch.no_grad():
                    u, f = self.sight(x if part == slice(0, count) else network.take(x, part))
                    f = f.to(network.dtype)
                    means.append(f if some is None else some.of(f))
                    rows = self._rows(u)
                    rows = rows if some is None else some.of(rows.movedim(-1, 0)).movedim(0, -1)
                    yield compute(u, rows, some).to(network.dtype)

        def covariance(u: Tensor, rows: Tensor, some: ChosenOutputs | None) -> Tensor:
            prior = self.kernel.marginal(u)
            return (prior if some is None else some.blocks(prior)) - rows @ rows.mT

        def variance(u: Tensor, rows: Tensor, some: ChosenOutputs | None) -> Tensor:
            prior = self.kernel.variances(u)
            return (prior if some is None else some.of(prior)) - rows.square().sum(-1)

        wide = (classes if outputs is None else outputs.shape((classes,))[-1]) > WIDE
        whole = lambda compute: gathered(computed(compute), count)
        first = whole(variance if wide else covariance)
        mean = gathered(means[:], count)
        covariances = Deferred(lambda: first, lambda: whole(covariance)) if wide else first
        return FunctionGaussian(mean, covariances)

    def function_samples(self, x: Inputs, n: int, generator: torch.Generator | None = None) -> Tensor:
        """Draw n functions at x, (n, B, C), consistent between the inputs of one call."""
        return self(x, joint=True).sample(n, generator)

    def state(self) -> State:
        tensors = {
            "theta": self.theta, "points": self.points, "numbers": self.numbers, "mix": self.mix,
            "log_lengths": self.kernel.log_lengths, "mixing": self.kernel.mixing,
        }  # fmt: skip
        parts = {} if self.sight.last is None else {"last": self.sight.last.state()}
        settings = {
            "statistics": asdict(self.statistics),
            "kernel": self.kernel.kind,
            "trace": trace_settings(self.trace),
        }
        return State("FunctionPosterior", settings, tensors, parts)

    @classmethod
    def from_state(cls, state: State, problem: Problem) -> FunctionPosterior:
        network, lengths = problem.network, (-LOGARITHM, LOGARITHM)
        fields = state.read(
            kernel=Text(tuple(KERNELS)), last=Maybe(Part(Network, network.model)), points=Array(("M", "D")),
            numbers=Array(("M",), 0, network.output_shape[-1] - 1, whole=True), mix=Array(("M", "r")),
            log_lengths=Either(Array(("D",), *lengths), Array((1,), *lengths)), mixing=Array(("C", "C")),
            theta=Array(("P",), dtype=network.dtype), statistics=STATISTICS, trace=TRACE,
        )  # fmt: skip
        kernel = FreeKernel(fields.pop("kernel"), fields.pop("log_lengths"), fields.pop("mixing"))
        _refuse_impossible(kernel, fields, last := fields.pop("last"))
        return cls(problem, Sight(network, last), kernel, **fields)


def _refuse_impossible(kernel: FreeKernel, fields: dict[str, Any], last: Network | None) -> None:
    """Raise ``FileError`` if points do not fit the features, or if a variance would be negative."""
    points, mix = fields["points"], fields["mix"]
    if (last is not None) != KERNELS[kernel.kind].uses_features:
        raise FileError(f"the kernel {kernel.kind!r} needs a last layer if it works on features, and only then")
    if last is not None and (
        len(last.layout) != 1 or last.layout[0].d_in - len(last.layout[0].names) + 1 != points.shape[1]
    ):
        raise FileError(f"the points have {points.shape[1]} features; expected those of a last layer of one block")
    explained = mix.mT @ kernel.points(points, fields["numbers"]) @ mix
    if not bool(eigvalsh(explained).max() <= 1 + ROUNDING):
        raise FileError("the points explain more variance than the prior has; expected at most all of it")
