"""Language, made small: twelve words, whose sentences are good or bad by one of them."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import lapwing as lw
from experiments import language, language_tokens
from experiments.language_data import (
    END,
    IGNORED,
    PAD,
    START,
    UNKNOWN,
    Labelled,
    Vocabulary,
    class_batch,
    inputs_of,
    token_batch,
)
from experiments.language_models import Adapted, Body, LanguageModel, Shape, Training, adapted, seeded
from experiments.language_sequences import Scores, detection, target_log_probs, written
from experiments.language_task import Language, class_batches, language_model, parts_of, token_batches, with_adapters
from lapwing.demo.result import Result
from tests.tolerances import assert_close

SHAPE = Shape(width=8, heads=2, layers=1, dropout=0.1)
BRIEF = Training(2, batch_size=16, learning_rate=1e-2)


def sentences(count: int, seed: int) -> Labelled:
    draw = np.random.default_rng(seed)
    made, labels = [], []
    for _ in range(count):
        label = int(draw.integers(2))
        middle = draw.choice(["film", "plot", "cast", "score", "scene"], int(draw.integers(5, 9))).tolist()
        middle[int(draw.integers(len(middle)))] = ("awful", "lovely")[label]
        made.append(("the", "whole", *middle, "."))
        labels.append(label)
    return Labelled(tuple(made), tuple(labels))


@pytest.fixture
def settings(tmp_path: Path) -> Language:
    """The settings for a small file of generated sentences."""
    arrays = {}
    for name, count in (("train", 60), ("dev", 16), ("test", 20)):
        part = sentences(count, len(name))
        texts = [" ".join(sentence).encode() for sentence in part.sentences]
        arrays[f"text_{name}"] = np.frombuffer(b"".join(texts), dtype=np.uint8)
        arrays[f"off_{name}"] = np.cumsum([0, *map(len, texts)])
        arrays[f"y_{name}"] = np.array(part.labels, dtype=np.int16)
    np.savez(tmp_path / "sst2.npz", **arrays)
    return Language(
        tmp_path, words=9, longest=8, shape=SHAPE, data=48, sentences=24, test_tokens=6, validation_tokens=4,
        written=3, training=BRIEF, adapting=BRIEF, modelling=BRIEF, rank=2, samples=3, batch_size=48,
    )  # fmt: skip


def test_methods_are_scored_on_both_classifiers_without_and_with_validation(
    settings: Language, monkeypatch: pytest.MonkeyPatch
) -> None:
    fits = {
        "plain": language.FITS["LoRA adapters"]["plain"],
        "Kron": language.Fit(lw.Kron, "last_layer"),
        "ELLA": language.Fit(lambda: lw.ELLA(8, 3), padded=True, slow=True),
    }
    lora = {"plain": fits["plain"], "Kron": language.FITS["LoRA adapters"]["Kron"]}
    monkeypatch.setattr(language, "FITS", {"trained from scratch": fits, "LoRA adapters": lora})
    monkeypatch.setattr(language, "RESAMPLES", 3)
    result = language.run(replace(settings, methods=("Kron", "ELLA")))
    names = ["plain", "temperature", "Kron", "Kron, validation"]
    expected = [*(("trained from scratch", name) for name in (*names, "ELLA", "ELLA, validation")),
                *(("LoRA adapters", name) for name in names)]  # fmt: skip
    assert [(row.group, row.name) for row in result.rows] == expected
    assert all(0 <= row.scores["ECE"] <= 1 and row.scores["NLL ±"] > 0 for row in result.rows)
    assert {row.scores["to temperature"] for row in result.rows if row.name == "temperature"} == {0.0}
    assert Result.from_json(result.to_json()) == result


def test_the_next_word_and_sequences_are_scored(settings: Language, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        language_tokens, "FITS", {name: language_tokens.FITS[name] for name in ("last layer, Kron", "Kron")}
    )
    result = language_tokens.run(settings)
    rows = {row.name: row.scores for row in result.rows}
    methods = [f"{name}, {how}" for name in language_tokens.FITS for how in ("evidence", "validation")]
    changed = ["test sentences", "unusual words", "shuffled words", *language_tokens.WRITTEN]
    assert list(rows) == ["plain", "temperature", *methods, *changed]
    for name in ("plain", "temperature", *methods):
        assert rows[name]["perplexity"] == pytest.approx(math.exp(rows[name]["NLL / word"]))
    assert rows["temperature"]["to temperature"] == 0
    assert all(rows[name]["spread"] >= 0 for name in changed)  # zero if the plain network has all the weight
    assert 0 <= rows["shuffled words"]["AUROC spread"] <= 1
    assert all(note.startswith("written") for note in result.notes)
    assert Result.from_json(result.to_json()) == result


def test_scores_of_words_are_means_over_words_and_errors_over_sentences() -> None:
    """Against loops: three sentences of 1 to 3 words."""
    log_probs = -torch.rand(3, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    y = torch.tensor([[1, IGNORED, IGNORED], [4, 0, IGNORED], [2, 2, 3]])
    scores = language_tokens.WordScores.of(lambda batch: log_probs, [{"labels": y}])
    logs = [[float(log_probs[b, t]) for t in range(3) if y[b, t] != IGNORED] for b in range(3)]
    mean = -sum(map(sum, logs)) / 6
    assert scores.nll == pytest.approx(mean)
    residuals = [sum(row) + mean * len(row) for row in logs]
    assert scores.error == pytest.approx(math.sqrt(sum(r * r for r in residuals)) / 6)


def test_sequences_have_the_mean_and_spread_of_their_log_probability_over_functions() -> None:
    generator = torch.Generator().manual_seed(0)
    f = torch.randn(4, 2, 3, 5, generator=generator, dtype=torch.float64)
    batch = {"labels": torch.tensor([[1, 2, IGNORED], [4, 0, 3]])}
    scores = Scores.of(lambda **inputs: f[0], lambda each: f, [batch])  # type: ignore[arg-type]
    logs = f.log_softmax(-1)
    first = (logs[:, 0, 0, 1] + logs[:, 0, 1, 2]) / 2
    second = (logs[:, 1, 0, 4] + logs[:, 1, 1, 0] + logs[:, 1, 2, 3]) / 3
    both = torch.stack([first, second], 1)
    assert_close(scores.plain, both[0])
    assert_close(scores.mean, both.mean(0))
    assert_close(scores.spread, both.std(0))
    assert scores.words.tolist() == [2, 3]


def test_functions_are_the_same_at_every_position_and_in_every_batch(settings: Language) -> None:
    """One draw of the weights serves all: a sentence alone has the log-probabilities that it has beside others."""
    model, parts = language_model(settings), parts_of(settings)
    train = token_batches(settings, parts.sentences, 16)
    posterior = lw.fit(model, train, lw.Categorical(), method=lw.Kron(curvature="fisher_mc"), prior=1.0)
    batch = token_batch(parts.words, parts.test.sentences[:3], settings.longest)
    draws = language_tokens.drawn(posterior, 4)
    together = target_log_probs(draws(batch), batch["labels"])
    for i in range(3):
        one = token_batch(parts.words, parts.test.sentences[i : i + 1], settings.longest)
        alone = target_log_probs(draws(one), one["labels"])
        assert_close(alone[:, 0], together[:, i, : alone.shape[-1]], power=0.5)


def test_a_spread_that_is_larger_for_changed_sentences_is_detected() -> None:
    low, high = torch.linspace(0, 1, 20).double(), torch.linspace(2, 3, 20).double()
    inside, outside = Scores(-low, low, low, low), Scores(-low, low, high, low)
    found = detection(inside, outside)
    assert (found["AUROC spread"], found["AUROC spread ±"]) == (1.0, 0.0)
    assert found["AUROC plain"] == pytest.approx(0.5)


def test_batches_are_padded_and_their_padding_does_not_count() -> None:
    words = Vocabulary.of([("a", "film"), ("a", "plot", "twist")], 3)
    data = Labelled((("a", "film"), ("a", "strange", "plot")), (0, 1))
    batch = class_batch(words, data, 10, length=4)
    assert batch["input_ids"].tolist() == [[4, 5, PAD, PAD], [4, UNKNOWN, 6, PAD]]
    assert batch["attention_mask"].sum(1).tolist() == [2, 3]
    tokens = token_batch(words, data.sentences, 10)
    assert tokens["input_ids"].tolist() == [[START, 4, 5, PAD], [START, 4, UNKNOWN, 6]]
    assert tokens["labels"].tolist() == [[4, 5, END, IGNORED], [4, UNKNOWN, 6, END]]
    model = seeded(lambda: LanguageModel(Body(len(words), SHAPE, causal=True)), 0).eval()
    short = token_batch(words, data.sentences[:1], 10)
    with torch.no_grad():
        alone, beside = model(**inputs_of(short)), model(**inputs_of(tokens))[:1, :3]
    assert_close(alone, beside)


def test_a_causal_model_does_not_see_the_words_to_come() -> None:
    model = seeded(lambda: LanguageModel(Body(12, SHAPE, causal=True)), 0).eval()
    tokens = torch.randint(4, 12, (2, 6))
    changed = torch.cat([tokens[:, :4], 15 - tokens[:, 4:]], 1)
    mask = torch.ones_like(tokens, dtype=torch.bool)
    with torch.no_grad():
        assert_close(model(tokens, mask)[:, :4], model(changed, mask)[:, :4])
    texts = written(model, 2, 5, 0.0, seed=0)
    assert texts == written(model, 2, 5, 0.0, seed=0)
    assert all(number not in (PAD, UNKNOWN, START, END) for row in texts for number in row)


def test_adapters_start_at_the_frozen_network_and_alone_are_trained(settings: Language) -> None:
    body = seeded(lambda: Body(12, SHAPE, causal=True), 0)
    tokens = torch.randint(4, 12, (2, 6))
    mask = torch.ones_like(tokens, dtype=torch.bool)
    before = body.eval()(tokens, mask)
    model = adapted(body, 2, seed=0).eval()
    assert_close(model.body(tokens, mask), before)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained == {name for name, _ in model.named_parameters() if "lora" in name or "head" in name}
    assert sum(isinstance(module, Adapted) for module in model.modules()) == 6
    untouched = language_model(settings).state_dict()
    task = with_adapters(settings)
    assert all("lora" not in name for name in untouched)  # the adapters are in a copy
    posterior = lw.fit(task.model, task.train, "classification", weights=lw.named("lora"), prior=1.0)
    assert posterior.network.selection.size == 2 * (4 * (8 + 8) + 2 * (8 + 16))  # rank times the sizes of six maps


def test_batches_hold_sentences_of_similar_length_and_all_of_them(settings: Language) -> None:
    batches = class_batches(settings, parts_of(settings).train)
    assert sum(len(batch["labels"]) for batch in batches) == 48
    assert len({batch["input_ids"].shape[1] for batch in class_batches(settings, parts_of(settings).train, True)}) == 1
    assert len(parts_of(settings).test) == 28  # half of the development sentences and all test sentences
    assert not set(parts_of(settings).validation.sentences) & set(parts_of(settings).test.sentences)
