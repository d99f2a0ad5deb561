"""What all modules of a posterior have in common: a model that they share and never change."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lapwing.networks.forward import refuse_training_mode
from lapwing.networks.several_outputs import picked

SAME = 1e-9  # change of a parameter, relative to its norm, that counts as rounding


class PosteriorModule(nn.Module):
    """A module of a fitted posterior, around the model of its user.

    It is always in evaluation mode, and leaves the mode of the model to its user.

    Args:
        fitted: The fitted posterior.
        returns: "logits", "probs" or "moments".
    """

    def __init__(self, fitted: Any, returns: str) -> None:
        super().__init__()
        self.model, self.returns = fitted.network.model, returns
        self.output, self.fingerprint = fitted.network.output, fitted.fingerprint
        self.fitted_dtype = self._dtype()
        self.training = False

    def train(self, mode: bool = True) -> PosteriorModule:
        """Stay in evaluation mode, whatever ``mode`` is: a posterior belongs to the trained network."""
        return self

    def raw(self, out: Any) -> Tensor:
        """Return the tensor that the posterior is about, of all that the model returns."""
        return picked(out, self.output)  # type: ignore[no-any-return]

    def refuse_changed(self) -> None:
        """Raise if the model is in training mode, or has other weights than at the fit.

        A module that was cast to another dtype may differ by its rounding.
        """
        refuse_training_mode(self.model)
        dtype = self._dtype()
        self.fingerprint.refuse_other(
            self.model, SAME if dtype == self.fitted_dtype else max(SAME, torch.finfo(dtype).eps)
        )

    def _dtype(self) -> torch.dtype:
        return next(p.dtype for p in self.model.parameters() if p.is_floating_point())


def captured() -> bool:
    """Return whether operations are recorded, by ``torch.export``, ONNX, ``torch.compile`` or a trace, and not run."""
    if torch.compiler.is_compiling() or torch.compiler.is_exporting():
        return True
    return torch.onnx.is_in_onnx_export() or torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]
