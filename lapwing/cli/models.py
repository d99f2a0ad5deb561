"""Models by import path and weights file, in evaluation mode on their device; and posteriors of them."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from lapwing.api import load
from lapwing.cli.imports import called, imported
from lapwing.cli.weights import put_weights, read_weights
from lapwing.core.settings import seen
from lapwing.errors import FileError, ModelError, UnsupportedError
from lapwing.fitted import Fitted


def model_of(path: str, weights: Path | None, device: torch.device, trained: bool = True) -> nn.Module:
    """Return the model at an import path with the weights of a file.

    Args:
        path: ``package.module:factory``: a function without arguments that returns the model, its class, or the model.
        weights: A file of weights; None takes those that the factory gives.
        device: Where the model shall be.
        trained: Whether to refuse weights that differ from call to call, and so are not those of a training.

    Raises:
        UnsupportedError: If the path leads to no model.
        FileError: If the weights cannot be read, or are those of another model.
        ModelError: If no weights were given and the factory initialises the model randomly.
    """
    model = _made(path)
    if weights is not None:
        put_weights(model, read_weights(weights), weights)
    elif trained:
        _refuse_random(model, _made(path), path)
    return model.to(device).eval()


def _made(path: str) -> nn.Module:
    factory = imported(path, "MODEL")
    made = factory if isinstance(factory, nn.Module) else None
    if made is None and callable(factory):
        made = called(factory, path, "MODEL")
    if not isinstance(made, nn.Module):
        returned = f"which returns {seen(made)}" if callable(factory) else f"which is {seen(factory)}"
        raise UnsupportedError(f"MODEL is {path!r}, {returned}; expected a function that returns a torch.nn.Module.")
    return made


def _refuse_random(one: nn.Module, other: nn.Module, path: str) -> None:
    """Raise if two models of one factory have different weights."""
    pairs = zip(one.state_dict().items(), other.state_dict().values(), strict=True)
    for name, (first, second) in ((name, (first, second)) for (name, first), second in pairs):
        if not torch.equal(first, second):
            raise ModelError(
                f"{path} gives other values of {name} at each call, so its weights are not trained; expected a trained "
                "model. Give the file of its weights: --weights FILE."
            )


def posterior_of(path: Path, model: nn.Module) -> Fitted:
    """Return the posterior in a file, for this model."""
    if not path.is_file():
        raise FileError(f"there is no file {path}; expected a posterior. Make it by lapwing fit ... --out {path}.")
    return load(path, model)


def dtype_of(model: nn.Module) -> torch.dtype:
    """Return the dtype of the model's weights: that of its first floating-point parameter."""
    return next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.get_default_dtype())


def takes_indices(model: nn.Module) -> bool:
    """Return whether the model has an embedding, so that whole inputs are indices and stay whole."""
    return any(isinstance(module, nn.Embedding | nn.EmbeddingBag) for module in model.modules())
