"""The errors Lapwing raises. Each message says what was seen, what was expected and what to do."""

from __future__ import annotations

from typing import Protocol


class HasSteps(Protocol):
    """The trace of a tuner (``lapwing.core.trace.Trace``)."""

    @property
    def steps(self) -> tuple[object, ...]: ...


class LapwingError(ValueError):
    """Base of Lapwing's errors; a ValueError, as its smaller checks raise too."""


class DataError(LapwingError):
    """The data cannot be used: empty, not finite, of the wrong shape or out of range."""


class ModelError(LapwingError):
    """The network cannot be used as it stands: training mode, mixed samples, changed weights."""


class NumericalError(LapwingError):
    """A matrix that must be positive definite is not, or a number is not finite."""


class FileError(LapwingError):
    """A saved posterior is damaged, foreign, or belongs to another network."""


class UnsupportedError(LapwingError):
    """The combination asked for does not exist; the message names the way to get there."""


class DivergedError(NumericalError):
    """A hyperparameter ran away or is not finite.

    ``trace`` has every step of the tuner, ``posterior`` the last good posterior.
    """

    def __init__(self, message: str, trace: HasSteps, posterior: object) -> None:
        last = "; ".join(str(step) for step in trace.steps[-3:])
        super().__init__(f"{message} The last steps were: {last}." if last else message)
        self.trace = trace
        self.posterior = posterior
