"""Training of several networks that differ by their seeds, for ``lw.baselines``."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from lapwing.api import train
from lapwing.core.atomic import write_atomically
from lapwing.core.settings import NONE, PATH, require_integer
from lapwing.errors import DataError, FileError, UnsupportedError
from lapwing.likelihoods.protocol import Likelihood
from lapwing.methods.ensemble import renewed
from lapwing.networks.forward import unwrapped
from lapwing.registry import named
from lapwing.training.recipe import Recipe, fixed


def train_ensemble(
    model: nn.Module,
    data: Iterable[Any],
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
        folder: An existing folder for a checkpoint of every member, written after every epoch. A repeated call goes on
            from there, with the result of a call that was not interrupted. Recipe and likelihood must be the same; the
            data must be too, and are not compared.
        target_key: As for ``fit``.
        output: As for ``fit``.
        progress: Whether to show progress bars; None shows them on a terminal.

    Returns:
        The trained networks, in evaluation mode, for ``lw.baselines.Ensemble`` or ``lw.baselines.MixtureOfLaplace``.

    Raises:
        UnsupportedError: If ``members`` or ``recipe`` is of the wrong kind, or a module has no ``reset_parameters``.
        DataError: If the folder belongs to another model, recipe or likelihood; as for ``train`` otherwise.
        NumericalError: If the loss of a member is not finite.

    >>> import torch
    >>> import lapwing as lw
    >>> x = torch.linspace(-1, 1, 20).unsqueeze(1)
    >>> recipe = lw.recipes.fixed(epochs=2)
    >>> first, *others = train_ensemble(nn.Linear(1, 1), [(x, x)], "regression", members=3, recipe=recipe)
    >>> lw.fit(first, [(x, x)], "regression", method=lw.baselines.Ensemble(others)).functions(x).std.shape
    torch.Size([20, 1])
    """
    require_integer("members", members)
    (PATH | NONE).check("folder", folder)
    recipe = fixed() if recipe is None else recipe
    if not isinstance(recipe, Recipe):
        raise UnsupportedError(f"recipe is {recipe!r:.80}; expected fixed(...), online(...) or another Recipe.")
    if folder is not None:
        _refuse_other_call(Path(folder), recipe, named("likelihood", likelihood))
    trained = []
    for number in range(members):
        of_member = replace(recipe, seed=recipe.seed + number)
        checkpoint = None if folder is None else Path(folder) / f"member{number}.lapwing"
        done = checkpoint is not None and checkpoint.exists()
        run = train(
            renewed(unwrapped(model), of_member.seed), data, likelihood, recipe=of_member, target_key=target_key,
            output=output, resume=checkpoint if done else None, checkpoint=checkpoint, progress=progress,
        )  # fmt: skip
        trained.append(run.model)
    return trained


def _refuse_other_call(folder: Path, recipe: Recipe, likelihood: Likelihood) -> None:
    """Write what the folder is for, or raise if it is for something else."""
    tuner = type(recipe.update).__name__  # a function has no lasting representation
    call = {"recipe": f"{replace(recipe, update=None)!r}, {tuner}", "likelihood": repr(likelihood)}
    path = folder / "ensemble.json"
    if not path.exists():
        write_atomically(path, [json.dumps(call, indent=1).encode()])
        return
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        differing = [name for name in call if stored[name] != call[name]]
    except (ValueError, KeyError, TypeError) as error:
        raise FileError(f"{path} is damaged ({error}). Delete it with the checkpoints beside it.") from error
    for name in differing:
        raise DataError(
            f"the folder {folder} has networks with the {name} {stored[name]}, and the {name} is {call[name]} now; "
            "expected the same. Choose another folder."
        )
