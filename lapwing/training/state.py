"""The state of a training run between two epochs, and its file."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lapwing.errors import FileError


@dataclass(frozen=True)
class Epoch:
    """One epoch: the mean regularised loss, and the evidence and hyperparameters if they were updated after it."""

    number: int
    loss: float
    log_evidence: float | None = None
    precisions: tuple[float, ...] = ()
    noise: tuple[float, ...] = ()
    finding: str = ""


@dataclass(frozen=True, eq=False)
class State:
    """Everything needed to resume a training run: plain tensors and numbers, so that loading a file runs no code.

    >>> import tempfile
    >>> state = State(1, {}, {}, torch.ones(()), None, history=(Epoch(0, 0.5),))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     state.save(f"{folder}/state.pt")
    ...     State.load(f"{folder}/state.pt").history
    (Epoch(number=0, loss=0.5, log_evidence=None, precisions=(), noise=(), finding=''),)
    """

    epoch: int  # number of finished epochs
    weights: dict[str, Tensor]
    optimiser: dict[str, Any]
    precision: Tensor
    noise: Tensor | None
    best: dict[str, Any] = field(default_factory=dict)  # evidence, weights, precision, noise
    history: tuple[Epoch, ...] = ()

    def save(self, path: str | Path) -> None:
        """Write the state to a file that ``State.load`` reads.

        An existing file is replaced only after the new one is complete.

        Args:
            path: The file to write.
        """
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "history"}
        part = Path(f"{path}.part")
        torch.save({**fields, "history": [asdict(epoch) for epoch in self.history]}, part)
        part.replace(path)

    @classmethod
    def load(cls, path: str | Path) -> State:
        """Read a state that ``save`` or ``train(..., checkpoint=...)`` wrote.

        Args:
            path: The file to read.

        Returns:
            The state, with its tensors on the CPU.

        Raises:
            FileNotFoundError: If there is no such file.
            FileError: If the file does not hold a training state.
        """
        try:
            fields: dict[str, Any] = torch.load(path, weights_only=True, map_location="cpu")
            history = tuple(Epoch(**entry) for entry in fields.pop("history"))
            return cls(**fields, history=history)
        except FileNotFoundError:
            raise
        except Exception as error:
            raise FileError(f"{path} holds no training state: {type(error).__name__}: {error}") from error
