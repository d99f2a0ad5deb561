"""Weights files: tensors by name, read without running any code that a file may hold."""

from __future__ import annotations

import pickle
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lapwing.errors import FileError, UnsupportedError

INSIDE = ("state_dict", "model_state_dict", "model")  # keys of the state dict in a checkpoint of a training loop
SHOWN = 4  # names in a message
REMEDY = "Save the weights by torch.save(model.state_dict(), path)."


def read_weights(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a file by name: a state dict, or a checkpoint with one inside, or a safetensors file.

    Raises:
        FileError: If there is no such file, it is damaged, or it holds Python objects, which could run code.
    """
    if not path.is_file():
        raise FileError(f"there is no file {path}; expected the weights of the model. Check --weights.")
    content = _safetensors(path) if path.suffix == ".safetensors" else _torch(path)
    for key in INSIDE:
        if isinstance(content, Mapping) and isinstance(content.get(key), Mapping):
            content = content[key]
            break
    if not isinstance(content, Mapping) or not content or not all(isinstance(v, Tensor) for v in content.values()):
        held = f"the keys {_listed(list(content))}" if isinstance(content, Mapping) else f"a {type(content).__name__}"
        raise FileError(f"{path} holds {held}; expected tensors by the names of the parameters. {REMEDY}")
    return {str(name): tensor for name, tensor in content.items()}


def _torch(path: Path) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        objects = re.search(r"GLOBAL (\S+)", str(error))
        if objects is None:
            raise FileError(f"{path} is no file of weights, or damaged. {REMEDY}") from error
        raise FileError(
            f"{path} holds the Python object {objects[1]}, and reading objects can run code; expected tensors alone. "
            f"{REMEDY}"
        ) from error
    except Exception as error:  # a damaged file may raise anything
        raise FileError(f"{path} is no file of weights, or damaged ({type(error).__name__}). {REMEDY}") from error


def _safetensors(path: Path) -> Any:
    try:
        from safetensors.torch import load_file
    except ImportError as error:
        raise UnsupportedError(f"{path} needs the package safetensors; use pip install safetensors.") from error
    try:
        return load_file(path)
    except Exception as error:
        raise FileError(f"{path} is no safetensors file, or damaged: {error}. Save the weights again.") from error


def put_weights(model: nn.Module, given: Mapping[str, Tensor], path: Path) -> None:
    """Load the tensors into the model.

    A prefix that all names share, as wrappers add it ("module."), is left out where the rest are the model's names.

    Raises:
        FileError: If names or shapes are not those of the model.
    """
    own = model.state_dict()
    given = _without_prefix(given, own)
    missing, unexpected = [n for n in own if n not in given], [n for n in given if n not in own]
    if missing or unexpected:
        parts = [f"lacks {_listed(missing)}"] if missing else []
        parts += [f"has {_listed(unexpected)}, which the model lacks"] if unexpected else []
        raise FileError(f"{path} belongs to another model: it {' and '.join(parts)}. Check MODEL and --weights.")
    for name, tensor in own.items():
        if tensor.shape != given[name].shape:
            raise FileError(
                f"{path} belongs to another model: {name} has the shape {tuple(given[name].shape)}; expected "
                f"{tuple(tensor.shape)}. Check MODEL and --weights."
            )
    model.load_state_dict(dict(given))


def _without_prefix(given: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Return the tensors under the model's names if these come after one prefix, otherwise as they are."""
    first = next(iter(own), "")
    for name in given:
        prefix = name.removesuffix(first)
        if name.endswith(first) and prefix and {prefix + each for each in own} == set(given):
            return {each.removeprefix(prefix): tensor for each, tensor in given.items()}
    return given


def _listed(names: list[Any]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(map(str, names[:SHOWN])) + more
