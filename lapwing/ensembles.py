"""Training of several networks that differ by their seeds, for ``lw.baselines``."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lapwing.api import train
from lapwing.data.batches import Data, Reading
from lapwing.data.inputs import plain_tensors
from lapwing.errors import DataError, FileError, UnsupportedError
from lapwing.likelihoods.base import Likelihood
from lapwing.methods.members import reinitialise
from lapwing.networks.forward import arithmetic_of, unwrap
from lapwing.recipes import Recipe, fixed
from lapwing.registry import find_likelihood
from lapwing.runtime.files import write_atomically
from lapwing.runtime.settings import NONE, PATH, integer, refuse_other_arguments
from lapwing.runtime.threads import Stream, should_show_progress


@refuse_other_arguments
def train_ensemble(
    model: nn.Module,
    data: Iterable[object],
    likelihood: Likelihood | str,
    *,
    members: int = 5,
    recipe: Recipe | None = None,
    folder: str | Path | None = None,
    target_key: str | None = None,
    output: str | int | tuple[str | int, ...] | None = None,
    progress: bool | None = None,
) -> list[nn.Module]:
    """Train several networks from new random weights. ``model`` is not changed.

    Member k has the seed ``recipe.seed + k``, for its first weights and for its training. Frozen weights, which do not
    require a gradient, are those of ``model`` in every member.

    Args:
        model: The network to copy. Every module with weights needs ``reset_parameters``, as PyTorch's have.
        data: As for ``train``.
        likelihood: As for ``train``.
        members: The number of networks.
        recipe: How each is trained: ``lw.recipes.fixed()`` (plain training) if None.
        folder: A folder for a checkpoint of every member, written after every epoch. It is made if it does not exist,
            in a folder that does. A repeated call goes on from there, with the result of a call that was not
            interrupted. Recipe, likelihood and data must be the same, in any order of the data, which are read twice to
            compare them. Inputs or targets that differ between two readings, as with random augmentation, are not
            compared.
        target_key: As for ``fit``.
        output: As for ``fit``.
        progress: Whether to show progress bars; None shows them on a terminal.

    Returns:
        The trained networks, in evaluation mode, for ``lw.baselines.Ensemble`` or ``lw.baselines.MixtureOfLaplace``.

    Raises:
        UnsupportedError: If ``members`` or ``recipe`` is of the wrong kind, or a module has no ``reset_parameters``.
        DataError: If the folder belongs to another model, recipe, likelihood or other data; as for ``train``
            otherwise.
        NumericalError: If the loss of a member is not finite.

    >>> import torch
    >>> import lapwing as lw
    >>> x = torch.linspace(-1, 1, 20).unsqueeze(1)
    >>> recipe = lw.recipes.fixed(epochs=2)
    >>> first, *others = train_ensemble(nn.Linear(1, 1), [(x, x)], "regression", members=3, recipe=recipe)
    >>> lw.fit(first, [(x, x)], "regression", method=lw.baselines.Ensemble(others)).functions(x).std.shape
    torch.Size([20, 1])
    """
    integer().check("members", members)
    (PATH | NONE).check("folder", folder)
    recipe = fixed() if recipe is None else recipe
    if not isinstance(recipe, Recipe):
        raise UnsupportedError(f"recipe is {recipe!r:.80}; expected fixed(...), online(...) or another Recipe.")
    if folder is not None:
        cpu = torch.device("cpu")
        read = Data(
            data, cpu, target_key, should_show_progress(progress), stream=Stream(0, cpu), dtype=arithmetic_of(model)
        )
        _refuse_other_call(Path(folder), recipe, find_likelihood(likelihood), DataSummary.of(read))
    trained = []
    for number in range(members):
        of_member = replace(recipe, seed=recipe.seed + number)
        checkpoint = None if folder is None else Path(folder) / f"member{number}.lapwing"
        done = checkpoint is not None and checkpoint.exists()
        run = train(
            reinitialise(unwrap(model), of_member.seed), data, likelihood, recipe=of_member, target_key=target_key,
            output=output, resume=checkpoint if done else None, checkpoint=checkpoint, progress=progress,
        )  # fmt: skip
        trained.append(run.model)
    return trained


@dataclass(frozen=True, eq=False)
class DataSummary:
    """Numbers that describe a data set and do not depend on the order of its rows."""

    rows: Reading  # inputs and targets; without sums if two passes differ
    targets: Reading

    @classmethod
    def of(cls, data: Data) -> DataSummary:
        """Read the data, twice unless they are in memory."""
        first = cls._pass(data)
        if data.in_memory:
            return first
        second = cls._pass(data)
        pairs = ((first.rows, second.rows), (first.targets, second.targets))
        return cls(*(Reading(a.rows) if b.difference(a) else a for a, b in pairs))  # without sums that changed

    @classmethod
    def _pass(cls, data: Data) -> DataSummary:
        rows, targets = Reading(), Reading()
        for batch in data.batches("reading"):
            rows.add((*plain_tensors(batch.inputs), batch.targets), batch.n_samples)
            targets.add((batch.targets,), batch.n_samples)
        return cls(rows, targets)

    def to_plain(self) -> dict[str, Any]:
        """Return the numbers as JSON has them."""
        plain = lambda each: None if each.sums is None else {"sums": each.sums.tolist(), "widths": list(each.widths)}
        return {"count": self.rows.rows, "rows": plain(self.rows), "targets": plain(self.targets)}

    @classmethod
    def from_plain(cls, values: dict[str, Any]) -> DataSummary:
        """Return the numbers that ``to_plain`` wrote."""
        parts = []
        for given in (values["rows"], values["targets"]):
            known = given or {"sums": None, "widths": None}
            sums = None if known["sums"] is None else torch.tensor(known["sums"], dtype=torch.float64)
            parts.append(Reading(values["count"], sums, None if sums is None else tuple(known["widths"])))
        return cls(*parts)

    def difference(self, stored: DataSummary) -> str:
        """Return in words how these data differ from stored ones; empty if they are the same as far as one can tell."""
        if self.rows.rows != stored.rows.rows:
            return f"{stored.rows.rows} data, and there are {self.rows.rows} now"
        pairs = {"targets": (self.targets, stored.targets), "inputs": (self.rows, stored.rows)}
        for name, (now, then) in pairs.items():
            if now.sums is not None and then.sums is not None and (now.widths != then.widths or now.difference(then)):
                return f"other {name}"
        return ""


def _refuse_other_call(folder: Path, recipe: Recipe, likelihood: Likelihood, data: DataSummary) -> None:
    """Write what the folder is for, or raise if it is for something else."""
    tuner = type(recipe.update).__name__  # a function has no lasting representation
    call = {"recipe": f"{replace(recipe, update=None)!r}, {tuner}", "likelihood": repr(likelihood)}
    path = folder / "ensemble.json"
    if not path.exists():
        with contextlib.suppress(OSError):  # a folder that cannot be made is refused below
            folder.mkdir(exist_ok=True)
        write_atomically(path, [json.dumps({**call, "data": data.to_plain()}, indent=1).encode()])
        return
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        differing = [name for name in call if stored[name] != call[name]]
        difference = data.difference(DataSummary.from_plain(stored["data"]))
    except (ValueError, KeyError, TypeError) as error:
        raise FileError(f"{path} is damaged ({error}). Delete it with the checkpoints beside it.") from error
    for name in differing:
        raise DataError(
            f"the folder {folder} has networks with the {name} {stored[name]}, and the {name} is {call[name]} now; "
            "expected the same. Choose another folder."
        )
    if difference:
        raise DataError(f"the folder {folder} has networks for {difference}; expected the same. Choose another folder.")
