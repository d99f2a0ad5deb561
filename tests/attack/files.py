"""Damaged posterior files: each is refused with an error of Lapwing, or, with the right checksum, has possible values.

``python -m tests.attack files --count 5000 --seed 1``
"""

from __future__ import annotations

import argparse
import random
import signal
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import lapwing as lw
from lapwing.runtime.states import State
from tests import problems, stored
from tests.attack.mutations import damaged

SECONDS = 30  # longer than this is a hang


@dataclass(frozen=True)
class Target:
    """A posterior to attack: one of the specimens that are stored for every version."""

    name: str

    @cached_property
    def specimen(self) -> stored.Specimen:
        return stored.SPECIMENS[self.name]()

    @cached_property
    def model(self) -> nn.Module:
        return self.specimen.model()

    @cached_property
    def x(self) -> Any:
        return problems.rows(self.specimen.data()[0], slice(12))

    @cached_property
    def posterior(self) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return self.specimen.fitted()

    @cached_property
    def content(self) -> bytes:
        with tempfile.TemporaryDirectory() as folder:
            self.posterior.save(f"{folder}/net")
            return Path(f"{folder}/net").read_bytes()


TARGETS = {name: Target(name) for name in stored.SPECIMENS}


@contextmanager
def limited() -> Iterator[None]:
    """Raise ``TimeoutError`` after ``SECONDS``."""

    def late(*_: Any) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def judged(read: Callable[[], Any], sound: Callable[[Any], str], right: bool) -> tuple[str, str]:
    """Return (verdict, detail) for one damaged file: "refused" and "accepted" are good, "wrong" is not."""
    try:
        with limited():
            value = read()
    except lw.LapwingError as error:
        return "refused", str(error)
    except BaseException as error:
        return "wrong", f"{type(error).__name__}: {error!s:.200}"
    if not right:
        return "wrong", "accepted with a wrong checksum"
    try:
        with limited():
            problem = sound(value)
    except lw.LapwingError as error:
        return "accepted", f"and refused to predict: {error}"
    except BaseException as error:
        return "wrong", f"after loading, {type(error).__name__}: {error!s:.200}"
    return ("wrong", problem) if problem else ("accepted", "")


def leaves(state: State, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield all tensors of a state by their dotted names."""
    yield from ((f"{prefix}{name}", tensor) for name, tensor in state.tensors.items())
    for key, part in state.parts.items():
        yield from leaves(part, f"{prefix}{key}.")


def possible(again: Any, target: Target) -> str:
    """Return what is impossible about a loaded posterior, or an empty text."""
    if not bool((again.prior.vector > 0).all() & again.prior.vector.isfinite().all()):
        return "a prior precision is not positive and finite"
    if not 0 < float(again.likelihood.dispersion) < torch.inf:
        return "the noise is not positive and finite"
    shapes = {name: tensor.shape for name, tensor in leaves(target.posterior.posterior.state())}
    for name, tensor in leaves(again.posterior.state()):
        if not bool(tensor.isfinite().all()):
            return f"{name} is not finite"
        if shapes.get(name, tensor.shape) != tensor.shape:
            return f"{name} has the shape {tuple(tensor.shape)}, not {tuple(shapes[name])}"
    belief = again.functions(target.x)
    variance = belief.variance
    if not bool(
        belief.mean.isfinite().all() & variance.isfinite().all() & (variance >= -1e-6 * variance.abs().max()).all()
    ):
        return f"the variance runs from {float(variance.min()):g} to {float(variance.max()):g}"
    again.predict(target.x)
    return ""


def attacked(count: int, seed: int, folder: Path) -> tuple[Counter[str], list[str]]:
    """Damage files at random; return how many were refused, accepted or wrong, and the wrong ones in words."""
    rng, totals, wrong = random.Random(seed), Counter[str](), []
    names = sorted(TARGETS)
    for number in range(count):
        name = names[number % len(names)]
        target = TARGETS[name]
        what, content, right = damaged(target.content, rng)
        path = folder / "damaged"
        path.write_bytes(content)
        verdict, detail = judged(
            lambda path=path, target=target: lw.load(path, target.model),
            lambda again, target=target: possible(again, target),
            right,
        )
        totals[verdict] += 1
        if verdict == "wrong":
            wrong.append(f"{number} {name}: {what}: {detail}")
    return totals, wrong


def command(attack: Callable[..., Any], argv: list[str], count: int, what: str) -> int:
    """Run an attack with the options of the command line and print its totals."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=count)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(argv)
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        totals, wrong = attack(options.count, options.seed, Path(folder))
    print("\n".join(wrong))
    print(f"{options.count} damaged {what}, seed {options.seed}: {dict(totals)}, {time.perf_counter() - start:.0f} s")
    return int(bool(wrong))


def main(argv: list[str]) -> int:
    return command(attacked, argv, 5000, "files")
