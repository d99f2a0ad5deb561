"""Tables of a folder, one .npz file each, in the form that ``experiments.package_tables`` writes: X, y and kind."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from lapwing.errors import DataError

Pair = tuple[Tensor, Tensor]
KINDS = ("regression", "classification")


@dataclass(frozen=True, eq=False)
class OwnTable:
    """The columns X (N, D) of a table and its target, in their own units.

    The target is (N, 1) in floating point for a regression, and (N,) whole numbers from zero for classes.
    """

    name: str
    x: Tensor
    y: Tensor

    @classmethod
    def read(cls, path: Path) -> OwnTable:
        """Read one file; raise if its arrays are not those of a table."""
        with np.load(path, allow_pickle=False) as file:
            missing = {"X", "y", "kind"} - set(file.files)
            if missing:
                raise DataError(f"{path.name} lacks {', '.join(sorted(missing))}; expected the keys X, y and kind.")
            x, y, kind = torch.from_numpy(file["X"]).double(), torch.from_numpy(file["y"]), str(file["kind"])
        if x.ndim != 2 or y.shape != x.shape[:1] or kind not in KINDS:
            raise DataError(
                f"{path.name} has X {tuple(x.shape)}, y {tuple(y.shape)} and kind {kind!r}; expected X (N, D), y (N,) "
                f"and one of {', '.join(KINDS)}."
            )
        if kind == "regression":
            return cls(path.stem, x, y.double().unsqueeze(1))
        return cls(path.stem, x, y.unique(return_inverse=True)[1])

    @property
    def classes(self) -> int:
        """The number of classes; one for a real target."""
        return 1 if self.y.is_floating_point() else int(self.y.max()) + 1

    def parts(self, seed: int, validation: int) -> tuple[Pair, Pair, Pair]:
        """Return rows to train on, to validate on and to test on: half, up to ``validation``, and the rest.

        At most a fifth of the rows validate, so that the same rows test whatever the number of validation rows is.
        Columns, and a real target, are standardised by the rows to train on. All are in single precision.
        """
        order = torch.randperm(len(self.x), generator=torch.Generator().manual_seed(seed))
        half, fifth = len(order) // 2, len(order) // 5
        train, held, test = order[:half], order[half : half + min(validation, fifth)], order[half + fifth :]
        width = lambda t: torch.where(t[train].std(0) > 1e-9, t[train].std(0), 1.0)  # a constant one keeps its unit
        scale = lambda t: ((t - t[train].mean(0)) / width(t)).float()
        x, y = scale(self.x), scale(self.y) if self.y.is_floating_point() else self.y
        return (x[train], y[train]), (x[held], y[held]), (x[test], y[test])


def own_tables(folder: Path, kind: str) -> tuple[Path, ...]:
    """Return the files of the folder with a table of this kind, by name; raise if there is none."""
    files = []
    for path in sorted(folder.glob("*.npz")):
        with np.load(path, allow_pickle=False) as file:
            if "kind" in file.files and str(file["kind"]) == kind:
                files.append(path)
    if not files:
        raise DataError(f"{folder} has no .npz file with a {kind} table; make some: -m experiments.package_tables.")
    return tuple(files)
