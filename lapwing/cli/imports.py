"""Objects by their import path, ``package.module:name``, and calls of the user's code."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lapwing.core.settings import nearest
from lapwing.errors import LapwingError, UnsupportedError


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


def imported(path: str, option: str) -> Any:
    """Return the object at an import path.

    Args:
        path: ``package.module:name``; the name may have dots.
        option: The argument that the path was given for, for error messages.

    Raises:
        UnsupportedError: If it is no import path, or the module or the name does not exist.
        UserCodeError: If the module cannot be imported.

    >>> imported("torch.nn:Linear", "MODEL")
    <class 'torch.nn.modules.linear.Linear'>
    """
    module_name, _, name = path.partition(":")
    if not module_name or not name or module_name.endswith(".py") or "/" in module_name:
        meant = module_name.removesuffix(".py").strip("./").replace("/", ".")
        example = f"{meant or 'package.module'}:{name or 'factory'}"
        raise UnsupportedError(f"{option} is {path!r}; expected an import path such as {example}.")
    found = _module(module_name, option)
    for part in name.split("."):
        if not hasattr(found, part):
            public = [each for each in vars(found) if not each.startswith("_")] if hasattr(found, "__dict__") else []
            raise UnsupportedError(
                f"{option} is {path!r}, and {module_name} has no {part!r}; expected the name of something in it."
                f"{nearest(part, public)}"
            )
        found = getattr(found, part)
    return found


def _module(name: str, option: str) -> Any:
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


def called(function: Callable[[], Any], path: str, option: str) -> Any:
    """Return what the user's function returns.

    Raises:
        UnsupportedError: If it cannot be called without arguments.
        UserCodeError: If it raises an error.
    """
    needed = _needed(function)
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


def _needed(function: Callable[..., Any]) -> list[str]:
    """Return the names of the arguments that have no default."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # a function written in C may not tell
        return []
    several = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p.name for p in parameters if p.default is inspect.Parameter.empty and p.kind not in several]


def _failure(what: str, error: BaseException) -> str:
    return f"{what} raised {type(error).__name__}: {error}. --traceback shows where."
