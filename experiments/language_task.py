"""Settings of the experiment on language, and the networks that it trains."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import ClassVar

import torch
from torch import nn

from experiments.engine.contract import Record
from experiments.engine.seeds import records_of
from experiments.language_data import Batch, Corpus, Labelled, Sentence, Vocabulary, class_batch, token_batch
from experiments.language_models import Body, Classifier, LanguageModel, Shape, Training, adapted, optimise, seeded
from experiments.options import Progress

SCRATCH, ADAPTERS = "trained from scratch", "LoRA adapters"  # the two classifiers
FEWEST = 8  # words of a training phrase from which on it counts as a sentence, if it ends in a full stop


@dataclass(frozen=True)
class Language:
    """Settings: SST-2, a vocabulary of the most frequent training words, small transformers.

    The classifier is trained on ``data`` random phrases. The language model is trained on ``sentences`` of the
    training phrases that end in a full stop; its body, frozen, is the one that adapters are trained for. The first half
    of the development sentences is for validation; the second half and the test sentences are scored.
    """

    name: ClassVar[str] = "language"
    title: ClassVar[str] = "sentences: transformers and adapters, next words and whole sequences, every method"
    choosing: ClassVar[tuple[str, ...]] = ("networks",)

    data_dir: Path
    words: int = 2000
    longest: int = 40  # words of a sentence that are read
    shape: Shape = Shape()
    data: int | None = 10_000  # training phrases of the classifier; None takes all
    sentences: int | None = 6_000  # training sentences of the language model
    test: int | None = None  # scored sentences of the classifier; None takes all
    validation_tokens: int = 40  # validation sentences of the language model
    test_tokens: int = 150  # its scored sentences
    written: int = 40  # sentences that it writes in each way
    training: Training = Training(12)
    adapting: Training = Training(12, learning_rate=3e-3)
    modelling: Training = Training(8, learning_rate=2e-3, batch_size=32)
    rank: int = 8  # of the adapters
    networks: tuple[str, ...] = (SCRATCH, ADAPTERS)
    methods: tuple[str, ...] = ()  # none stands for all that are not slow
    samples: int = 16  # functions drawn from the posterior of the language model
    batch_size: int = 64
    device: str = "cpu"
    seed: int = 0

    @classmethod
    def quick(cls) -> Language:
        """Return the settings of the quick form."""
        few = replace(cls.training, epochs=2)
        return cls(
            Path(), words=500, data=1000, sentences=500, test=200, validation_tokens=10, test_tokens=20, written=5,
            training=few, adapting=few, modelling=replace(cls.modelling, epochs=2),
        )  # fmt: skip

    @classmethod
    def full(cls) -> Language:
        """Return the settings of the full form."""
        return cls(Path())

    def units(self) -> tuple[str, ...]:
        """Return a unit for each classifier, and one for the language model."""
        return (*self.networks, "words")

    def measure(self, unit: str, progress: Progress) -> Iterator[Record]:
        """Train one network and fit every method to it."""
        from experiments import language, language_tokens  # which import this module

        if unit == "words":
            return records_of(language_tokens.run(self, progress), self.seed)
        return records_of(language.run(replace(self, networks=(unit,)), progress), self.seed)


@dataclass(frozen=True, eq=False)
class Task:
    """A trained classifier and its data in batches of sentences of similar length."""

    model: nn.Module
    train: list[Batch]
    validation: list[Batch]
    test: list[Batch]
    padded: list[Batch] = field(repr=False)  # the training data again, all padded to one length


@dataclass(frozen=True)
class Parts:
    """The data of one run."""

    words: Vocabulary
    train: Labelled
    sentences: tuple[Sentence, ...]  # for the language model
    validation: Labelled
    test: Labelled


@lru_cache(maxsize=1)
def parts_of(settings: Language) -> Parts:
    """Read and split the data; the vocabulary is that of all training phrases."""
    corpus = Corpus.read(settings.data_dir)
    order = torch.randperm(len(corpus.train), generator=torch.Generator().manual_seed(settings.seed)).tolist()
    whole = [s for s in corpus.train.chosen(order).sentences if len(s) >= FEWEST and s[-1] == "."]
    half = len(corpus.dev) // 2
    test = corpus.dev.chosen(range(half, len(corpus.dev))) + corpus.test
    return Parts(
        Vocabulary.of(corpus.train.sentences, settings.words),
        corpus.train.chosen(order[: settings.data]),
        tuple(whole[: settings.sentences]),
        corpus.dev.chosen(range(half)),
        test.chosen(range(len(test))[: settings.test]),
    )


def in_batches(lengths: list[int], size: int, seed: int) -> list[list[int]]:
    """Return the rows in batches of similar length, little of which is padding; the batches are in random order.

    >>> sorted(in_batches([9, 2, 8, 1], 2, 0))
    [[2, 0], [3, 1]]
    """
    rows = sorted(range(len(lengths)), key=lambda i: lengths[i])
    batches = [rows[i : i + size] for i in range(0, len(rows), size)]
    return [batches[i] for i in torch.randperm(len(batches), generator=torch.Generator().manual_seed(seed)).tolist()]


def class_batches(settings: Language, data: Labelled, fixed: bool = False) -> list[Batch]:
    """Return sentences with their classes; ``fixed`` pads all batches to one length."""
    rows = in_batches([len(sentence) for sentence in data.sentences], settings.batch_size, settings.seed)
    words, length = parts_of(settings).words, settings.longest if fixed else None
    batches = [class_batch(words, data.chosen(each), settings.longest, length) for each in rows]
    return [_moved(batch, settings.device) for batch in batches]


def token_batches(settings: Language, sentences: tuple[Sentence, ...], size: int) -> list[Batch]:
    """Return sentences with the next word as the target at every position."""
    rows = in_batches([len(sentence) for sentence in sentences], size, settings.seed)
    words = parts_of(settings).words
    batches = [token_batch(words, [sentences[i] for i in each], settings.longest) for each in rows]
    return [_moved(batch, settings.device) for batch in batches]


def _moved(batch: Batch, device: str) -> Batch:
    return {key: value.to(device) for key, value in batch.items()}


def from_scratch(settings: Language) -> Task:
    """Train a classifier on the phrases."""
    words = len(parts_of(settings).words)
    model = seeded(lambda: Classifier(Body(words, settings.shape, causal=False)), settings.seed)
    return _task(settings, model, settings.training)


def with_adapters(settings: Language) -> Task:
    """Train adapters and a head for the frozen body of the language model."""
    body = copy.deepcopy(language_model(settings).body)
    return _task(settings, adapted(body, settings.rank, settings.seed), settings.adapting)


def _task(settings: Language, model: nn.Module, training: Training) -> Task:
    parts = parts_of(settings)
    train, padded = (class_batches(settings, parts.train, fixed) for fixed in (False, True))
    optimise(model.to(settings.device), train, training, settings.seed)
    return Task(model, train, class_batches(settings, parts.validation), class_batches(settings, parts.test), padded)


@lru_cache(maxsize=1)
def language_model(settings: Language) -> LanguageModel:
    """Train a language model on the sentences. It is trained once for equal settings; do not change it."""
    parts = parts_of(settings)
    make = lambda: LanguageModel(Body(len(parts.words), settings.shape, causal=True))
    model = seeded(make, settings.seed).to(settings.device)
    data = token_batches(settings, parts.sentences, settings.modelling.batch_size)
    optimise(model, data, settings.modelling, settings.seed)
    assert isinstance(model, LanguageModel)
    return model
