"""The verdict follows from the numbers by its rules."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lapwing.decisions.evaluation import ClassFrequency, Compared, Evaluation
from lapwing.metrics import ScoreInterval
from lapwing.plots import AnswerProbabilities
from lapwing.report import verdict
from lapwing.report.verdict import calibration_error, calibration_error_by_chance, mean_error_by_chance, verdict_of

LABELS, NUMBERS = ("nll", "correct", "brier", "confidence"), ("nll", "error", "crps", "covered", "width", "pit", "std")


def row(name: str, own: float, plain: float, low: float, high: float, better: str = "lower") -> Compared:
    at = lambda value: ScoreInterval(value, value - 0.01, value + 0.01, 0.01)
    return Compared(name, at(own), at(plain), ScoreInterval(own - plain, low, high, 0.01), better)


def evaluation(numbers: Tensor, columns: tuple[str, ...], *rows: Compared) -> Evaluation:
    task = "classes" if columns == LABELS else "numbers"
    nll = row("nll", 0.5, 0.7, -0.3, -0.1)
    return Evaluation(task, len(numbers), len(numbers), (nll, *rows), 0.9, 0.95, 1.0, 1.0, columns, numbers, numbers)


def of_labels(confidence: Tensor, correct: Tensor, *rows: Compared) -> Evaluation:
    columns = {"confidence": confidence, "correct": correct}
    none = torch.zeros_like(confidence)
    return evaluation(torch.stack([columns.get(name, none) for name in LABELS], 1).double(), LABELS, *rows)


def of_numbers(pit: Tensor, std: Tensor, error: Tensor) -> Evaluation:
    columns = {"pit": pit, "std": std, "error": error}
    covered = float(((2 * pit - 1).abs() <= 0.9).double().mean())
    none = torch.zeros_like(pit)
    numbers = torch.stack([columns.get(name, none) for name in NUMBERS], 1).double()
    return evaluation(numbers, NUMBERS, row("coverage", covered, 0.5, 0.3, 0.5, ""), row("cqm", 0.1, 0.1, -1, 1))


def drawn(n: int, harder: float = 0.0) -> tuple[Tensor, Tensor]:
    """Return confidences, and answers that are right with that probability less ``harder``."""
    confidence = 0.4 + 0.6 * torch.rand(n, dtype=torch.float64)
    return confidence, (torch.rand(n) < confidence - harder).double()


def test_calibrated_answers_are_called_so_nearly_always() -> None:
    """One in twenty is not, by the rule; more than 8 of 40 has a probability below 1e-4."""
    words = [verdict_of(of_labels(*drawn(60))).answers[0].word for _ in range(40)]
    assert words.count("Yes") >= 32


def test_by_chance_errors_are_those_of_draws() -> None:
    found = AnswerProbabilities(*drawn(150), of_classes=True)
    right = torch.rand(2000, 150) < found.probability
    errors = torch.tensor(
        [calibration_error(AnswerProbabilities(found.probability, row.double(), True)) for row in right]
    )
    share = float((errors <= calibration_error_by_chance(found)).double().mean())
    assert abs(share - 0.975) < 4 * (0.975 * 0.025 * (1 / 2000 + 1 / 1000)) ** 0.5  # both have Monte Carlo errors
    shares = right.double().mean(1)
    assert float(shares.std()) == pytest.approx(mean_error_by_chance(found), rel=4 / 4000**0.5)


def test_many_answers_are_drawn_in_sums_with_the_same_result(monkeypatch: pytest.MonkeyPatch) -> None:
    found = AnswerProbabilities(*drawn(3000), of_classes=True)
    one_by_one = calibration_error_by_chance(found)
    monkeypatch.setattr(verdict, "MANY", 10)
    assert calibration_error_by_chance(found) == pytest.approx(one_by_one, rel=0.1)  # of 25 draws in the tail


def test_confidence_without_success_is_overconfident() -> None:
    found = verdict_of(of_labels(*drawn(500, harder=0.25)))
    assert found.answers[0].word == "No"
    assert "are overconfident (they say" in found.sentences
    assert ", but the predictions are better than those of the plain network" in found.sentences


def test_success_without_confidence_is_underconfident() -> None:
    assert "underconfident" in verdict_of(of_labels(*drawn(500, harder=-0.3))).answers[0].short


def biased(number: int, frequency: float, probability: float, error: float) -> ClassFrequency:
    gap = probability - frequency
    return ClassFrequency(
        number, frequency, probability, 0.1, ScoreInterval(gap, gap - 2 * error, gap + 2 * error, error)
    )


def test_binary_labels_are_judged_by_the_probability_of_one() -> None:
    """Ones are rare and all probabilities are too high by .15: the confidence in the guesses is right on average."""
    probability = 0.1 + 0.2 * torch.rand(500, dtype=torch.float64)
    label = (torch.rand(500) < probability - 0.08).double()
    columns = ("nll", "correct", "brier", "confidence", "share", "probability", "label")
    rows = torch.stack([torch.zeros(500), label, label, 1 - probability, label, probability, label], 1).double()
    found = evaluation(rows, LABELS)
    found = Evaluation(**{**vars(found), "task": "binary labels", "columns": columns})
    answer = verdict_of(found).answers[0]
    assert answer.word == "No"
    assert answer.short.startswith("are too high (they say")
    assert "Mean probability of one is" in answer.sentence
    one = Evaluation(**{**vars(found), "classes": (biased(0, 0.12, 0.2, 0.01),), "class_count": 1})
    short = verdict_of(one).answers[0].short.replace("\N{NO-BREAK SPACE}", " ")
    assert short == "are not calibrated: that of label one is too high, 20 % on average where 12 % is right"


def test_a_class_that_is_predicted_too_often_is_named_though_confidence_is_right() -> None:
    found = of_labels(*drawn(500))
    fine, off = biased(2, 0.1, 0.11, 0.01), biased(4, 0.1, 0.2, 0.01)
    for classes, word in (((fine,), "Yes"), ((fine, off), "No")):
        answer = verdict_of(Evaluation(**{**vars(found), "classes": classes, "class_count": 9})).answers[0]
        assert answer.word == word
    assert "that of class 4 is too high" in answer.short


def test_errors_of_both_signs_are_not_calibrated() -> None:
    confidence = torch.tensor([0.65] * 200 + [0.95] * 200, dtype=torch.float64)
    correct = torch.tensor([1.0] * 190 + [0.0] * 10 + [1.0] * 130 + [0.0] * 70, dtype=torch.float64)
    assert "too high in places and too low in others" in verdict_of(of_labels(confidence, correct)).answers[0].short


def test_a_small_error_is_near_calibration_however_many_data_there_are() -> None:
    confidence = torch.full((40_000,), 0.8, dtype=torch.float64)
    correct = (torch.arange(40_000) % 1000 < 785).double()
    answer = verdict_of(of_labels(confidence, correct)).answers[0]
    assert answer.mark == "good"
    assert answer.short.startswith("are nearly calibrated, off by 1.5 percentage points")


@pytest.mark.parametrize(
    ("low", "high", "word", "short"),
    [
        (-0.3, -0.1, "Yes", "are better than"),
        (0.1, 0.3, "No", "are worse than"),
        (-0.1, 0.1, "Cannot be told", "cannot be told apart from"),
    ],
)
def test_a_difference_counts_if_its_interval_leaves_zero_out(low: float, high: float, word: str, short: str) -> None:
    found = of_labels(*drawn(200))
    rows = (row("nll", 0.5, 0.5 - (low + high) / 2, low, high),)
    answer = verdict_of(Evaluation(**{**vars(found), "rows": rows})).answers[1]
    assert answer.word == word
    assert answer.short.startswith(short)


def test_the_plain_network_is_called_that() -> None:
    found = verdict_of(of_labels(*drawn(200)), has_spread=False)
    assert "those of the plain network itself" in found.sentences


def test_the_most_uncertain_tenth_is_named_with_its_confidence() -> None:
    confidence = torch.cat([torch.full((50,), 0.5), torch.full((450,), 0.99)]).double()
    correct = torch.cat([torch.arange(50) % 2, torch.ones(450)]).double()
    short = verdict_of(of_labels(confidence, correct)).answers[2].short.replace("\N{NO-BREAK SPACE}", " ")
    assert short == "Do not rely on answers with a confidence of 50 % or less: 50 % of them are wrong."


def test_other_sentences_on_trust() -> None:
    confidence = torch.linspace(0.5, 1, 300, dtype=torch.float64)
    last = lambda correct: verdict_of(of_labels(confidence, correct)).answers[2]
    assert last(torch.ones(300)).short == "No answer was wrong."
    assert last((torch.arange(300) % 3 == 0).double()).short.startswith("Most answers are wrong, 67")
    assert last((torch.arange(300) % 3 > 0).double()).word == "Cannot be told"


def test_few_inputs_are_said_to_be_few() -> None:
    assert "Only 20 inputs were scored" in verdict_of(of_labels(*drawn(20))).sentences
    one = verdict_of(of_labels(*drawn(1)))
    assert "Only 1 input was scored" in one.sentences
    assert "cannot be told apart" in one.sentences  # resampling one datum gives an interval without width


def spread(n: int, scale: float) -> Tensor:
    """Return PIT values of targets that spread ``scale`` times as far as predicted."""
    return torch.special.ndtr(scale * torch.randn(n, dtype=torch.float64))


@pytest.mark.parametrize(
    ("scale", "word", "short"),
    [(1.0, "Yes", "are calibrated"), (2.0, "No", "are too narrow"), (0.4, "No", "are too wide")],
)
def test_intervals_hold_as_many_targets_as_they_say(scale: float, word: str, short: str) -> None:
    std = torch.ones(800, dtype=torch.float64)
    answer = verdict_of(of_numbers(spread(800, scale), std, torch.randn(800))).answers[0]
    assert answer.word == word
    assert answer.short.startswith(short)


def test_intervals_may_be_right_at_the_ends_alone() -> None:
    """Nine in ten targets are inside, as they should be, and nearly all of these are close to the median."""
    pit = torch.cat([torch.linspace(0.45, 0.55, 900), torch.linspace(0, 0.05, 50), torch.linspace(0.95, 1, 50)])
    answer = verdict_of(of_numbers(pit.double(), torch.ones(1000), torch.randn(1000))).answers[0]
    assert answer.word == "Partly"
    assert answer.short.startswith("are too wide in the middle")


def test_large_errors_at_wide_intervals_are_named() -> None:
    std = torch.cat([torch.full((30,), 3.0), torch.full((270,), 1.0)])
    error = torch.cat([torch.full((30,), 4.0), torch.full((270,), 0.5)])
    short = verdict_of(of_numbers(spread(300, 1.0), std, error)).answers[2].short
    assert short.startswith("Do not rely on predictions with a standard deviation of 3 or more: their RMSE is 4,")
    even = verdict_of(of_numbers(spread(300, 1.0), std, torch.full((300,), 0.5))).answers[2]
    assert even.short == "On these data its uncertainty does not show where large errors are."
