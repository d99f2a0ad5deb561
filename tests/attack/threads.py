"""Eight threads at once: predictions of one posterior, and fits, trainings and predictions of different models.

Every result must be the serial one within rounding, without an error, a hang or a change of a model or of PyTorch's
settings.
"""

from __future__ import annotations

import argparse
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import lapwing as lw
from tests import problems
from tests.attack.surroundings import settings
from tests.cases import BY_NAME
from tests.conformance.declared import SMALL, net, small_method
from tests.tolerances import SOLVED, assert_close

THREADS = 8
HANGS = 300.0  # seconds after which threads that still run count as hanging
Task = Callable[[], list[Tensor]]


@dataclass(frozen=True)
class Tally:
    """How many calls were made, and descriptions of those that went wrong."""

    calls: int
    faults: tuple[str, ...]

    def __add__(self, other: Tally) -> Tally:
        return Tally(self.calls + other.calls, (*self.faults, *other.faults))


def plain_batch(count: int) -> Tensor:
    return torch.randn(count, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(count))


def posterior_of(name: str, model: nn.Module) -> lw.Fitted:
    """Return a quick fit of a method; a strong prior, so that the weights are near a minimum."""
    y = torch.randint(0, 3, (10,), generator=torch.Generator().manual_seed(3))
    method = small_method(name, model)
    return lw.fit(model, [(plain_batch(10), y)], "classification", method=method, prior=1e3)


def special(name: str) -> lw.Fitted:
    """Return a fit of a network that is run in another way: vendors' kernels off, weights exchanged, global numbers."""
    network, method = name.split()
    case = BY_NAME[network]
    model = case.build().eval()
    chosen = {"kron": lw.Kron(), "swag": lw.baselines.SWAG(2, 2, learning_rate=1e-3, batch_size=2, samples=2),
              "mc_dropout": lw.baselines.MCDropout(samples=3)}[method]  # fmt: skip
    if method == "mc_dropout":
        for module in model.modules():
            if isinstance(module, nn.MultiheadAttention | nn.LSTM):
                module.dropout = 0.3
    return problems.fit(case, chosen, model=model, prior=1e3)


SPECIAL = ("free_parameter kron", "weight_norm kron", "lstm kron", "lstm swag", "transformer_layer kron",
           "transformer_layer mc_dropout", "conv_zoo kron")  # fmt: skip


def asked(posterior: lw.Fitted, inputs: Any) -> list[Tensor]:
    """Return the numbers of one prediction."""
    belief, predictive = posterior.functions(inputs), posterior.predict(inputs)
    return [belief.mean, belief.cov, predictive.probs]


def prediction_tasks(name: str) -> tuple[nn.Module, list[Task]]:
    """Return the model of a posterior, and predictions of different inputs."""
    if name in SPECIAL:
        case, posterior = BY_NAME[name.split()[0]], special(name)
        inputs = [case.batch(count) for count in (2, 3)]
    else:
        posterior, inputs = posterior_of(name, net()), [plain_batch(count) for count in (1, 2, 3)]
    return posterior.network.model, [partial(asked, posterior, x) for x in inputs]


def fit_task(name: str, seed: int) -> Task:
    """Return a fit and a prediction of one method."""
    model = net()
    return lambda: asked(posterior_of(name, model), plain_batch(3 + seed % 3))


def train_task(seed: int) -> Task:
    """Return a training with dropout and a shuffled loader, which draw from PyTorch's global generator."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Dropout(0.3), nn.Linear(6, 1)).double()
    x = torch.randn(24, 2, dtype=torch.float64)
    rows = torch.utils.data.TensorDataset(x, x.sin().sum(1, keepdim=True))
    loader = torch.utils.data.DataLoader(rows, batch_size=8, shuffle=True)
    recipe = lw.recipes.online(epochs=2, seed=seed, update=lw.tuners.Ascend(steps=10))

    def run() -> list[Tensor]:
        trained = lw.train(model, loader, "regression", recipe=recipe)
        return [p.detach() for p in trained.model.parameters()] + [trained.posterior.predict(x[:3]).std]

    return run


def at_once(tasks: list[Task], calls: int, model: nn.Module | None = None) -> Tally:
    """Run the tasks in turn in each of eight threads, and compare with the serial results."""
    expected = [task() for task in tasks]
    before, outside = None if model is None else problems.state(model), settings()
    faults: list[str] = []
    start = threading.Barrier(THREADS)

    def work(offset: int) -> None:
        start.wait()
        for call in range(calls):
            number = (call + offset) % len(tasks)
            try:
                for one, other in zip(tasks[number](), expected[number], strict=True):
                    assert_close(one, other, SOLVED)
            except Exception as error:
                faults.append(f"{type(error).__name__}: {error!s:.160}")

    threads = [threading.Thread(target=work, args=(offset,), daemon=True) for offset in range(THREADS)]
    for thread in threads:
        thread.start()
    until = time.monotonic() + HANGS
    for thread in threads:
        thread.join(max(0.1, until - time.monotonic()))
    faults += ["a thread hangs" for thread in threads if thread.is_alive()]
    faults += [f"{key} changed" for key, value in settings().items() if value != outside[key]]
    if model is not None and before is not None:
        try:
            problems.assert_unchanged(before, model)
        except AssertionError as error:
            faults.append(str(error))
    return Tally(THREADS * calls, tuple(faults))


def predictions(name: str, calls: int) -> Tally:
    """Predict with one posterior from all threads, ``calls`` times in each."""
    model, tasks = prediction_tasks(name)
    return at_once(tasks, calls, model)


def different(calls: int) -> Tally:
    """Fit, train and predict with different models at once."""
    names = [name for name in SMALL if not name.startswith(("hfl", "fmgp", "valla"))]
    tasks = [fit_task(name, number) for number, name in enumerate(names)] + [train_task(seed) for seed in range(4)]
    return at_once(tasks, calls)


def main(argv: list[str]) -> int:
    """Run the attack on every method; return 1 if anything went wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.attack threads", description=__doc__)
    parser.add_argument("--count", type=int, default=100, help="calls of each thread and method; a tenth for hfl")
    parser.add_argument("--seed", type=int, default=0, help="rotates the order of the methods")
    parser.add_argument("--only", nargs="*", help="some of the methods")
    options = parser.parse_args(argv)
    names = [*SMALL, *SPECIAL, "different"]
    names = [*names[options.seed % len(names) :], *names[: options.seed % len(names)]]
    total = Tally(0, ())
    for name in options.only or names:
        began, share = time.monotonic(), max(1, options.count // (10 if name.startswith("hfl") else 1))
        tally = different(share) if name == "different" else predictions(name, share)
        total += tally
        seconds = time.monotonic() - began
        print(f"{name:32s} {tally.calls:7d} calls {len(tally.faults):5d} faults {seconds:7.1f} s", flush=True)
        for fault in sorted(set(tally.faults))[:4]:
            print("    ", fault)
    print(f"{total.calls} calls from {THREADS} threads, {len(total.faults)} faults")
    return int(bool(total.faults))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
