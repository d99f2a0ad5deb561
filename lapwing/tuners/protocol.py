"""The contract of a tuner, and how it gets the training data."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import is_dataclass, replace
from typing import Any, Protocol, runtime_checkable

from lapwing.core.data import Data
from lapwing.core.processes import ALONE, Processes
from lapwing.core.settings import FUNCTION, Rule, is_data
from lapwing.errors import UnsupportedError
from lapwing.networks.network import Network


class Tuner(Protocol):
    """A function from a posterior to the same posterior under better hyperparameters; a frozen dataclass of settings.

    ``fit`` and ``Fitted.tuned`` accept any callable of this form:

    >>> def fixed(posterior):
    ...     prior = posterior.problem.prior
    ...     return posterior.with_problem(posterior.problem.with_prior(prior.with_precision(0 * prior.values + 3.0)))
    >>> import torch, lapwing as lw
    >>> x = torch.linspace(-1, 1, 20).unsqueeze(1)
    >>> lw.fit(torch.nn.Linear(1, 1), [(x, x.sin())], "regression", tuner=fixed).prior.values.item()
    3.0
    """

    def __call__(self, posterior: Any, /) -> Any:
        """Return the posterior under better hyperparameters, with a ``trace`` of the search if it can hold one."""
        ...


@runtime_checkable
class NeedsData(Protocol):
    """A tuner that passes over the training data; ``fit`` gives its own data to a tuner that has none."""

    def with_data(self, data: Data) -> Tuner:
        """Return the tuner with these data, or unchanged if it has data."""
        ...


@runtime_checkable
class FollowsEvidence(Protocol):
    """A tuner that varies hyperparameters around those of the evidence, which ``fit`` therefore learns first."""

    @property
    def follows_evidence(self) -> bool: ...


@runtime_checkable
class HoldsOut(Protocol):
    """A tuner with held-out data: ``data``, if ``holds_out``."""

    data: Any

    @property
    def holds_out(self) -> bool: ...


def checked_tuner(tuner: Tuner, data: Data | None = None) -> Tuner:
    """Return the tuner, with the data of the fit if it needs some and has none; raise for names and classes."""
    if isinstance(tuner, type):
        raise UnsupportedError(f"tuner is the class {tuner.__name__}; expected an object: call it, with its settings.")
    Rule("an object such as lw.tuners.FixedPoint(), not its name", FUNCTION.holds).check("tuner", tuner)
    return tuner.with_data(data) if data is not None and isinstance(tuner, NeedsData) else tuner


def applied(tuner: Tuner, posterior: Any, data: Data | None = None, processes: Processes = ALONE) -> Any:
    """Return the posterior that the tuner makes of this one; raise if it makes none."""
    together = processes if data is None else data.processes
    tuned = spread(checked_tuner(tuner, data), together, posterior.problem.network)(posterior)
    Rule("a posterior", lambda v: hasattr(v, "problem")).check(f"the result of the tuner {tuner!r:.60}", tuned)
    return tuned


def spread(tuner: Tuner, processes: Processes, network: Network) -> Tuner:
    """Return the tuner with its own ``data`` as one part of several, if there are several processes."""
    own = getattr(tuner, "data", None)
    if processes.group is None or not is_dataclass(tuner) or not is_data(own) or isinstance(own, Data):
        return tuner
    part = network.reading(own, f"data of {type(tuner).__name__}", processes=processes)
    part.look()  # raises if other processes read the same
    return replace(tuner, data=part)  # type: ignore[type-var, return-value]


def required_data(tuner: str, source: Iterable[Any] | Data | None, network: Network) -> Data:
    """Return the data of a tuner, or raise if it has none."""
    if source is None:
        raise UnsupportedError(f"{tuner} needs the training data: {tuner}(data), or give it to fit().")
    return network.reading(source)
