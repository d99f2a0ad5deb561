"""Posteriors that take more data without the old ones: what a fit sums over the data, summed further."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar, runtime_checkable

import torch

from lapwing.core.data import Data
from lapwing.core.schema import Field, Text
from lapwing.core.state import State, saved
from lapwing.core.trace import Trace
from lapwing.curvature.draws import Estimate
from lapwing.curvature.protocols import Curvature
from lapwing.curvature.sweep import PerOutputCurvature
from lapwing.errors import UnsupportedError
from lapwing.problem import Problem, Statistics, mean_squared_residual

if TYPE_CHECKING:
    from lapwing.posteriors.weight_space import WeightPosterior

M = TypeVar("M", bound=type)
SUM = "sum over the data that others can be added to, as Full, Diagonal, Kron and KernelSpace have"
Sums = tuple[Curvature | PerOutputCurvature, Statistics, Estimate | None]


class SumsData(Protocol):
    """A method whose posterior is a sum over the data, with its settings: the sums of two data sets add up."""

    def summed(self, problem: Problem, data: Data, generator: torch.Generator | None) -> Sums:
        """Return the curvature, the statistics, and how the curvature was estimated if it was."""
        ...

    saved_settings: ClassVar[Mapping[str, Field]]  # all of its settings, as files hold them


_METHODS: dict[str, Any] = {}


def sums_data(cls: M) -> M:
    """Register a method whose posterior is a sum over the data, so that files can say how it was made. A decorator."""
    _METHODS[cls.__name__] = cls
    return cls


@saved
class SummedBy:
    """The method of a posterior in a file: its name and its settings."""

    @staticmethod
    def state(method: SumsData) -> State:
        """Return the method as plain data."""
        settings = {name: getattr(method, name) for name in method.saved_settings}
        return State("SummedBy", {"name": type(method).__name__, **settings})

    @classmethod
    def from_state(cls, state: State) -> Any:
        """Build the method again."""
        name = state.settings.get("name")
        known = _METHODS[name].saved_settings if name in _METHODS else {}
        fields = state.read(name=Text(tuple(_METHODS)), **known)
        return _METHODS[fields.pop("name")](**fields)


@runtime_checkable
class Updatable(Protocol):
    """A posterior that takes more data."""

    def updated(self, data: Data, generator: torch.Generator | None = None) -> Any:
        """Return the posterior of the old data and these, at the same weights w̃, prior and noise."""
        ...


def with_more(posterior: WeightPosterior, data: Data, generator: torch.Generator | None) -> WeightPosterior:
    """Return the posterior with the sums over these data added to its own."""
    method = posterior.method
    if method is None:
        raise UnsupportedError(
            "this posterior is no sum over the data, or its file does not say how the sum was made; expected one of "
            "Full, Diagonal, Kron or KernelSpace. Fit all the data again."
        )
    if posterior.mode is not None or posterior.problem.network.shift is not None:
        raise UnsupportedError(
            "this posterior has an optimum of the tangent model (LinearMode), which belongs to the old data; expected "
            "one without. Update the posterior that it came from, and tune that with all the data."
        )
    problem, losses = posterior.problem, ()
    if isinstance(posterior.curvature, PerOutputCurvature):  # its parts are in units of the first noise
        problem = problem.with_likelihood(problem.likelihood.with_noise(posterior.curvature.start))
    curvature, statistics, estimate = method.summed(problem, data, generator)
    if posterior.statistics.losses:
        residuals = mean_squared_residual(problem.network, problem.likelihood, data)
        losses = tuple((0.5 * statistics.data * residuals).tolist())
    return replace(
        posterior,
        curvature=posterior.curvature + curvature,  # type: ignore[operator]
        statistics=posterior.statistics + replace(statistics, losses=losses),
        estimate=_pooled(posterior, estimate, statistics.data),
        trace=remarked(posterior.trace, statistics.data),
    )


def remarked(trace: Trace | None, count: float) -> Trace:
    """Return the trace with a remark that so many data came after its tuner."""
    trace = Trace("") if trace is None else trace
    remark = f"{count:g} data were added later: prior, noise and weights of a mixture are those of the data before."
    return replace(trace, findings=(*trace.findings, remark))


def _pooled(posterior: WeightPosterior, estimate: Estimate | None, count: float) -> Estimate | None:
    """Return how the sum of both curvatures was estimated; errors of independent sums add up by their squares."""
    both = [(each, n) for each, n in ((posterior.estimate, posterior.statistics.data), (estimate, count)) if each]
    if not both:
        return None
    total = posterior.statistics.data + count
    error = sum((each.error * n / total) ** 2 for each, n in both) ** 0.5
    return Estimate(max(each.draws for each, _ in both), error)
