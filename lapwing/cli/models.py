"""Models by import path and weights file, in evaluation mode on their device; and posteriors of them."""

from __future__ import annotations

import importlib
import inspect
import os
import pickle
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor, nn

from lapwing.api import load
from lapwing.errors import FileError, LapwingError, ModelError, UnsupportedError
from lapwing.fitted import Fitted
from lapwing.runtime.settings import describe, nearest


class UserCodeError(LapwingError):
    """An error in the user's own code, which is the cause."""


@contextmanager
def working_folder_first() -> Iterator[None]:
    """Let modules in the current folder be imported meanwhile, as ``python -m`` does."""
    folder = os.getcwd()
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        sys.path.remove(folder)


def import_object(path: str, option: str) -> object:
    """Return the object at an import path.

    Args:
        path: ``package.module:name``; the name may have dots.
        option: The argument that the path was given for, for error messages.

    Raises:
        UnsupportedError: If it is not an import path, or the module or the name does not exist.
        UserCodeError: If the module cannot be imported.

    >>> import_object("torch.nn:Linear", "MODEL")
    <class 'torch.nn.modules.linear.Linear'>
    """
    module_name, _, name = path.partition(":")
    if not module_name or not name or module_name.endswith(".py") or "/" in module_name:
        meant = module_name.removesuffix(".py").strip("./").replace("/", ".")
        example = f"{meant or 'package.module'}:{name or 'factory'}"
        raise UnsupportedError(f"{option} is {path!r}; expected an import path such as {example}.")
    found: object = _module(module_name, option)
    for part in name.split("."):
        if not hasattr(found, part):
            public = [each for each in vars(found) if not each.startswith("_")] if hasattr(found, "__dict__") else []
            raise UnsupportedError(
                f"{option} is {path!r}, and {module_name} has no {part!r}; expected the name of something in it."
                f"{nearest(part, public)}"
            )
        found = getattr(found, part)
    return found


def _module(name: str, option: str) -> ModuleType:
    """Import a module; tell one that does not exist from one that fails."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as missing:
        if missing.name and (name == missing.name or name.startswith(f"{missing.name}.")):
            near = [each.stem for each in Path.cwd().glob("*.py")]
            raise UnsupportedError(
                f"{option} names the module {name!r}, and there is no module {missing.name!r}; expected one that is "
                f"installed, or in the current folder {Path.cwd()}.{nearest(name, near)}"
            ) from missing
        raise UserCodeError(_failure(f"the import of {name}", missing)) from missing
    except SystemExit as ended:
        raise UserCodeError(
            f"the import of {name} ended the program with {ended.code!r}; expected definitions. Put what the script "
            'does under if __name__ == "__main__".'
        ) from ended
    except Exception as error:
        raise UserCodeError(_failure(f"the import of {name}", error)) from error


def call_factory(function: Callable[[], object], path: str, option: str) -> object:
    """Return what the user's function returns.

    Raises:
        UnsupportedError: If it cannot be called without arguments.
        UserCodeError: If it raises an error.
    """
    needed = _required_arguments(function)
    if needed:
        name = path.rpartition(":")[2]
        raise UnsupportedError(
            f"{option} is {path!r}, which needs the arguments {', '.join(needed)}; expected one that is called without "
            f"any. Write a function that fills them in, such as def make(): return {name}({needed[0]}=...)."
        )
    try:
        return function()
    except (Exception, SystemExit) as error:
        raise UserCodeError(_failure(path, error)) from error


def _required_arguments(function: Callable[..., object]) -> list[str]:
    """Return the names of the arguments that have no default."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # a function written in C may not tell
        return []
    several = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p.name for p in parameters if p.default is inspect.Parameter.empty and p.kind not in several]


def _failure(what: str, error: BaseException) -> str:
    return f"{what} raised {type(error).__name__}: {error}. --traceback shows where."


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
        held = f"a {type(content).__name__}"
        if isinstance(content, Mapping):
            held = f"the keys {list_names(list(map(str, content)), SHOWN)}"
        raise FileError(f"{path} holds {held}; expected tensors by the names of the parameters. {REMEDY}")
    return {str(name): tensor for name, tensor in content.items()}


def _torch(path: Path) -> object:
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        objects = re.search(r"GLOBAL (\S+)", str(error))
        if objects is None:
            raise FileError(f"{path} is not a file of weights, or is damaged. {REMEDY}") from error
        raise FileError(
            f"{path} holds the Python object {objects[1]}, and reading objects can run code; expected tensors alone. "
            f"{REMEDY}"
        ) from error
    except Exception as error:  # a damaged file may raise anything
        raise FileError(f"{path} is not a file of weights, or is damaged ({type(error).__name__}). {REMEDY}") from error


def _safetensors(path: Path) -> object:
    try:
        from safetensors.torch import load_file
    except ImportError as error:
        raise UnsupportedError(f"{path} needs the package safetensors; use pip install safetensors.") from error
    try:
        return load_file(path)
    except Exception as error:
        raise FileError(f"{path} is not a safetensors file, or is damaged: {error}. Save the weights again.") from error


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
        parts = [f"lacks {list_names(missing, SHOWN)}"] if missing else []
        parts += [f"has {list_names(unexpected, SHOWN)}, which the model lacks"] if unexpected else []
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


def list_names(names: Sequence[str], shown: int) -> str:
    """Return the first names and how many more there are.

    >>> list_names(["a", "b", "c"], shown=2)
    'a, b and 1 more'
    """
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return ", ".join(names[:shown]) + more


def import_model(path: str, weights: Path | None, device: torch.device, trained: bool = True) -> nn.Module:
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
    model = _build_model(path)
    if weights is not None:
        put_weights(model, read_weights(weights), weights)
    elif trained:
        _refuse_random(model, _build_model(path), path)
    return model.to(device).eval()


def _build_model(path: str) -> nn.Module:
    made = factory = import_object(path, "MODEL")
    if callable(factory) and not isinstance(factory, nn.Module):
        made = call_factory(factory, path, "MODEL")
    if not isinstance(made, nn.Module):
        returned = f"which returns {describe(made)}" if callable(factory) else f"which is {describe(factory)}"
        raise UnsupportedError(f"MODEL is {path!r}, {returned}; expected a function that returns a torch.nn.Module.")
    return made


def _refuse_random(one: nn.Module, other: nn.Module, path: str) -> None:
    """Raise if two models of one factory have different weights."""
    for (name, first), second in zip(one.state_dict().items(), other.state_dict().values(), strict=True):
        if not torch.equal(first, second):
            raise ModelError(
                f"{path} gives other values of {name} at each call, so its weights are not trained; expected a trained "
                "model. Give the file of its weights: --weights FILE."
            )


def load_posterior(path: Path, model: nn.Module) -> Fitted:
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
