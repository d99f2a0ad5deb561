"""Damaged checkpoints of training: each is refused, or, with the right checksum, trains on with possible values.

``python -m tests.attack checkpoints --count 2000 --seed 1``
"""

from __future__ import annotations

import random
import tempfile
from collections import Counter
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

import lapwing as lw
from tests.attack.files import command, judged
from tests.attack.mutations import damaged

D = torch.float64
OPTIMISERS = ("adam", "sgd", "lbfgs")


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.BatchNorm1d(4), nn.Linear(4, 2)).to(D)


def data() -> list[Any]:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(12, 3, dtype=D, generator=generator)
    return [(x[:8], x[:8, :2].sin()), (x[8:], x[8:, :2].sin())]


def recipe(optimiser: str, epochs: int) -> Any:
    update = lw.tuners.Ascend(steps=2)
    return lw.recipes.online(epochs, optimiser=optimiser, update=update, method=lw.Diagonal(), rate=1e-2)


def trained(optimiser: str, epochs: int, **options: Any) -> Any:
    return lw.train(network(), data(), "regression", recipe=recipe(optimiser, epochs), progress=False, **options)


@lru_cache
def content(optimiser: str) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        trained(optimiser, 3, checkpoint=f"{folder}/state")
        return Path(f"{folder}/state").read_bytes()


def possible(result: Any) -> str:
    """Return what is impossible about a finished run, or an empty text."""
    state = result.state
    if state.epoch != 4 or len(state.history) != 4:
        return f"{state.epoch} epochs with a history of {len(state.history)}"
    if not bool((state.precision > 0).all()) or not float(state.noise) > 0:
        return "a precision or the noise is not positive"
    if not all(bool(weight.isfinite().all()) for weight in state.weights.values()):
        return "a weight is not finite"
    return ""


def attacked(count: int, seed: int, folder: Path) -> tuple[Counter[str], list[str]]:
    """Damage checkpoints at random and resume from them, as ``files.attacked`` does with files."""
    rng, totals, wrong = random.Random(seed), Counter[str](), []
    for number in range(count):
        optimiser = OPTIMISERS[number % len(OPTIMISERS)]
        what, damage, right = damaged(content(optimiser), rng)
        path = folder / "damaged"
        path.write_bytes(damage)
        verdict, detail = judged(
            lambda optimiser=optimiser, path=path: trained(optimiser, 4, resume=path), possible, right
        )
        totals[verdict] += 1
        if verdict == "wrong":
            wrong.append(f"{number} {optimiser}: {what}: {detail}")
    return totals, wrong


def main(argv: list[str]) -> int:
    return command(attacked, argv, 2000, "checkpoints")
