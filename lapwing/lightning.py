"""A Lightning callback that fits a posterior when training ends."""

from __future__ import annotations

from typing import Any

import torch

try:
    from lightning.pytorch import Callback
except ImportError:
    try:
        from pytorch_lightning import Callback  # the same under its older name
    except ImportError as error:
        raise ImportError(
            "lapwing.lightning needs Lightning, which is not installed: pip install 'lapwing[lightning]'."
        ) from error

from lapwing.api import fit
from lapwing.fitted import Fitted
from lapwing.likelihoods.base import Likelihood
from lapwing.registry import find_likelihood
from lapwing.runtime.settings import FLAG

__all__ = ["LaplaceCallback"]


class LaplaceCallback(Callback):  # type: ignore[misc]
    """A callback that fits a posterior to the module at the end of training, with the data of the Trainer.

    It is fitted to the weights at the end. For the best checkpoint, load it and call ``lw.fit`` after training. Several
    processes (the strategy "ddp") fit together, each with its part of the data, and all get the same posterior.

    Args:
        likelihood: As for ``lw.fit``.
        calibrate: Whether the Trainer's validation data, if it has some, calibrate the error bars, as ``validation``
            of ``lw.fit`` does.
        settings: Settings of ``lw.fit`` by name, such as ``method``, ``weights``, ``prior`` and ``target_key``.

    Attributes:
        posterior: The fitted posterior, of a copy of the module in evaluation mode; None before the end of training.

    Raises:
        UnsupportedError: If the likelihood has no such name.

    >>> callback = LaplaceCallback("classification", method="diagonal")
    >>> callback.posterior is None
    True
    """

    def __init__(self, likelihood: Likelihood | str, *, calibrate: bool = True, **settings: Any) -> None:
        FLAG.check("calibrate", calibrate)
        find_likelihood(likelihood)  # a wrong name is found now and not after the training
        self.likelihood = likelihood
        self.calibrate = calibrate
        self.settings = settings
        self.posterior: Fitted | None = None

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Forget the posterior of an earlier training."""
        self.posterior = None

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """Fit the posterior to the module as it is now."""
        settings = dict(self.settings)
        held_out = trainer.val_dataloaders if self.calibrate else None
        if held_out and "validation" not in settings and "tuner" not in settings:
            settings["validation"] = held_out[0] if isinstance(held_out, list | tuple) else held_out
        if trainer.world_size > 1:
            settings.setdefault("process_group", torch.distributed.group.WORLD)
        self.posterior = fit(trainer, None, self.likelihood, **settings)
