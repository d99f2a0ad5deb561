"""The probability of a whole sequence under functions drawn from the posterior of a language model.

One draw is one function: the same weights at every position of a sentence and for all sentences.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import lapwing as lw
from experiments.language_data import END, IGNORED, PAD, START, UNKNOWN, Batch, Sentence, Vocabulary, inputs_of

RESAMPLES = 200  # of the bootstrap for the error of an AUROC
RARE = 0.5  # unusual words are drawn from this share of the vocabulary, the least frequent words
REPLACED = 0.3  # share of the words of a sentence that unusual words replace


def target_log_probs(f: Tensor, y: Tensor) -> Tensor:
    """Return the log-probability of every target, (..., B, T), from logits (..., B, T, V); zero where it is ignored."""
    ignored = y == IGNORED
    index = y.masked_fill(ignored, 0).expand(f.shape[:-1]).unsqueeze(-1)
    log_probs = f.gather(-1, index).squeeze(-1) - f.logsumexp(-1)
    return log_probs.masked_fill(ignored, 0.0)


@dataclass(frozen=True, eq=False)
class Scores:
    """Scores of sequences for each word, so that long and short ones compare; all (N,)."""

    plain: Tensor  # log-probability under the network as it is
    mean: Tensor  # log-probability, averaged over drawn functions
    spread: Tensor  # its standard deviation over them
    words: Tensor  # number of words, the end of the sentence included

    @classmethod
    def of(cls, model: nn.Module, drawn: Callable[[Batch], Tensor], data: Sequence[Batch]) -> Scores:
        """Return the scores of all sequences of these batches; ``drawn`` gives logits of K functions, (K, B, T, V)."""
        parts = []
        for batch in data:
            known = (batch["labels"] != IGNORED).sum(-1)
            with torch.no_grad():
                plain = target_log_probs(model(**inputs_of(batch)), batch["labels"]).sum(-1) / known
            each = target_log_probs(drawn(batch), batch["labels"]).sum(-1) / known
            parts.append(torch.stack([plain, each.mean(0), each.std(0), known.to(plain)]).double().cpu())
        return cls(*torch.cat(parts, 1))

    def means(self) -> dict[str, float]:
        """Return means over the sequences."""
        return {
            "log p / word": float(self.plain.mean()),
            "drawn": float(self.mean.mean()),
            "spread": float(self.spread.mean()),
        }


def detection(inside: Scores, outside: Scores) -> dict[str, float]:
    """Return how well two scores tell changed sentences from the same ones as they are, with standard errors.

    The sentences are resampled in pairs, as they come in pairs.
    """
    pairs = {"spread": (inside.spread, outside.spread), "plain": (-inside.plain, -outside.plain)}
    scores: dict[str, float] = {}
    for name, (before, after) in pairs.items():
        generator, count = torch.Generator().manual_seed(0), len(before)
        draws = (torch.randint(count, (count,), generator=generator) for _ in range(RESAMPLES))
        again = torch.tensor([lw.metrics.auroc(before[rows], after[rows]) for rows in draws])
        scores |= {f"AUROC {name}": lw.metrics.auroc(before, after), f"AUROC {name} ±": float(again.std())}
    return scores


def with_unusual_words(sentences: Sequence[Sentence], words: Vocabulary, seed: int) -> list[Sentence]:
    """Return the sentences with some words replaced by rare words of the vocabulary, at least one in each."""
    generator, first = torch.Generator().manual_seed(seed), int(len(words.words) * (1 - RARE))
    changed = []
    for sentence in sentences:
        count = max(1, round(REPLACED * len(sentence)))
        places = torch.randperm(len(sentence), generator=generator)[:count].tolist()
        rare = torch.randint(first, len(words.words), (count,), generator=generator).tolist()
        new = dict(zip(places, (words.words[i] for i in rare), strict=True))
        changed.append(tuple(new.get(i, word) for i, word in enumerate(sentence)))
    return changed


def shuffled(sentences: Sequence[Sentence], seed: int) -> list[Sentence]:
    """Return the sentences with their words in random order."""
    generator = torch.Generator().manual_seed(seed)
    orders = (torch.randperm(len(sentence), generator=generator).tolist() for sentence in sentences)
    return [tuple(sentence[i] for i in order) for sentence, order in zip(sentences, orders, strict=True)]


def written(model: nn.Module, count: int, longest: int, temperature: float, seed: int) -> list[list[int]]:
    """Return sentences that the network writes word by word, as numbers, without their ends.

    The temperature 0 takes the most probable word; the first word is drawn in any case, so that sentences differ.
    """
    device = next(model.parameters()).device
    generator, tokens = torch.Generator().manual_seed(seed), torch.full((count, 1), START, device=device)
    for step in range(longest):
        with torch.no_grad():
            f = model(tokens, torch.ones_like(tokens, dtype=torch.bool))[:, -1].float().cpu()
        f[:, [PAD, UNKNOWN, START]] = -math.inf
        if temperature == 0 and step:
            following = f.argmax(-1, keepdim=True)
        else:
            following = torch.multinomial((f / (temperature or 1.0)).softmax(-1), 1, generator=generator)
        tokens = torch.cat([tokens, following.to(device)], 1)
    rows = tokens[:, 1:].tolist()
    return [row[: row.index(END)] if END in row else row for row in rows]
