"""All errors that Lapwing raises. Each message says what was seen, what was expected and what to do."""

from __future__ import annotations

from typing import Any

__all__ = [
    "LapwingError", "DataError", "InputError", "ModelError", "NumericalError", "FileError", "UnsupportedError",
    "DivergedError", "ProcessError", "CalibrationWarning",
]  # fmt: skip


class LapwingError(ValueError):
    """The base class of all errors of Lapwing; a ``ValueError``, so that callers need not import it.

    >>> import lapwing as lw
    >>> try:
    ...     lw.tuners.Grid(precisions=[-1.0])
    ... except lw.LapwingError as error:
    ...     print(error)
    precisions is [-1.0]; expected a list of positive, finite numbers.
    """


class DataError(LapwingError):
    """Unusable data: empty, not finite, of the wrong shape or out of range."""


class InputError(DataError, RuntimeError):
    """Inputs with which the network itself raises an error, which is the cause; a ``RuntimeError`` like PyTorch's."""


class ModelError(LapwingError):
    """An unusable network: in training mode, mixing the samples of a batch, or with changed weights."""


class NumericalError(LapwingError):
    """A matrix that is not positive definite though it must be, or a number that is not finite."""


class FileError(LapwingError):
    """A file that is damaged, that Lapwing did not write, or that belongs to another network."""


class UnsupportedError(LapwingError):
    """A setting, or a combination of settings, that does not exist; the message names one that does."""


class DivergedError(NumericalError):
    """A tuner that did not converge: a hyperparameter left its range, or a number is not finite.

    Args:
        message: What happened and what to do.
        trace: Every step of the tuner, a ``lapwing.core.trace.Trace``; the last three are added to the message.
        posterior: The posterior at the last good step, to continue with.

    >>> from lapwing.core.trace import Step, Trace
    >>> print(DivergedError("No optimum.", Trace("Ascend", steps=(Step(-3.0, (1e13,)),)), posterior=None))
    No optimum. The last steps were: -3 at precision 1e+13.
    """

    def __init__(self, message: str, trace: Any, posterior: Any) -> None:
        last = "; ".join(str(step) for step in trace.steps[-3:])
        super().__init__(f"{message} The last steps were: {last}." if last else message)
        self.trace = trace
        self.posterior = posterior


class ProcessError(LapwingError, RuntimeError):
    """An error in one of several processes, raised in all of them; a ``RuntimeError`` like those of torch.distributed.

    Args:
        message: Which process failed, with its message, or that one is lost.
        rank: The number of the process that failed; None if it is not known.
    """

    def __init__(self, message: str, rank: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank


class CalibrationWarning(UserWarning):
    """A posterior that predicts worse than the plain network; the message names the remedy."""
