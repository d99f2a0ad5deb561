"""Sentences of SST-2: transformers trained here, every method that gives them error bars, against temperature scaling.

The first table is about classes of sentences, the second (``language_tokens``) about next words and whole sequences.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import lapwing as lw
from experiments import language_tokens
from experiments.data import data_folder
from experiments.language_data import Batch, inputs_of
from experiments.language_models import now, passes
from experiments.language_task import ADAPTERS, SCRATCH, Language, Task, from_scratch, with_adapters
from experiments.options import Progress, add_data_dir, chosen, positive, silent
from lapwing.demo.result import ExperimentReport, Result, Row, plain
from lapwing.methods.base import Method

NETWORKS = {"classes": SCRATCH, "adapters": ADAPTERS}  # by the names of parts
PARTS = (*NETWORKS, "words")
RESAMPLES = 200  # of the bootstrap for the error of the ECE
Make = Callable[[], Method]


@dataclass(frozen=True)
class Fit:
    """A method and the weights that it is about.

    ``padded`` methods draw rows from the data, so all inputs must have one length. ``slow`` ones run only on request.
    """

    method: Make
    weights: Any = None
    padded: bool = False
    slow: bool = False


FITS: dict[str, dict[str, Fit]] = {  # for each network, the methods in the order of the table
    SCRATCH: {
        "plain": Fit(lw.baselines.MapOnly),
        "last layer, Kron": Fit(lw.Kron, lw.last_layer),
        "last layer, Full": Fit(lw.Full, lw.last_layer),
        "Kron": Fit(lw.Kron),
        "EKron": Fit(lw.EKron),
        "Diagonal": Fit(lw.Diagonal),
        "MC dropout": Fit(lambda: lw.baselines.MCDropout(16)),
        "FMGP": Fit(lambda: lw.FMGP(100, kernel="features")),
        "LowRank": Fit(lambda: lw.LowRank(20), slow=True),
        "Sampled": Fit(lw.Sampled, slow=True),
        "ELLA": Fit(lambda: lw.ELLA(500, 20), padded=True, slow=True),
        "VaLLA": Fit(lambda: lw.VaLLA(50, optimiser="none"), padded=True, slow=True),
    },
    ADAPTERS: {
        "plain": Fit(lw.baselines.MapOnly),
        "last layer, Kron": Fit(lw.Kron, lw.last_layer),
        "Kron": Fit(lw.Kron, lw.named("lora")),
        "EKron": Fit(lw.EKron, lw.named("lora")),
        "Diagonal": Fit(lw.Diagonal, lw.named("lora")),
        "LowRank": Fit(lambda: lw.LowRank(20), lw.named("lora")),
        "Sampled": Fit(lw.Sampled, lw.named("lora")),
        "ELLA": Fit(lambda: lw.ELLA(500, 20), lw.named("lora"), padded=True),
        "VaLLA": Fit(lambda: lw.VaLLA(50, optimiser="none"), lw.named("lora"), padded=True),
        "MC dropout": Fit(lambda: lw.baselines.MCDropout(16)),
    },
}
METHODS = tuple(dict.fromkeys(name for fits in FITS.values() for name in fits))
TASKS: dict[str, Callable[[Language], Task]] = {SCRATCH: from_scratch, ADAPTERS: with_adapters}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this experiment."""
    add_data_dir(parser, "sst2.npz")
    parser.add_argument("--data", type=positive, help="training phrases of the classifier (10,000)")
    parser.add_argument("--sentences", type=positive, help="training sentences of the language model (6,000)")
    parser.add_argument("--test", type=positive, help="scored sentences of the classifiers; all by default")
    parser.add_argument("--parts", nargs="+", metavar="NAME", help=f"{', '.join(PARTS)}; all by default")
    parser.add_argument("--full", action="store_true", help="all training phrases and sentences, and 8,000 words")
    parser.add_argument("--methods", nargs="+", metavar="NAME", help="methods to compare; the fast ones by default")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")


def command(arguments: argparse.Namespace, progress: Progress) -> ExperimentReport:
    """Run the parts of the experiment with the options given."""
    default, parts = Language(data_folder(arguments.data_dir)), chosen(arguments.parts, PARTS, "--parts")
    settings = Language(
        data_dir=default.data_dir,
        words=8000 if arguments.full else default.words,
        data=arguments.data or (None if arguments.full else default.data),
        sentences=arguments.sentences or (None if arguments.full else default.sentences),
        test=arguments.test,
        networks=tuple(NETWORKS[part] for part in PARTS if part in parts and part in NETWORKS),
        methods=chosen(arguments.methods, METHODS, "--methods") if arguments.methods else (),
        device=arguments.device,
        seed=arguments.seed,
    )
    results = [run(settings, progress)] if settings.networks else []
    results += [language_tokens.run(settings, progress)] if "words" in parts else []
    return ExperimentReport(arguments.out / "language.json", tuple(results))


def run(settings: Language, progress: Progress = silent) -> Result:
    """Train both classifiers and score every method on them, without and with validation data."""
    start = time.perf_counter()
    rows: list[Row] = []
    seconds: dict[str, float] = {}
    for group in settings.networks:
        begin = now(settings.device)
        task = TASKS[group](settings)
        seconds[f"training, {group}"] = now(settings.device) - begin
        seconds |= {
            f"{name}, {group}": value
            for name, value in passes(task.model, task.train, task.test, settings.device).items()
        }
        progress(f"{group}: trained after {seconds[f'training, {group}']:.0f} s")
        scored: dict[str, Scored] = {}
        for name, fit in asked(FITS[group], settings.methods).items():
            scored |= _both_ways(name, fit, task, settings)
            progress(f"{group}, {name}: done after {time.perf_counter() - start:.0f} s")
        base = scored["temperature"]
        rows += [Row(name, each.scores(base), group) for name, each in scored.items()]
    seconds["total"] = time.perf_counter() - start
    return Result("language", plain(settings), settings.seed, tuple(rows), seconds)


def asked(fits: Mapping[str, Fit], methods: tuple[str, ...]) -> dict[str, Fit]:
    """Return the methods with these names and the plain network; without names all that are not slow."""
    wanted = lambda name, fit: name == "plain" or (name in methods if methods else not fit.slow)
    return {name: fit for name, fit in fits.items() if wanted(name, fit)}


@dataclass(frozen=True, eq=False)
class Scored:
    """Predictions of the test sentences by one posterior, and the seconds that both took."""

    log_probs: Tensor  # (N,), of the right class
    probs: Tensor  # (N, 2)
    labels: Tensor
    fit_seconds: float
    predict_seconds: float

    def scores(self, base: Scored) -> dict[str, float]:
        """Return the scores, and the difference of the NLL to another posterior; all with standard errors."""
        ece, ece_error = self._ece()
        right = (self.probs.argmax(1) == self.labels).double()
        return {
            "NLL": -float(self.log_probs.mean()),
            "NLL ±": _error(self.log_probs),
            "to temperature": float((base.log_probs - self.log_probs).mean()),
            "to t. ±": _error(base.log_probs - self.log_probs),
            "ECE": ece,
            "ECE ±": ece_error,
            "accuracy": float(right.mean()),
            "accuracy ±": _error(right),
            "fit s": self.fit_seconds,
            "predict s": self.predict_seconds,
        }

    def _ece(self) -> tuple[float, float]:
        """Return the calibration error, and its standard error from resampled test sentences."""
        generator, count = torch.Generator().manual_seed(0), len(self.labels)
        draws = (torch.randint(count, (count,), generator=generator) for _ in range(RESAMPLES))
        again = torch.tensor([lw.metrics.ece(self.probs[rows], self.labels[rows]) for rows in draws])
        return lw.metrics.ece(self.probs, self.labels), float(again.std())


def _error(values: Tensor) -> float:
    """Return the standard error of the mean."""
    return float(values.double().std() / math.sqrt(len(values)))


def _both_ways(name: str, fit: Fit, task: Task, settings: Language) -> Mapping[str, Scored]:
    """Return the scores as the method comes and with validation data, which need no second pass over the data."""
    start = now(settings.device)
    data, generator = task.padded if fit.padded else task.train, torch.Generator().manual_seed(settings.seed)
    posterior = lw.fit(
        task.model, data, "classification", method=fit.method(), weights=fit.weights, generator=generator,
        progress=False,
    )  # fmt: skip
    taken = now(settings.device) - start
    validated = posterior.tuned(lw.tuners.Integrate(task.validation))
    whole = now(settings.device) - start
    second = "temperature" if name == "plain" else f"{name}, validation"
    score = lambda fitted, seconds: scored(fitted, task.test, seconds, settings.device)
    return {name: score(posterior, taken), second: score(validated, whole)}


def scored(posterior: lw.Fitted, test: list[Batch], fit_seconds: float, device: str) -> Scored:
    """Return what the posterior predicts for the test sentences."""
    start = now(device)
    predictives = [posterior.predict(inputs_of(batch)) for batch in test]
    probs = torch.cat([predictive.probs.double().cpu() for predictive in predictives])
    pairs = zip(predictives, test, strict=True)
    log_probs = torch.cat([predictive.log_prob(batch["labels"]).double().cpu() for predictive, batch in pairs])
    taken = now(device) - start
    labels = torch.cat([batch["labels"].cpu() for batch in test])
    return Scored(log_probs.detach(), probs.detach(), labels, fit_seconds, taken)
