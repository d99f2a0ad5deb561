"""A language model with error bars: the next word, and how sure it is of the probability of a whole sequence."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import lapwing as lw
from experiments.language_data import IGNORED, Batch, Sentence, inputs_of
from experiments.language_models import now, passes
from experiments.language_sequences import Scores, detection, shuffled, with_unusual_words, written
from experiments.language_task import Language, language_model, parts_of, token_batches
from experiments.options import Progress, silent
from experiments.pinned import as_fitted
from lapwing.demo.result import Result, Row, plain
from lapwing.methods.base import Method

TOGETHER = 8  # sentences of a batch for predictions: K functions have K x B x T x V numbers there
WRITTEN = {"written, most probable words": 0.0, "written, temperature 1": 1.0}
SHOWN = 3  # of the written sentences, in the notes
Logits = Callable[[Batch], Tensor]  # a batch -> logits of K functions, (K, B, T, V)
LogProbs = Callable[[Batch], Tensor]  # a batch -> log-probabilities of its targets, (B, T)


@dataclass(frozen=True)
class Fit:
    """A method, for all weights or for those of the last layer."""

    method: Callable[[], Method]
    weights: str = "all"


FITS = {"last layer, Kron": Fit(lw.Kron, "last_layer"), "Diagonal": Fit(lw.Diagonal), "Kron": Fit(lw.Kron)}
SEQUENCES = "Kron"  # the method whose functions score sequences


@dataclass(frozen=True, eq=False)
class Tokens:
    """The language model and its data."""

    settings: Language
    model: nn.Module
    train: list[Batch]
    validation: list[Batch]
    test: list[Batch]

    @classmethod
    def of(cls, settings: Language) -> Tokens:
        """Train the model and split the data."""
        parts = parts_of(settings)
        return cls(
            settings, language_model(settings),
            token_batches(settings, parts.sentences, settings.modelling.batch_size),
            token_batches(settings, parts.validation.sentences[: settings.validation_tokens], TOGETHER),
            token_batches(settings, parts.test.sentences[: settings.test_tokens], TOGETHER),
        )  # fmt: skip


def run(settings: Language, progress: Progress = silent) -> Result:
    """Score the next word, then sequences: as they are, with unusual or shuffled words, and written by the model."""
    start = time.perf_counter()
    task = Tokens.of(settings)
    seconds = {"training": time.perf_counter() - start, **passes(task.model, task.train, task.test, settings.device)}
    progress(f"language model: trained after {seconds['training']:.0f} s")
    rows, posteriors = _next_words(task, progress)
    more, notes = _sequences(task, posteriors[SEQUENCES])
    seconds["total"] = time.perf_counter() - start
    progress(f"sequences: done after {seconds['total']:.0f} s")
    return Result("language_tokens", plain(settings), settings.seed, (*rows, *more), seconds, {}, tuple(notes))


@dataclass(frozen=True, eq=False)
class WordScores:
    """The log-probability of each sentence, summed over its words, and the number of its words; both (N,)."""

    sums: Tensor
    words: Tensor

    @classmethod
    def of(cls, log_probs: LogProbs, data: Sequence[Batch]) -> WordScores:
        """Return the scores, from the log-probability of every target; ignored ones do not count."""
        sums, words = [], []
        for batch in data:
            known = batch["labels"] != IGNORED
            sums.append((log_probs(batch) * known).sum(-1).double().cpu())
            words.append(known.sum(-1).double().cpu())
        return cls(torch.cat(sums), torch.cat(words))

    @property
    def nll(self) -> float:
        """The mean negative log-probability of a word."""
        return float(-self.sums.sum() / self.words.sum()) + 0.0  # no negative zero

    @property
    def error(self) -> float:
        """Its standard error; the words of a sentence belong together."""
        residuals = self.sums + self.nll * self.words
        return float(residuals.square().sum().sqrt() / self.words.sum())

    def scores(self, base: WordScores) -> dict[str, float]:
        """Return the scores, and the difference to another posterior, with standard errors."""
        gap = WordScores(self.sums - base.sums, self.words)
        return {
            "NLL / word": self.nll, "NLL ±": self.error, "perplexity": math.exp(self.nll), "to temperature": gap.nll,
            "to t. ±": gap.error,
        }  # fmt: skip


def _next_words(task: Tokens, progress: Progress) -> tuple[list[Row], dict[str, lw.Fitted]]:
    """Return the rows of the next word, and the posterior of each method with validation data."""
    group, device = "next word", task.settings.device
    start = now(device)
    network = lw.fit(task.model, task.train, lw.Categorical(), method=lw.baselines.MapOnly(), progress=False)
    seconds = now(device) - start
    scaled = network.tuned(lw.tuners.Integrate(task.validation))
    whole = now(device) - start
    base = WordScores.of(predicted(scaled), task.test)
    rows = [
        Row("plain", _scored(task, network, base, seconds), group),
        Row("temperature", _scored(task, scaled, base, whole), group),
    ]
    posteriors = {}
    for name, fit in FITS.items():
        start = now(device)
        posteriors[name] = lw.fit(
            task.model, task.train, lw.Categorical(), method=fit.method(), weights=fit.weights,
            validation=task.validation, generator=torch.Generator().manual_seed(task.settings.seed), progress=False,
        )  # fmt: skip
        seconds = now(device) - start
        rows.append(Row(f"{name}, evidence", _scored(task, posteriors[name].tuned(as_fitted), base), group))
        rows.append(Row(f"{name}, validation", _scored(task, posteriors[name], base, seconds), group))
        progress(f"{name}: done after {now(device) - start:.0f} s")
    return rows, posteriors


def predicted(posterior: lw.Fitted) -> LogProbs:
    """Return the log-probability of every target by the predictive of the posterior."""
    return lambda batch: posterior.predict(inputs_of(batch)).log_prob(batch["labels"].clamp_min(0))


def drawn(posterior: lw.Fitted, samples: int) -> Logits:
    """Return the logits of some functions from the posterior, the same ones for every batch."""
    return lambda batch: posterior.function_samples(inputs_of(batch), samples, torch.Generator().manual_seed(0))


def _scored(task: Tokens, posterior: lw.Fitted, base: WordScores, fit_seconds: float | None = None) -> dict[str, float]:
    start = now(task.settings.device)
    scores = WordScores.of(predicted(posterior), task.test)
    seconds = {"predict s": now(task.settings.device) - start}
    if fit_seconds is not None:
        seconds = {"fit s": fit_seconds, **seconds}
    return {**scores.scores(base), **seconds}


def _sequences(task: Tokens, posterior: lw.Fitted) -> tuple[list[Row], list[str]]:
    """Return the rows of sequences, and some written sentences."""
    settings, words = task.settings, parts_of(task.settings).words
    sentences = parts_of(settings).test.sentences[: settings.test_tokens]
    score = lambda each: Scores.of(
        task.model, drawn(posterior, settings.samples), token_batches(settings, tuple(each), TOGETHER)
    )
    changed: dict[str, Sequence[Sentence]] = {
        "unusual words": with_unusual_words(sentences, words, settings.seed),
        "shuffled words": shuffled(sentences, settings.seed),
    }
    inside = score(sentences)
    rows = [Row("test sentences", inside.means(), "sequences")]
    for name, each in changed.items():
        outside = score(each)
        rows.append(Row(name, {**outside.means(), **detection(inside, outside)}, "sequences"))
    notes = []
    for name, temperature in WRITTEN.items():
        numbers = written(task.model, settings.written, settings.longest, temperature, settings.seed)
        texts = [tuple(words.text(row).split()) for row in numbers if row]
        scores = score(texts)
        rows.append(Row(name, scores.means(), "sequences"))
        notes += [f"{name}: {' '.join(text)}" for text in texts[:SHOWN]]
    return rows, notes
