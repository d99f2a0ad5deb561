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
from lapwing.runtime.settings import State
from tests.attack.mutations import damaged

D = torch.float64
SECONDS = 30  # longer than this is a hang


@dataclass(frozen=True)
class Specimen:
    """One way to fit: a model, data and the arguments of ``fit``."""

    likelihood: Any
    targets: str
    options: dict[str, Any]
    dropout: bool = False

    @cached_property
    def model(self) -> nn.Module:
        torch.manual_seed(1)
        outputs = 3 if self.targets == "classes" else 2
        middle = nn.Dropout(0.3) if self.dropout else nn.Tanh()
        return nn.Sequential(nn.Linear(3, 4), middle, nn.LayerNorm(4), nn.Linear(4, outputs)).to(D).eval()

    @cached_property
    def x(self) -> Tensor:
        return torch.randn(12, 3, dtype=D, generator=torch.Generator().manual_seed(2))

    @cached_property
    def y(self) -> Tensor:
        generator = torch.Generator().manual_seed(3)
        kinds = {
            "numbers": lambda: torch.randn(12, 2, dtype=D, generator=generator),
            "number": lambda: torch.randn(12, dtype=D, generator=generator),
            "classes": lambda: torch.randint(0, 3, (12,), generator=generator),
            "labels": lambda: torch.randint(0, 2, (12, 2), generator=generator),
        }
        return kinds[self.targets]()

    @cached_property
    def posterior(self) -> Any:
        options = {"prior": 2.0, **self.options}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return lw.fit(self.model, [(self.x, self.y)], self.likelihood, progress=False, **options)

    @cached_property
    def content(self) -> bytes:
        with tempfile.TemporaryDirectory() as folder:
            self.posterior.save(f"{folder}/net")
            return Path(f"{folder}/net").read_bytes()


def _classes(**options: Any) -> Specimen:
    return Specimen(lw.Categorical(), "classes", options)


def _numbers(likelihood: Any = "regression", **options: Any) -> Specimen:
    return Specimen(likelihood, "numbers", options)


SPECIMENS: dict[str, Specimen] = {
    "full": _classes(method=lw.Full()),
    "hessian": _classes(method=lw.Full(curvature="hessian"), prior=100.0),
    "diagonal": _classes(method=lw.Diagonal()),
    "kron": _classes(method=lw.Kron()),
    "kron with full blocks": _numbers(method=lw.Kron(full_limit=9)),
    "ekron": _classes(method=lw.EKron()),
    "low rank": _numbers(method=lw.LowRank(rank=5)),
    "ella": _classes(method=lw.ELLA(num_landmarks=6, rank=4)),
    "ella residual": _numbers(method=lw.ELLA(num_landmarks=6, rank=4, residual=True)),
    "valla": _numbers(method=lw.VaLLA(num_inducing=4, steps=2)),
    "fmgp rbf": _numbers(method=lw.FMGP(4, steps=3)),
    "fmgp features": _classes(method=lw.FMGP(4, steps=3, kernel="features")),
    "sampled": _numbers(method=lw.Sampled(4)),
    "kernel space": _classes(method=lw.KernelSpace()),
    "hfl": _numbers(method=lw.HFL(mode="pretrained", drift=1e9), prior=1000.0),
    "ivon": _classes(method=lw.baselines.IVON(2, 1e-3, batch_size=4, samples=3)),
    "variational_last_layer": _classes(method=lw.baselines.VariationalLastLayer(samples=2)),
    "swag": _classes(method=lw.baselines.SWAG(3, 3, learning_rate=1e-3, batch_size=4, samples=3)),
    "dropout": Specimen("regression", "numbers", {"method": lw.baselines.MCDropout(samples=3)}, dropout=True),
    "map only": _classes(method=lw.baselines.MapOnly()),
    "mixture": _numbers(prior=None),
    "mixture of classes": _classes(prior=None),
    "mode": _numbers(prior=None, tuner=lw.tuners.LinearMode(mean="tangent")),
    "each noise": _numbers(lw.Gaussian(per_output=True), method=lw.Kron()),
    "each noise, full": _numbers(lw.Gaussian(per_output=True), method=lw.Full(), prior=None),
    "given noise": _numbers(lw.Gaussian(noise_std=(0.3, 0.4)), method=lw.Full()),
    "student": _numbers(lw.Gaussian(noise_std=0.5, degrees=6, tail_scale=0.8), method=lw.Diagonal()),
    "bernoulli": Specimen(lw.Bernoulli(pos_weight=(1.0, 2.0), ignore_index=-1), "labels", {"method": lw.Kron()}),
    "poisson": Specimen(lw.Poisson(), "labels", {"method": lw.Diagonal()}),
    "heteroscedastic": Specimen("heteroscedastic", "number", {"method": lw.Kron()}),
    "weighted classes": Specimen(
        lw.Categorical(class_weights=(1.0, 2.0, 3.0), link="mc", samples=16), "classes", {"method": lw.Kron()}
    ),
    "per layer": _classes(method=lw.Full(), prior=lw.per_layer(torch.tensor([1.0, 2.0, 3.0]))),
    "grouped": _classes(method=lw.Diagonal(), prior=lw.grouped({".*weight": 1.0, ".*bias": 2.0}, 0.5)),
    "each weight": _classes(method=lw.Diagonal(), prior=lw.priors.diagonal(3.0)),
    "g-prior": _classes(method=lw.Full(), prior=lw.priors.g_prior(0.5)),
    "normalised groups": _classes(method=lw.Full(), prior=lw.priors.per_normalised_group()),
    "prior mean": _classes(method=lw.Full(), prior=lw.isotropic(2.0, torch.linspace(-1, 1, 39))),
    "last layer": _classes(method=lw.Full(), weights="last_layer"),
    "subnetwork": _classes(method=lw.Diagonal(), weights=lw.subnetwork(torch.tensor([1, 5, 30]))),
}


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


def possible(again: Any, specimen: Specimen) -> str:
    """Return what is impossible about a loaded posterior, or an empty text."""
    if not bool((again.prior.vector > 0).all() & again.prior.vector.isfinite().all()):
        return "a prior precision is not positive and finite"
    if not 0 < float(again.likelihood.dispersion) < torch.inf:
        return "the noise is not positive and finite"
    shapes = {name: tensor.shape for name, tensor in leaves(specimen.posterior.posterior.state())}
    for name, tensor in leaves(again.posterior.state()):
        if not bool(tensor.isfinite().all()):
            return f"{name} is not finite"
        if shapes.get(name, tensor.shape) != tensor.shape:
            return f"{name} has the shape {tuple(tensor.shape)}, not {tuple(shapes[name])}"
    belief = again.functions(specimen.x)
    variance = belief.variance
    if not bool(
        belief.mean.isfinite().all() & variance.isfinite().all() & (variance >= -1e-6 * variance.abs().max()).all()
    ):
        return f"the variance runs from {float(variance.min()):g} to {float(variance.max()):g}"
    again.predict(specimen.x)
    return ""


def attacked(count: int, seed: int, folder: Path) -> tuple[Counter[str], list[str]]:
    """Damage files at random; return how many were refused, accepted or wrong, and the wrong ones in words."""
    rng, totals, wrong = random.Random(seed), Counter[str](), []
    names = sorted(SPECIMENS)
    for number in range(count):
        name = names[number % len(names)]
        specimen = SPECIMENS[name]
        what, content, right = damaged(specimen.content, rng)
        path = folder / "damaged"
        path.write_bytes(content)
        verdict, detail = judged(
            lambda path=path, specimen=specimen: lw.load(path, specimen.model),
            lambda again, specimen=specimen: possible(again, specimen),
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
