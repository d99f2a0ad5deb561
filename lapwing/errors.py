"""All errors that Lapwing raises. Each message says what was seen, what was expected and what to do."""

from __future__ import annotations

import sys
import warnings
from typing import Any

__all__ = [
    "LapwingError", "DataError", "InputError", "ModelError", "NumericalError", "FileError", "UnsupportedError",
    "CallError", "DivergedError", "ProcessError", "CalibrationWarning",
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
    """Unusable data: empty, not finite, of the wrong shape or out of range.

    >>> import torch, lapwing as lw
    >>> lw.fit(torch.nn.Linear(2, 1), [(torch.full((3, 2), torch.nan), torch.zeros(3, 1))], "regression")
    Traceback (most recent call last):
    lapwing.errors.DataError: ... entries are NaN or infinite; expected finite numbers. ...
    """


class InputError(DataError, RuntimeError):
    """Inputs with which the network itself raises an error, which is the cause; a ``RuntimeError`` like PyTorch's.

    >>> import torch, lapwing as lw
    >>> lw.fit(torch.nn.Linear(2, 1), [(torch.zeros(3, 5), torch.zeros(3, 1))], "regression")
    Traceback (most recent call last):
    lapwing.errors.InputError: ...
    """


class ModelError(LapwingError):
    """An unusable network: in training mode, mixing the samples of a batch, or with changed weights.

    >>> import torch, lapwing as lw
    >>> x = torch.randn(8, 2)
    >>> lw.fit(torch.nn.Sequential(torch.nn.Dropout(), torch.nn.Linear(2, 1)), [(x, x[:, :1])], "regression")
    Traceback (most recent call last):
    lapwing.errors.ModelError: ...
    """


class NumericalError(LapwingError):
    """A matrix that is not positive definite though it must be, or a number that is not finite.

    >>> import torch, lapwing as lw
    >>> lw.linear.fit(torch.full((4, 2), 1e200, dtype=torch.float64), torch.ones(4, dtype=torch.float64))
    Traceback (most recent call last):
    lapwing.errors.NumericalError: ...
    """


class FileError(LapwingError):
    """A file that is damaged, that Lapwing did not write, or that belongs to another network.

    >>> import tempfile, torch, lapwing as lw
    >>> with tempfile.NamedTemporaryFile() as file:
    ...     lw.load(file.name, torch.nn.Linear(2, 1))
    Traceback (most recent call last):
    lapwing.errors.FileError: ...
    """


class UnsupportedError(LapwingError):
    """A setting, or a combination of settings, that does not exist; the message names one that does.

    >>> import torch, lapwing as lw
    >>> lw.fit(torch.nn.Linear(2, 1), [(torch.zeros(3, 2), torch.zeros(3, 1))], "regresion")
    Traceback (most recent call last):
    lapwing.errors.UnsupportedError: ...
    """


class CallError(UnsupportedError, TypeError):
    """A call with an argument that does not exist, or without one that it needs; a ``TypeError`` like Python's.

    >>> import torch, lapwing as lw
    >>> lw.fit(torch.nn.Linear(2, 1), [(torch.zeros(3, 2), torch.zeros(3, 1))], "regression", val=[])
    Traceback (most recent call last):
    lapwing.errors.CallError: fit() has no argument 'val'. Did you mean 'validation'? It takes model, data, ...
    """


class DivergedError(NumericalError):
    """A tuner that did not converge: a hyperparameter left its range, or a number is not finite.

    Args:
        message: What happened and what to do.
        trace: Every step of the tuner, a ``lapwing.posteriors.base.Trace``; the last three are added to the message.
        posterior: The posterior at the last good step, to continue with.

    >>> from lapwing.posteriors.base import Step, Trace
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

    >>> ProcessError("process 2 failed: the data are empty.", rank=2).rank
    2
    """

    def __init__(self, message: str, rank: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank


class CalibrationWarning(UserWarning):
    """A posterior whose predictions cannot be right as they are; the message names the remedy.

    It predicts worse than the plain network, targets are in other units than those that it was fitted to, or data were
    used before.

    >>> import warnings
    >>> warnings.simplefilter("error", CalibrationWarning)  # make it an error, for scripts that must not go on
    >>> warnings.simplefilter("ignore", CalibrationWarning)
    """


_BETWEEN = (__name__.partition(".")[0], "torch", "contextlib")  # whose frames are not the user's: torch has decorators


def warn_caller(message: str) -> None:
    """Give a ``CalibrationWarning`` at the first line outside of the library that led here."""
    frame, depth = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _BETWEEN:
        frame, depth = frame.f_back, depth + 1
    warnings.warn(message, CalibrationWarning, stacklevel=depth)
