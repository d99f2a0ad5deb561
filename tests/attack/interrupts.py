"""Ctrl-C at random moments of fits, predictions, trainings, checks and saving: nothing may change.

A timer sends SIGINT to the main thread while it works. Afterwards the model must have the same parameters with the same
values, flags, modes and hooks, and PyTorch the same modes, settings and random numbers.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import lapwing as lw
from tests import problems
from tests.attack.surroundings import settings
from tests.attack.threads import SPECIAL, plain_batch, special
from tests.cases import BY_NAME
from tests.conformance.declared import SMALL, net, small_method

Work = Callable[[], Any]
LEAST = 10  # signals, however slow the machine


def works(folder: str) -> dict[str, Callable[[], tuple[nn.Module, Work]]]:
    """Return by name what makes a call of every kind, with the model that it must not change."""
    table: dict[str, Callable[[], tuple[nn.Module, Work]]] = {}
    for name in SMALL:
        table[f"fit {name}"], table[f"predict {name}"] = partial(_fit, name), partial(_prediction, name)
    for name in SPECIAL:
        table[f"predict {name}"] = partial(_special_prediction, name)
    for name in ("lstm", "transformer_layer", "free_parameter"):
        table[f"fit {name}"], table[f"check {name}"] = partial(_default_fit, name), partial(_check, name)
    kinds = ("train", "save", "load")
    return table | {kind: partial(_file_or_training, kind, Path(folder) / "kept.lapwing") for kind in kinds}


def _data() -> list[Any]:
    return [(plain_batch(10), torch.randint(0, 3, (10,), generator=torch.Generator().manual_seed(3)))]


def _fit(name: str) -> tuple[nn.Module, Work]:
    model = net()
    return model, partial(lw.fit, model, _data(), "classification", method=small_method(name, model), prior=1e3)


def _prediction(name: str) -> tuple[nn.Module, Work]:
    model, fit = _fit(name)
    return model, partial(_predict, fit(), plain_batch(3))


def _special_prediction(name: str) -> tuple[nn.Module, Work]:
    posterior = special(name)
    return posterior.network.model, partial(_predict, posterior, BY_NAME[name.split()[0]].batch(3))


def _default_fit(name: str) -> tuple[nn.Module, Work]:
    case = BY_NAME[name]
    model = case.build().eval()
    return model, partial(lw.fit, model, problems.batches(case), problems.likelihood(case))


def _check(name: str) -> tuple[nn.Module, Work]:
    model = BY_NAME[name].build().eval()
    return model, partial(lw.check, model, BY_NAME[name].batch(4))


def _file_or_training(kind: str, path: Path) -> tuple[nn.Module, Work]:
    model = net()
    if kind == "train":
        return model, partial(lw.train, model, _data(), "classification", recipe=lw.recipes.online(epochs=2))
    posterior = lw.fit(model, _data(), "classification", prior=1.0)
    posterior.save(path)
    return model, partial(posterior.save, path) if kind == "save" else partial(lw.load, path, model)


def _predict(posterior: lw.Fitted, inputs: Any) -> None:
    _ = posterior.predict(inputs).entropy
    _ = posterior.functions(inputs).cov


def interrupted(work: Work, model: nn.Module, delay: float) -> tuple[bool, list[str]]:
    """Send SIGINT after a delay; return whether the call was interrupted, and what it changed."""
    before, outside = problems.state(model), settings()
    timer = threading.Timer(delay, os.kill, (os.getpid(), signal.SIGINT))
    faults: list[str] = []
    inside = hit = False
    try:
        timer.start()
        inside = True
        work()
        inside = False
        timer.join()
        time.sleep(0.01)  # the signal comes before or here
    except KeyboardInterrupt:
        hit = inside
    else:
        faults.append("the signal was lost")
    try:
        problems.assert_unchanged(before, model)
    except AssertionError as error:
        faults.append(f"{error!s:.160}")
    faults += [f"{key} changed" for key, value in settings().items() if value != outside[key]]
    return hit, faults


def duration(work: Work) -> float:
    """Return the time of a call, the shorter of two."""
    times = []
    for _ in range(2):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return min(times)


def attack(count: int, seed: int, names: list[str] | None = None, seconds: float = 1e9) -> tuple[int, int, list[str]]:
    """Return how many signals were sent, how many arrived inside a call, and all faults."""
    numbers, faults, sent, inside = random.Random(seed), list[str](), 0, 0
    until = time.monotonic() + seconds
    with tempfile.TemporaryDirectory() as folder:
        chosen = {
            name: make() for name, make in works(folder).items() if names is None or any(n in name for n in names)
        }
        lengths = {name: duration(work) for name, (_, work) in chosen.items()}
        for number, name in enumerate(numbers.choice(list(chosen)) for _ in range(count)):
            if time.monotonic() > until and number >= LEAST:
                break
            model, work = chosen[name]
            hit, changed = interrupted(work, model, numbers.uniform(0.0, lengths[name]))
            sent, inside = sent + 1, inside + hit
            faults += [f"{name}: {fault}" for fault in changed]
    return sent, inside, faults


def main(argv: list[str]) -> int:
    """Run the attack; return 1 if an interrupt changed anything."""
    parser = argparse.ArgumentParser(prog="python -m tests.attack interrupts", description=__doc__)
    parser.add_argument("--count", type=int, default=500, help="number of signals")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=1e9, help="stop after this time")
    parser.add_argument("--only", nargs="*", help="some of the calls, by parts of their names")
    options = parser.parse_args(argv)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have started this in the background
    sent, inside, faults = attack(options.count, options.seed, options.only, options.seconds)
    for fault in faults[:20]:
        print("    ", fault)
    print(f"{sent} signals, {inside} inside a call, {len(faults)} faults")
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
