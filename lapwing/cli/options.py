"""The options that several commands share, and what they stand for."""

from __future__ import annotations

import argparse
import os
import random
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import nn

from lapwing.cli.data import Reader
from lapwing.cli.models import model_of
from lapwing.cli.tables import Roles
from lapwing.core.settings import usable_device
from lapwing.errors import FileError, UnsupportedError

COLUMNS = ("inputs", "target", "drop", "classes")  # options that name the parts of the data, as ``Roles`` has them
NO_COLUMNS: Mapping[str, tuple[str, ...]] = {}


def add_common(parser: ArgumentParser, device: bool = True) -> None:
    """Add the options of every command."""
    group = parser.add_argument_group("every command")
    if device:
        group.add_argument("--device", default="cpu", help="where to compute, such as cuda (default: cpu)")
    group.add_argument("--seed", type=_seed, default=0, help="seed of all random numbers (default: 0)")
    group.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    group.add_argument("--traceback", action="store_true", help="show where an error was raised")


def add_model(parser: ArgumentParser) -> None:
    """Add the model and its weights."""
    parser.add_argument(
        "model", metavar="MODEL", help="import path of a function that returns it: package.module:factory"
    )
    parser.add_argument(
        "--weights", type=Path, metavar="FILE", help="its weights: a state dict of torch, or safetensors"
    )


def add_data(parser: ArgumentParser, data: str) -> None:
    """Add the data, and what its columns and arrays are; ``data`` says what they are for."""
    group = parser.add_argument_group("data")
    group.add_argument(
        "--data", required=True, metavar="DATA",
        help=f"{data}: a .npz, .csv or .parquet file, or the import path of a loader, package.module:make_loader",
    )  # fmt: skip
    group.add_argument(
        "--target", type=names, default=(), metavar="NAME",
        help="column, array or key of the targets, several with commas (default: y, target, targets, label or labels)",
    )  # fmt: skip
    group.add_argument(
        "--inputs", type=names, default=(), metavar="NAMES",
        help="columns of the inputs, with commas, or their array (default: the others; of arrays x or inputs)",
    )  # fmt: skip
    group.add_argument("--drop", type=names, default=(), metavar="NAMES", help="columns to leave out, with commas")
    group.add_argument(
        "--classes", type=names, default=(), metavar="NAMES",
        help="the classes in the order of the network's outputs, with commas (default: their texts, sorted)",
    )  # fmt: skip
    group.add_argument("--batch-size", type=_count, default=256, metavar="N", help="rows of a batch (default: 256)")


def add_posterior(parser: ArgumentParser) -> None:
    """Add the file of one posterior."""
    parser.add_argument("--posterior", type=Path, required=True, metavar="FILE", help="a file that lapwing fit wrote")


def add_level(parser: ArgumentParser) -> None:
    """Add the probability of intervals."""
    parser.add_argument("--level", type=_level, default=0.95, help="probability of the intervals (default: 0.95)")


def add_out(parser: ArgumentParser, what: str) -> None:
    """Add the file that is written."""
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help=what)
    parser.add_argument("--overwrite", action="store_true", help="replace the file if it exists")


def device_of(arguments: Namespace) -> torch.device:
    """Return the device; raise if this machine does not have it."""
    try:
        return usable_device(arguments.device)
    except UnsupportedError as error:
        raise UnsupportedError(
            f"--device is {arguments.device!r}, which this machine does not have; expected one that it has, such as "
            "--device cpu."
        ) from error


def seed_all(seed: int) -> torch.Generator:
    """Seed the generators that the user's code may draw from, and return one for the fit."""
    random.seed(seed)
    torch.manual_seed(seed)
    return torch.Generator().manual_seed(seed)


def model_given(arguments: Namespace, trained: bool = True) -> nn.Module:
    """Return the model of a command with one model."""
    return model_of(arguments.model, arguments.weights, device_of(arguments), trained)


def reader_given(
    arguments: Namespace, model: nn.Module, labelled: bool = True, labels: bool = True, kept: tuple[str, ...] = (),
    columns: Mapping[str, tuple[str, ...]] = NO_COLUMNS,
) -> Reader:  # fmt: skip
    """Return what reads the data of a command; columns that are kept for the output are no inputs.

    ``columns`` are those of a posterior: names that the fit was given, which hold where no option says otherwise.
    """
    roles = Roles(arguments.inputs, arguments.target, (*arguments.drop, *kept), arguments.classes)
    known = Roles(*((() if getattr(arguments, option) else columns.get(option, ())) for option in COLUMNS))
    return Reader(model, roles, arguments.batch_size, labelled, labels, known)


def columns_of_fit(arguments: Namespace, classes: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    """Return the names that later commands need, for the file of the posterior."""
    given = {option: getattr(arguments, option) for option in COLUMNS}
    return {option: names for option, names in {**given, "classes": classes}.items() if names}


def target_key(arguments: Namespace, columns: Mapping[str, tuple[str, ...]] = NO_COLUMNS) -> str | None:
    """Return the key of the target in batches of the user that are mappings."""
    target = arguments.target or columns.get("target", ())
    return target[0] if target and ":" in arguments.data else None


def refuse_output(arguments: Namespace, suffixes: tuple[str, ...] = ()) -> None:
    """Raise before any work if the file could not be written, or if the command reads it.

    Raises:
        FileError: If it exists and may not be replaced, its folder does not exist or is read-only, or it is one of the
            files that the command reads, under whatever name.
        UnsupportedError: If its name does not end in one of the suffixes.
    """
    path, overwrite = arguments.out, arguments.overwrite
    if suffixes and path.suffix.lower() not in suffixes:
        raise UnsupportedError(f"--out is {str(path)!r}; expected a name that ends in {' or '.join(suffixes)}.")
    folder = path.parent
    if not folder.is_dir():
        raise FileError(f"{path} cannot be written: there is no folder {folder}. Make it first, or change --out.")
    if path.is_dir():
        raise FileError(f"{path} is a folder; expected the name of a file. Change --out.")
    for option, read in _files_read(arguments):
        if path.exists() and read.exists() and path.samefile(read):  # through links and other spellings
            raise FileError(f"--out is {path}, which is the file of {option} {read}; expected another. Change --out.")
    if path.exists() and not overwrite:
        raise FileError(f"{path} exists; expected a new name. Change --out, or replace it by --overwrite.")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise FileError(f"{path} may not be written to. Change its permissions, or --out.")


def _files_read(arguments: Namespace) -> Iterator[tuple[str, Path]]:
    """Yield the files that the command may read, each with its option."""
    module = arguments.model.partition(":")[0]
    if module:
        yield "MODEL", Path(*module.split(".")).with_suffix(".py")
    for option in ("weights", "posterior", "data", "validation"):
        given = getattr(arguments, option, None)
        if given is not None:
            yield f"--{option}", Path(given)


def names(text: str) -> tuple[str, ...]:
    """Return the names in a text with commas.

    >>> names("age, size")
    ('age', 'size')
    """
    found = tuple(name.strip() for name in text.split(","))
    if not all(found) or len(set(found)) < len(found):
        raise argparse.ArgumentTypeError(f"{text!r} has an empty name or one twice; expected names with commas")
    return found


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def _seed(text: str) -> int:
    if not text.isdecimal() or int(text) >= 2**63:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 0")
    return int(text)


def _level(text: str) -> float:
    try:
        level = float(text)
    except ValueError:
        level = 0.0
    if not 0 < level < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a probability between 0 and 1")
    return level
