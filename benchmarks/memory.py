"""The byte budget against what calls take, for every method: python -m benchmarks.memory [--out FILE] [--networks NAME]

For every registered method, with the quick settings that it declares for tests, and every network: the most bytes of
tensors on the CPU that a fit with a given prior, the probabilities of a prediction and function samples hold at once,
without a limit and under a byte budget. "answer" is what the call leaves behind: the posterior, a predictive or draws,
and what the posterior keeps for the next call. "excess" is what the peak under the budget has beyond budget and answer;
"held" is what the rules in ``HELD`` allow the method there. Methods that work on all outputs at once or take many steps
get few rows. ``tests/conformance/test_long.py`` holds every line to "excess at most held".
"""

from __future__ import annotations

import argparse
import platform
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import lapwing as lw
from benchmarks.peak import Held, held
from benchmarks.spine import cpu_name
from lapwing.errors import UnsupportedError
from lapwing.linalg.krylov import OVERSAMPLE
from lapwing.methods.base import Conformance
from lapwing.methods.sampled import VECTORS
from lapwing.methods.variational_last_layer import HISTORY
from lapwing.posteriors.base import Posterior
from lapwing.registry import METHODS

BUDGET = 512 * 2**10
PRIOR, DRAWS = 1e3, 2
FEW_FITTED = ("full", "kernel_space", "valla", "swag", "hfl")  # methods that get few data
FEW_ASKED = ("full", "kernel_space", "fmgp", "hfl")  # methods that are asked about few inputs
TIMES = {  # times the budget, for methods whose pieces are few and slow, and for those that only run the network
    "hfl": 4.0, "map_only": 0.5, "ensemble": 0.5, "dropout": 0.5, "swag": 0.5,
}  # fmt: skip
LEFT_OUT = {  # networks that a method is not measured with, and why
    "full": (("wide MLP",), "a matrix of 2,004 weights squared"),
    "hfl": (("wide MLP", "convolutions", "tokens"), "trainings with one row at a time"),
    "hfl pretrained": (("wide MLP", "convolutions", "tokens"), "trainings with one row at a time"),
}


class Tokens(nn.Module):
    """Outputs for every token of a sequence."""

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.table, self.drop = nn.Embedding(vocabulary, width), nn.Dropout(0.1)
        self.hidden, self.head = nn.Linear(width, 2 * width), nn.Linear(2 * width, vocabulary)

    def forward(self, x: Tensor) -> Tensor:
        h = self.table(x)
        h = h + h.mean(1, keepdim=True)
        out: Tensor = self.head(self.drop(self.hidden(h).tanh()))
        return out


@dataclass(frozen=True, eq=False)
class Case:
    """A network with data for it."""

    model: nn.Module
    x: Tensor
    y: Tensor
    few: int  # rows for slow methods

    @property
    def weights(self) -> int:
        return sum(p.numel() for p in self.model.parameters())

    @property
    def outputs(self) -> int:
        """The outputs of one input, those of all its tokens together."""
        with torch.no_grad():
            return int(self.model(self.x[:1]).numel())

    def rows(self, name: str) -> tuple[int, int]:
        """Return how many data a method is fitted to, and how many inputs it is asked about."""
        method = name.split()[0]
        fitted = self.few if method in FEW_FITTED else len(self.x)
        asked = self.few if method in FEW_ASKED else len(self.x)
        return (fitted, 1) if method == "hfl" else (fitted, asked)


def convolutional() -> nn.Module:
    """Return two convolutions and a linear layer, for images of 6 x 6 pixels and four classes."""
    first, second = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 6, 3, stride=2)
    return nn.Sequential(first, nn.Tanh(), second, nn.Tanh(), nn.Dropout(0.1), nn.Flatten(), nn.Linear(24, 4))


def mlp(inputs: int, width: int, outputs: int) -> nn.Module:
    """Return an MLP with one hidden layer."""
    return nn.Sequential(nn.Linear(inputs, width), nn.Tanh(), nn.Dropout(0.1), nn.Linear(width, outputs))


def case(name: str) -> Case:
    """Return one of ``NETWORKS``, with data; seeds are fixed."""
    torch.manual_seed(0)
    model, shape, classes, count, few, tokens = NETWORKS[name]
    net = model().eval()
    if tokens:
        return Case(net, torch.randint(0, classes, (count, *shape)), torch.randint(0, classes, (count, *shape)), few)
    return Case(net, torch.randn(count, *shape), torch.randint(0, classes, (count,)), few)


# model, shape of an input, classes, rows, rows for slow methods, whether outputs are for each token
NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int, int, int, bool]] = {
    "narrow MLP": (partial(mlp, 4, 16, 6), (4,), 6, 800, 16, False),
    "wide MLP": (partial(mlp, 5, 200, 4), (5,), 4, 128, 12, False),
    "convolutions": (convolutional, (1, 6, 6), 4, 128, 12, False),
    "tokens": (lambda: Tokens(9, 6), (6,), 9, 16, 3, True),
}


@dataclass(frozen=True)
class Sizes:
    """What the rules for methods depend on."""

    weights: int  # P
    outputs: int  # C, those of all tokens together
    fitted: int  # data of the fit
    asked: int  # inputs of the prediction; zero for a fit
    factors: int  # Σ d² over the sides of all layers
    widest: int  # features that the last layer reads, or inputs


# Bytes that a method may hold besides the byte budget and the answer; docs/scale.md says why. Others hold nothing.
HELD: dict[str, Callable[[Any, Sizes], int]] = {
    "full": lambda method, s: 8 * s.weights**2,
    "kron": lambda method, s: 8 * s.factors,
    "ekron": lambda method, s: 16 * s.factors,
    "mixture_of_laplace": lambda method, s: 8 * s.factors,  # its method is Kron
    "low_rank": lambda method, s: 8 * s.weights * (max(2 * method.rank, method.rank + OVERSAMPLE) + 7 * method.block),
    "kernel_space": lambda method, s: 24 * (s.fitted * s.outputs) ** 2,
    "sampled": lambda method, s: 8 * VECTORS * method.num_samples * s.weights,
    "valla": lambda method, s: 0 if s.asked else 16 * min(method.candidates, s.fitted * s.outputs) ** 2,
    "fmgp": lambda method, s: 32 * (s.asked * s.outputs) ** 2 or 16 * s.fitted * (s.widest + s.outputs),
    "variational_last_layer": lambda method, s: (
        16 * s.fitted * (s.widest + method.samples * s.outputs) + 32 * HISTORY * s.widest * s.outputs
    ),
    "hfl": lambda method, s: 32 * s.weights**2,
    "hfl pretrained": lambda method, s: 32 * s.weights**2,
}  # fmt: skip
VECTORS_OF_WEIGHTS = 4  # in float64, that any call may hold: the prior, the weights, a gradient


def allowed(name: str, method: Any, here: Case, what: str) -> int:
    """Return the bytes that a call of this method may hold besides the byte budget and its answer."""
    fitted, asked = here.rows(name)
    asked = 0 if what == "fit" else asked
    sides = [(p.shape[0], p[0].numel() + 1) for p in here.model.parameters() if p.ndim > 1]
    factors = sum(out**2 + into**2 for out, into in sides)
    sizes = Sizes(here.weights, here.outputs, fitted, asked, factors, max(sides[-1][1], here.x[0].numel()))
    more = HELD[name](method, sizes) if name in HELD else 0
    return more + VECTORS_OF_WEIGHTS * 8 * here.weights


def methods(model: nn.Module) -> dict[str, Any]:
    """Return every registered method with quick settings for this model, by name."""
    found: dict[str, Any] = {}
    for name in METHODS:
        small = getattr(METHODS[name], "conformance", Conformance()).small
        variants = {"": METHODS[name]()} if small is None else small(model)
        found |= {f"{name} {variant}".strip(): method for variant, method in variants.items()}
    return found


def calls(name: str, method: Any, here: Case) -> Iterator[tuple[str, Callable[[], Any], Callable[[Any], None]]]:
    """Yield the calls of a method in order, by name; a call that needs the posterior comes after it was given."""
    fitted, asked = here.rows(name)
    data, x = [(here.x[:fitted], here.y[:fitted])], here.x[:asked]
    posterior: list[Any] = []
    fit = partial(lw.fit, here.model, data, "classification", method=method, prior=PRIOR)
    yield "fit", fit, posterior.append
    yield "predict", lambda: probabilities(posterior[0], x), lambda _: None
    if posterior[0].base.provides(Posterior.function_samples):
        draw = lambda: posterior[0].function_samples(x, DRAWS, torch.Generator().manual_seed(1))
        yield "samples", draw, lambda _: None


def probabilities(posterior: Any, x: Tensor) -> tuple[Any, Tensor]:
    predictive = posterior.predict(x)
    return predictive, predictive.probs


def measured(name: str, here: Case, budget: int) -> Iterator[tuple[str, Held]]:
    """Yield the name of every call of a method and the memory that it holds, under a byte budget.

    Raises:
        UnsupportedError: If the method does not take the network.
    """
    with lw.memory.limited(budget):
        for what, call, take in calls(name, methods(here.model)[name], here):
            memory = held(call)
            take(memory.result)
            yield what, memory


def left_out(name: str, network: str) -> str:
    """Return why a method is not measured with a network; empty if it is."""
    networks, reason = LEFT_OUT.get(name, ((), ""))
    return reason if network in networks else ""


def budget_of(name: str) -> int:
    """Return the byte budget for a method."""
    return int(BUDGET * TIMES.get(name.split()[0], 1))


def lines(network: str) -> Iterator[str]:
    """Yield the lines of the table for a network."""
    here = case(network)
    yield f"\n{network}: {here.weights} weights, {here.outputs} outputs for an input, {len(here.x)} rows"
    heads = ("rows", "budget", "unlimited", "limited", "answer", "excess", "held")
    yield f"{'':<15}{'call':<9}" + "".join(f"{head:>10}" for head in heads)
    for name, method in methods(here.model).items():
        if left_out(name, network):
            yield f"{name:<15}not measured: {left_out(name, network)}"
            continue
        budget = budget_of(name)
        try:
            free, limited = dict(measured(name, here, 2**32)), dict(measured(name, here, budget))
        except UnsupportedError as error:
            yield f"{name:<15}not measured: {str(error).split(';', maxsplit=1)[0]}"
            continue
        for what, memory in limited.items():
            rows = here.rows(name)[what != "fit"]
            excess = max(0, memory.taken - budget)
            figures = (budget, free[what].most, memory.most, memory.kept, excess, allowed(name, method, here, what))
            sizes = "".join(f"{-(-size // 2**10):>10}" for size in figures)
            yield f"{name if what == 'fit' else '':<15}{what:<9}{rows:>10}{sizes}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--networks", nargs="+", choices=[*NETWORKS], default=[*NETWORKS])
    parser.add_argument("--out", type=Path, help="file to write the table to as well")
    given = parser.parse_args()
    torch.set_num_threads(1)
    text = [f"{cpu_name()}, one thread, torch {torch.__version__}, python {platform.python_version()}"]
    text.append("KiB of tensors; excess: limited - answer - budget, held: what it may be")
    print("\n".join(text))
    for network in given.networks:
        for line in lines(network):
            print(line, flush=True)
            text.append(line)
    if given.out is not None:
        given.out.write_text("\n".join(text) + "\n")


if __name__ == "__main__":
    main()
