"""What several commands share: their arguments and what these stand for, and the outcome."""

from __future__ import annotations

import json
import os
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import torch
from torch import nn

import lapwing
from lapwing.cli.data import Reader, Roles
from lapwing.cli.models import import_model, load_posterior
from lapwing.decisions.evaluation import json_values
from lapwing.errors import FileError, UnsupportedError
from lapwing.fitted import Fitted
from lapwing.networks.selection import Weights, named
from lapwing.registry import WEIGHTS, find_weights
from lapwing.runtime.settings import usable_device


@dataclass(frozen=True)
class Outcome:
    """What a command prints: ``text``, or with ``--json`` the ``facts`` as an object."""

    text: str
    facts: Mapping[str, object] = field(default_factory=dict)

    def to_json(self, command: str) -> str:
        """Return the facts as one JSON object, after the command and the versions. Numbers that JSON lacks are null.

        >>> print(Outcome("", {"nll": float("nan")}).to_json("evaluate").splitlines()[-2])
          "nll": null
        """
        versions = {"lapwing": lapwing.__version__, "torch": str(torch.__version__)}
        return json.dumps(
            json_values({"command": command, "versions": versions, **self.facts}), indent=2, allow_nan=False
        )


COLUMNS = ("inputs", "target", "drop", "classes")  # options that name the parts of the data, as ``Roles`` has them
NO_COLUMNS: Mapping[str, tuple[str, ...]] = {}
T = TypeVar("T")


def names_of(files: Sequence[Path]) -> list[str]:
    """Return a name for each file: without folder and suffix, or the whole path if two would have the same.

    >>> names_of([Path("runs/small.lapwing"), Path("runs/large.lapwing")])
    ['small', 'large']
    """
    names = [file.stem for file in files]
    if len(set(names)) == len(names):
        return names
    paths = [str(file) for file in files]
    twice = [path for path in paths if paths.count(path) > 1]
    if twice:
        raise UnsupportedError(f"--posterior names {twice[0]} twice; expected different files.")
    return paths


def _each(option: str, values: Sequence[T], count: int) -> Sequence[T]:
    """Return a value for each posterior; one value is that of all."""
    if len(values) not in (1, count):
        raise UnsupportedError(
            f"{option} was given {len(values)} times and --posterior {count} times; expected as many, in the same "
            f"order, or one {option} for all."
        )
    return list(values) * count if len(values) == 1 else values


class Arguments(Namespace):
    """The words of a command as they were read, and what they stand for."""

    def chosen_weights(self) -> Weights:
        """Return the rule for the weights."""
        return find_weights(self.subset) if self.subset in WEIGHTS else named(self.subset)

    def _device(self) -> torch.device:
        """Return the device; raise if this machine does not have it."""
        try:
            return usable_device(self.device)
        except UnsupportedError as error:
            raise UnsupportedError(
                f"--device is {self.device!r}, which this machine does not have; expected one that it has, such as "
                "--device cpu."
            ) from error

    def load_model(self, trained: bool = True) -> nn.Module:
        """Return the model of a command with one model."""
        return import_model(self.model, self.weights, self._device(), trained)

    def make_reader(
        self, model: nn.Module, labelled: bool = True, labels: bool = True, kept: tuple[str, ...] = (),
        columns: Mapping[str, tuple[str, ...]] = NO_COLUMNS,
    ) -> Reader:  # fmt: skip
        """Return the reader of the data of a command; columns that are kept for the output are not inputs.

        ``columns`` are those of a posterior: names that the fit was given, which hold where no option says otherwise.
        """
        roles = Roles(self.inputs, self.target, (*self.drop, *kept), self.classes)
        known = Roles(*((() if vars(self)[option] else columns.get(option, ())) for option in COLUMNS))
        return Reader(model, roles, self.batch_size, labelled, labels, known)

    def columns_of_fit(self, classes: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
        """Return the names that later commands need, for the file of the posterior."""
        given = {option: vars(self)[option] for option in COLUMNS}
        return {option: names for option, names in {**given, "classes": classes}.items() if names}

    def target_key(self, columns: Mapping[str, tuple[str, ...]] = NO_COLUMNS) -> str | None:
        """Return the key of the target in batches of the user that are mappings."""
        target = self.target or columns.get("target", ())
        return target[0] if target and ":" in self.data else None

    def refuse_output(self, suffixes: tuple[str, ...] = ()) -> None:
        """Raise before any work if the file could not be written, or if the command reads it.

        Raises:
            FileError: If it exists and may not be replaced, its folder does not exist or is read-only, or it is one of
                the files that the command reads, under whatever name.
            UnsupportedError: If its name does not end in one of the suffixes.
        """
        path, overwrite = self.out, self.overwrite
        if suffixes and path.suffix.lower() not in suffixes:
            raise UnsupportedError(f"--out is {str(path)!r}; expected a name that ends in {' or '.join(suffixes)}.")
        folder = path.parent
        if not folder.is_dir():
            raise FileError(f"{path} cannot be written: there is no folder {folder}. Make it first, or change --out.")
        if path.is_dir():
            raise FileError(f"{path} is a folder; expected the name of a file. Change --out.")
        for option, read in self._files_read():
            if path.exists() and read.exists() and path.samefile(read):  # through links and other spellings
                raise FileError(
                    f"--out is {path}, which is the file of {option} {read}; expected another. Change --out."
                )
        if path.exists() and not overwrite:
            raise FileError(f"{path} exists; expected a new name. Change --out, or replace it by --overwrite.")
        if not os.access(path if path.exists() else folder, os.W_OK):
            raise FileError(f"{path} may not be written to. Change its permissions, or --out.")

    def _files_read(self) -> Iterator[tuple[str, Path]]:
        """Yield the files that the command may read, each with its option."""
        module = self.model.partition(":")[0]
        if module:
            yield "MODEL", Path(*module.split(".")).with_suffix(".py")
        for option in ("weights", "posterior", "data", "validation"):
            given = vars(self).get(option)
            if given is not None:
                yield f"--{option}", Path(given)

    def load_posteriors(self) -> dict[str, Fitted]:
        """Return the posteriors by name. Those with the same model and weights share one network.

        Raises:
            UnsupportedError: If the numbers of models, weights and posteriors do not match.
        """
        files, device = self.posterior, self._device()
        paths = _each("MODEL", self.models, len(files))
        weights = _each("--weights", self.weights or [None], len(files))
        pairs = list(zip(paths, weights, strict=True))
        models = {pair: import_model(*pair, device) for pair in dict.fromkeys(pairs)}
        named_files = zip(names_of(files), files, pairs, strict=True)
        return {name: load_posterior(file, models[pair]) for name, file, pair in named_files}
