"""Sentences of SST-2 as numbers of words: the vocabulary of the training data, and padded batches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from lapwing.errors import DataError

PAD, UNKNOWN, START, END = range(4)  # numbers of the padding, of rare words, and of both ends of a sentence
SPECIAL = ("<pad>", "<unk>", "<start>", "<end>")
IGNORED = -100  # target of a padded position
Batch = dict[str, Tensor]  # "input_ids" and "attention_mask" (B, T), "labels" (B,) or (B, T)
Sentence = tuple[str, ...]


@dataclass(frozen=True)
class Vocabulary:
    """The most frequent words of the training sentences, the most frequent one first.

    >>> words = Vocabulary.of([("a", "film"), ("a", "plot")], 1)
    >>> words.numbers(("a", "film"))
    [4, 1]
    >>> words.text([4, 1])
    'a <unk>'
    """

    words: tuple[str, ...]

    @classmethod
    def of(cls, sentences: Iterable[Sentence], size: int) -> Vocabulary:
        """Return the ``size`` most frequent words; of equally frequent ones those that come first."""
        counts = Counter(word for sentence in sentences for word in sentence)
        return cls(tuple(word for word, _ in counts.most_common(size)))

    def __len__(self) -> int:
        return len(SPECIAL) + len(self.words)

    @cached_property
    def _number_of(self) -> dict[str, int]:
        return {word: number for number, word in enumerate(self.words, len(SPECIAL))}

    def numbers(self, sentence: Sentence) -> list[int]:
        """Return the number of each word."""
        return [self._number_of.get(word, UNKNOWN) for word in sentence]

    def text(self, numbers: Iterable[int]) -> str:
        """Return the words with these numbers."""
        return " ".join((*SPECIAL, *self.words)[number] for number in numbers)


@dataclass(frozen=True)
class Labelled:
    """Sentences and the class of each."""

    sentences: tuple[Sentence, ...]
    labels: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.sentences)

    def __add__(self, other: Labelled) -> Labelled:
        return Labelled(self.sentences + other.sentences, self.labels + other.labels)

    def chosen(self, rows: Iterable[int]) -> Labelled:
        """Return the sentences in these rows."""
        rows = list(rows)
        return Labelled(tuple(self.sentences[i] for i in rows), tuple(self.labels[i] for i in rows))


@dataclass(frozen=True)
class Corpus:
    """Training phrases and sentences, and the two sets that are held out."""

    train: Labelled
    dev: Labelled
    test: Labelled

    @classmethod
    def read(cls, folder: Path) -> Corpus:
        """Read sst2.npz."""
        path = folder / "sst2.npz"
        if not path.exists():
            raise DataError(
                f"{path.name} is not in the data folder; expected text_S, off_S and y_S for S = train, dev, test."
            )
        with np.load(path, allow_pickle=False) as file:
            parts = [
                _part(*(file[f"{key}_{name}"] for key in ("text", "off", "y"))) for name in ("train", "dev", "test")
            ]
        return cls(*parts)


def _part(text: np.ndarray, offsets: np.ndarray, labels: np.ndarray) -> Labelled:
    """Return sentences from their bytes, one after another, and the offsets between them."""
    whole, ends = text.tobytes(), offsets.tolist()
    sentences = (whole[a:b].decode().split() for a, b in pairwise(ends))
    return Labelled(tuple(tuple(words) for words in sentences), tuple(int(y) for y in labels))


def padded(rows: Sequence[Sequence[int]], fill: int, length: int | None = None) -> Tensor:
    """Return rows of numbers as one tensor (B, T); T is ``length``, or that of the longest row."""
    length = max(map(len, rows)) if length is None else length
    out = torch.full((len(rows), length), fill)
    for i, row in enumerate(rows):
        out[i, : len(row)] = torch.tensor(row[:length], dtype=torch.long)
    return out


def class_batch(words: Vocabulary, data: Labelled, longest: int, length: int | None = None) -> Batch:
    """Return sentences of at most ``longest`` words and their classes, padded to the longest one or to ``length``."""
    tokens = padded([words.numbers(sentence[:longest]) for sentence in data.sentences], PAD, length)
    return {"input_ids": tokens, "attention_mask": tokens != PAD, "labels": torch.tensor(data.labels)}


def token_batch(words: Vocabulary, sentences: Sequence[Sentence], longest: int) -> Batch:
    """Return sentences between their two ends, whose labels are the next words; padded positions are ignored."""
    rows = [[START, *words.numbers(sentence[:longest]), END] for sentence in sentences]
    tokens, targets = padded([row[:-1] for row in rows], PAD), padded([row[1:] for row in rows], IGNORED)
    return {"input_ids": tokens, "attention_mask": tokens != PAD, "labels": targets}


def inputs_of(batch: Batch) -> Batch:
    """Return the batch without its labels."""
    return {key: value for key, value in batch.items() if key != "labels"}
