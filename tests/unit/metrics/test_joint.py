"""Joint log-likelihoods against products over inputs, and every draw of the dyadic labels written out."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product

import pytest
import torch

from lapwing import metrics
from lapwing.errors import DataError, UnsupportedError

GENERATOR = torch.Generator().manual_seed(12)
PROBS = torch.randn(6, 4, 3, generator=GENERATOR, dtype=torch.float64).mul(2).softmax(2)
Y = torch.tensor([2, 0, 1, 2])


def joint(probs: list[list[list[float]]], inputs: list[int], y: list[int]) -> float:
    """log (1/S) Σ_s Π_b p_s(y_b), in plain numbers; an input may occur several times."""
    total = 0.0
    for draw in probs:
        likelihood = 1.0
        for i in inputs:
            likelihood *= draw[i][y[i]]
        total += likelihood
    return math.log(total / len(probs))


def test_joint_log_likelihood_equals_a_loop() -> None:
    expected = joint(PROBS.tolist(), [0, 1, 2, 3], Y.tolist())
    assert metrics.joint_log_likelihood(PROBS, Y) == pytest.approx(expected, rel=1e-12)


def test_one_draw_is_the_sum_of_the_inputs() -> None:
    expected = -4 * metrics.categorical_nll(PROBS[0], Y)
    assert metrics.joint_log_likelihood(PROBS[:1], Y) == pytest.approx(expected, rel=1e-12)
    assert metrics.joint_log_likelihood(PROBS[:1].expand(5, -1, -1), Y) == pytest.approx(expected, rel=1e-12)


def test_many_inputs_do_not_underflow() -> None:
    probs, y = torch.full((3, 5000, 2), 0.5), torch.zeros(5000, dtype=torch.long)
    assert metrics.joint_log_likelihood(probs, y) == pytest.approx(5000 * math.log(0.5))


def test_dyadic_log_likelihood_equals_all_draws_of_labels_from_the_only_pair() -> None:
    """With two inputs every pair is the same; three labels are drawn in 2³ ways."""
    probs, y = PROBS[:, :2], Y[:2]
    expected = sum(joint(probs.tolist(), list(inputs), y.tolist()) for inputs in product([0, 1], repeat=3)) / 8
    assert metrics.dyadic_log_likelihood(probs, y, repeats=3, pairs=5) == pytest.approx(expected, rel=1e-12)


def test_dyadic_log_likelihood_is_near_the_mean_over_all_pairs() -> None:
    repeats, each = 4, []
    for first, second in product(range(4), repeat=2):
        if first != second:
            ways = product([first, second], repeat=repeats)
            each.append(sum(joint(PROBS.tolist(), list(inputs), Y.tolist()) for inputs in ways) / 2**repeats)
    exact = torch.tensor(each, dtype=torch.float64)
    score = metrics.dyadic_log_likelihood(PROBS, Y, repeats=repeats, pairs=2000)
    assert abs(score - float(exact.mean())) < 5 * float(exact.std()) / math.sqrt(2000)


def test_one_repeat_is_the_log_likelihood_of_single_labels() -> None:
    probs = PROBS[:, :2]
    expected = -metrics.categorical_nll(probs.mean(0), Y[:2])
    assert metrics.dyadic_log_likelihood(probs, Y[:2], repeats=1) == pytest.approx(expected, rel=1e-12)


def test_a_posterior_that_knows_what_depends_on_what_scores_higher() -> None:
    """Both give each label the probability ½. In the first the labels of all inputs are the same."""
    same = torch.eye(2).unsqueeze(1).repeat(1, 4, 1)
    apart = torch.full((2, 4, 2), 0.5)
    y = torch.ones(4, dtype=torch.long)
    assert metrics.dyadic_log_likelihood(same, y) == pytest.approx(math.log(0.5))
    assert metrics.dyadic_log_likelihood(apart, y) == pytest.approx(10 * math.log(0.5))


def test_a_label_that_no_draw_allows() -> None:
    probs = torch.tensor([[[1.0, 0.0], [0.5, 0.5]]])
    assert metrics.joint_log_likelihood(probs, torch.tensor([1, 0])) == -math.inf
    assert metrics.dyadic_log_likelihood(probs, torch.tensor([1, 0])) == -math.inf
    # Each draw forbids one label; the cases in which only the other label occurs count still.
    either = torch.tensor([[[1.0, 0.0], [0.0, 1.0]], [[1.0, 0.0], [1.0, 0.0]]])
    expected = (math.log(0.5) + 2 * math.log(0.5) + 0) / 4
    assert metrics.dyadic_log_likelihood(either, torch.tensor([0, 0]), repeats=2) == pytest.approx(expected)


def test_equal_seeds_give_equal_pairs() -> None:
    def seeded(seed: int) -> float:
        return metrics.dyadic_log_likelihood(PROBS, Y, pairs=5, generator=torch.Generator().manual_seed(seed))

    assert seeded(3) == seeded(3)
    assert len({round(seeded(seed), 9) for seed in range(5)}) > 1
    assert metrics.dyadic_log_likelihood(PROBS, Y, pairs=5) == metrics.dyadic_log_likelihood(PROBS, Y, pairs=5)


@pytest.mark.parametrize("score", [metrics.joint_log_likelihood, metrics.dyadic_log_likelihood])
def test_ignored_labels_and_images(score: Callable[..., float]) -> None:
    some = torch.tensor([2, -100, 1, 2])
    kept = score(PROBS[:, some != -100], some[some != -100])
    assert score(PROBS, some) == pytest.approx(kept, rel=1e-12)
    images, mask = PROBS.reshape(6, 1, 2, 2, 3).movedim(4, 2), some.reshape(1, 2, 2)
    assert score(images, mask) == pytest.approx(kept, rel=1e-12)


@pytest.mark.parametrize("score", [metrics.joint_log_likelihood, metrics.dyadic_log_likelihood])
def test_what_is_no_draw_of_probabilities_is_refused(score: Callable[..., float]) -> None:
    for wrong in (PROBS[0], PROBS[:0], PROBS[:, :3], PROBS.transpose(0, 1)):
        with pytest.raises(DataError, match=r"expected \(S, B, C\)"):
            score(wrong, Y)
    with pytest.raises(DataError, match="do not sum to one"):
        score(2 * PROBS, Y)
    with pytest.raises(DataError, match=r"expected 0\.\.2"):
        score(PROBS, Y + 1)
    with pytest.raises(DataError, match="whole class numbers"):
        score(PROBS, Y.double())


def test_pairs_need_two_inputs_and_whole_numbers() -> None:
    with pytest.raises(DataError, match="at least two"):
        metrics.dyadic_log_likelihood(PROBS[:, :1], Y[:1])
    for wrong in ({"repeats": 0}, {"pairs": 2.5}, {"generator": 3}):
        with pytest.raises(UnsupportedError, match="expected"):
            metrics.dyadic_log_likelihood(PROBS, Y, **wrong)  # type: ignore[arg-type]
