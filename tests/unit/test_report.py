"""The page of a posterior: its verdict, its pictures, its text."""

from __future__ import annotations

import json
import re
import sys
from functools import cache
from html.parser import HTMLParser
from pathlib import Path

import matplotlib
import pytest
import torch
from torch import Tensor, nn

import lapwing as lw
from lapwing.decisions.evaluation import ClassFrequency, Compared, Evaluation
from lapwing.errors import DataError, FileError, UnsupportedError
from lapwing.metrics import ScoreInterval, ece
from lapwing.plots import COLOURS, INK, AnswerProbabilities, new_axis
from lapwing.report import page, verdict
from lapwing.report.page import Report, inline_svg
from lapwing.report.verdict import calibration_error_by_chance, mean_error_by_chance, verdict_of

# The page: self-contained, small, escaped, equal for equal calls, for every task.

TITLE = "Digits </script><b>&amp; $more$"
Case = tuple[lw.Fitted, list[tuple[torch.Tensor, torch.Tensor]]]
VOID = {"meta", "link", "img", "br", "use", "path"}


class Outline(HTMLParser):
    """Headings, ids and unclosed elements of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.headings: list[str] = []
        self.ids: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.unmatched: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self.ids += [value for name, value in attrs if name == "id" and value]
        if re.fullmatch("h[1-6]", tag):
            self.headings.append(tag)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self.ids += [value for name, value in attrs if name == "id" and value]

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID and self.open.pop() != tag:
            self.unmatched.append(tag)


@pytest.fixture(scope="module")
def posterior() -> Case:
    torch.manual_seed(0)
    x, y = torch.randn(90, 1, 4, 5), torch.arange(90) % 3
    net = nn.Sequential(nn.Flatten(), nn.Linear(20, 6), nn.Tanh(), nn.Linear(6, 3))
    return lw.fit(net, [(x[:50], y[:50])], "classification"), [(x[50:70], y[50:70]), (x[70:], y[70:])]


@pytest.fixture(scope="module")
def written(posterior: Case, tmp_path_factory: pytest.TempPathFactory) -> Report:
    fitted, data = posterior
    path = tmp_path_factory.mktemp("report") / "page.html"
    return fitted.report(data, path, title=TITLE, seed=3, command="lapwing report <x>", resamples=50)


@pytest.fixture(scope="module")
def text(written: Report) -> str:
    return written.path.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def outline(text: str) -> Outline:
    parser = Outline()
    parser.feed(text)
    return parser


def test_the_page_is_small_and_refers_to_nothing_outside(text: str, outline: Outline) -> None:
    assert len(text.encode()) < 300_000  # the limit is 1 MB
    assert set(re.findall(r"https?://[^\"' ]+", text)) == {"http://www.w3.org/1999/xlink"}  # a name, no address
    for _, attributes in outline.elements:
        for name in ("src", "href", "xlink:href"):
            value = attributes.get(name) or ""
            assert not value or value.startswith(("data:", "#"))
    assert "default-src 'none'" in text


def test_elements_are_closed_ids_are_unique_and_headings_in_order(outline: Outline) -> None:
    assert outline.open == []
    assert outline.unmatched == []
    assert len(outline.ids) == len(set(outline.ids))
    assert outline.headings[:3] == ["h1", "h2", "h3"]
    assert outline.headings.count("h1") == 1


def test_pictures_are_described_and_tables_have_captions(outline: Outline) -> None:
    drawn = [attributes for tag, attributes in outline.elements if tag == "svg"]
    assert len(drawn) == 5  # reliability, risk, γ, evidence, trace
    assert all(each["role"] == "img" and each["aria-labelledby"] in outline.ids for each in drawn)
    images = [attributes for tag, attributes in outline.elements if tag == "img"]
    assert len(images) == 8
    assert all(each["alt"] and (each["src"] or "").startswith("data:image/png") for each in images)
    assert sum(tag == "caption" for tag, _ in outline.elements) == sum(tag == "table" for tag, _ in outline.elements)


def test_what_only_the_maker_needs_is_under_details(text: str) -> None:
    before, _, rest = text.partition("<details>")
    inside, _, after = rest.partition("</details>")
    shown = before + after
    for name in ("verdict", "scores", "predictions", "uncertain", "findings"):
        assert f'<h2 id="{name}">' in shown
    for name in ("learned", "made"):
        assert f'<h2 id="{name}">' in inside
    assert "Trace of the tuner" in inside
    assert "Trace of the tuner" not in shown


def test_text_of_users_is_escaped(text: str) -> None:
    assert "</script><b>" not in text
    assert "Digits &lt;/script&gt;&lt;b&gt;&amp;amp; $more$" in text
    assert "lapwing report &lt;x&gt;" in text


def test_all_numbers_are_in_the_page(text: str, written: Report) -> None:
    (found,) = re.findall(r'<script type="application/json" id="numbers">(.*?)</script>', text, re.DOTALL)
    numbers = json.loads(found)
    assert numbers == json.loads(json.dumps(written.numbers))
    assert numbers["title"] == TITLE
    assert numbers["evaluation"]["inputs"] == 40
    assert {"reliability", "risk", "effective_parameters", "evidence_curve", "trace", "uncertain"} <= set(numbers)
    assert "seconds" not in json.dumps(numbers["evaluation"])
    assert numbers["verdict"] == written.verdict
    assert str(written) == f"{written.verdict}\n{written.path}"


def test_the_scores_are_those_of_evaluate(posterior: Case, written: Report) -> None:
    fitted, data = posterior
    scores = written.numbers["evaluation"]["scores"]
    for score in fitted.evaluate(data, resamples=2).rows:
        assert scores[score.name]["posterior"]["value"] == pytest.approx(score.posterior.value)


def test_the_most_uncertain_inputs_have_the_highest_entropies(posterior: Case, written: Report) -> None:
    fitted, data = posterior
    entropy = fitted.predict(torch.cat([x for x, _ in data])).entropy
    rows = written.numbers["uncertain"]["rows"]
    assert [row["number"] for row in rows] == entropy.topk(8).indices.tolist()
    assert [row["uncertainty"] for row in rows] == pytest.approx(entropy.topk(8).values.tolist(), rel=1e-5)


def test_equal_calls_write_equal_files(posterior: Case, written: Report, tmp_path: Path) -> None:
    fitted, data = posterior
    settings = {"title": TITLE, "seed": 3, "command": "lapwing report <x>", "resamples": 50}
    again = fitted.report(data, tmp_path / "again.html", **settings)
    assert again.path.read_bytes() == written.path.read_bytes()


def counts(x: torch.Tensor) -> tuple[nn.Module, lw.Poisson, torch.Tensor]:
    return nn.Linear(2, 1), lw.Poisson(), torch.arange(60.0).remainder(4).unsqueeze(1)


def multilabel(x: torch.Tensor) -> tuple[nn.Module, lw.Bernoulli, torch.Tensor]:
    return nn.Linear(2, 3), lw.Bernoulli(), (x[:, :1] > torch.tensor([-0.5, 0.0, 0.5])).float()


def heteroscedastic(x: torch.Tensor) -> tuple[nn.Module, lw.HeteroscedasticGaussian, torch.Tensor]:
    return nn.Linear(2, 2), lw.HeteroscedasticGaussian(), x[:, 1:]


def several_outputs(x: torch.Tensor) -> tuple[nn.Module, lw.Gaussian, torch.Tensor]:
    return nn.Linear(2, 3), lw.Gaussian(), torch.cat([x, x[:, :1] + 1], 1)


def segmentation(x: torch.Tensor) -> tuple[nn.Module, lw.Categorical, torch.Tensor]:
    net = nn.Sequential(nn.Unflatten(1, (1, 1, 2)), nn.Conv2d(1, 3, 1))
    return net, lw.Categorical(), (x > 0).long().unsqueeze(1)


@pytest.mark.parametrize("task", [counts, multilabel, heteroscedastic, several_outputs, segmentation])
def test_every_task_has_a_page(task: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "inline_svg", lambda name, ax, alt: f'<svg role="img" id="{name}"></svg>')
    x = torch.randn(60, 2)
    net, likelihood, y = task(x)  # type: ignore[operator]
    fitted = lw.fit(net, [(x[:40], y[:40])], likelihood, prior=1.0)
    report = fitted.report([(x[40:], y[40:])], tmp_path / "page.html", resamples=20)
    assert ("intervals" in report.numbers) == (task in (counts, heteroscedastic, several_outputs))
    assert ("reliability" in report.numbers) == (task in (multilabel, segmentation))
    assert report.verdict.endswith("Only 20 inputs were scored, so that little can be told.")
    parser = Outline()
    parser.feed(report.path.read_text(encoding="utf-8"))
    assert (parser.open, parser.unmatched) == ([], [])


def test_a_band_is_drawn_over_one_input_and_missing_parts_have_a_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page, "inline_svg", lambda name, ax, alt: f'<svg role="img" id="{name}"></svg>')
    x = torch.linspace(-1, 1, 30).unsqueeze(1)
    fitted = lw.fit(nn.Linear(1, 1), [(x, x.sin())], "regression", method=lw.baselines.MapOnly())
    report = fitted.report([(x, x.sin())], tmp_path / "page.html", resamples=20)
    assert len(report.numbers["band"]["x"]) == 120
    text = report.path.read_text(encoding="utf-8")
    for missing in ("effective_parameters", "evidence_curve", "trace"):
        assert report.numbers[missing] is None
    assert "MapOnly has no evidence" in text
    assert "no steps of a tuner" in text
    assert "those of the plain network itself" in report.verdict


def test_wrong_arguments_are_refused_before_anything_is_computed(
    posterior: Case,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fitted, data = posterior
    for settings, words in (({"title": 3}, "title is 3"), ({"seed": 1.5}, "seed is 1.5"), ({"date": 2026}, "date is")):
        with pytest.raises(UnsupportedError, match=words):
            fitted.report(data, tmp_path / "page.html", **settings)
    with pytest.raises(UnsupportedError, match="path is None"):
        fitted.report(data, None)  # type: ignore[arg-type]
    with pytest.raises(FileError, match="no folder does not exist"):
        fitted.report(data, tmp_path / "no folder" / "page.html")
    with pytest.raises(DataError, match="empty"):
        fitted.report([], tmp_path / "page.html")
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(UnsupportedError, match=r"jinja2, which is not installed: pip install 'lapwing\[report\]'"):
        fitted.report(data, tmp_path / "page.html")
    assert list(tmp_path.iterdir()) == []


# Pictures inside a page.


@cache
def drawn(name: str = "first") -> str:
    ax = new_axis(size=(3, 2))
    ax.plot([0, 1], [1, 0], color=COLOURS[1], label="a < b & c")
    ax.axvline(0.5, color=INK)
    ax.set(xlabel="$\\alpha$ & x")
    ax.legend()
    return inline_svg(name, ax, 'A line, "falling" & <straight>.')


def test_equal_figures_give_equal_text_with_ids_of_their_own() -> None:
    first, again, second = drawn(), drawn.__wrapped__(), drawn("second")
    assert first == again
    ids = [set(re.findall(r'\bid="([^"]+)"', text)) for text in (first, second)]
    assert ids[0]
    assert not ids[0] & ids[1]
    used = set(re.findall(r'(?:url\(#|href="#)([^")]+)', first))
    assert used <= ids[0]


def test_a_picture_is_described_and_takes_the_colours_of_the_page() -> None:
    text = drawn()
    assert text.startswith("<svg")
    assert 'role="img"' in text
    assert "A line, &quot;falling&quot; &amp; &lt;straight&gt;." in text
    assert "a &lt; b &amp; c" in text
    assert "currentColor" in text
    assert "var(--c1)" in text
    assert not re.search("#000000|" + "|".join((INK, *COLOURS)), text)
    for unwanted in ("<?xml", "<!DOCTYPE", "<metadata", "<style", "Date", "matplotlib.org"):
        assert unwanted not in text


def test_settings_of_matplotlib_stay() -> None:
    before = dict(matplotlib.rcParams)
    drawn("third")
    assert dict(matplotlib.rcParams) == before


# The verdict follows from the numbers by its rules.

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


def verdict_drawn(n: int, harder: float = 0.0) -> tuple[Tensor, Tensor]:
    """Return confidences, and answers that are right with that probability less ``harder``."""
    confidence = 0.4 + 0.6 * torch.rand(n, dtype=torch.float64)
    return confidence, (torch.rand(n) < confidence - harder).double()


def test_calibrated_answers_are_called_so_nearly_always() -> None:
    """One in twenty is not, by the rule; more than 8 of 40 has a probability below 1e-4."""
    words = [verdict_of(of_labels(*verdict_drawn(60))).answers[0].word for _ in range(40)]
    assert words.count("Yes") >= 32


def test_by_chance_errors_are_those_of_draws() -> None:
    found = AnswerProbabilities(*verdict_drawn(150), of_classes=True)
    right = torch.rand(2000, 150) < found.probability
    errors = torch.tensor([ece(found.probability, row) for row in right])
    share = float((errors <= calibration_error_by_chance(found)).double().mean())
    assert abs(share - 0.975) < 4 * (0.975 * 0.025 * (1 / 2000 + 1 / 1000)) ** 0.5  # both have Monte Carlo errors
    shares = right.double().mean(1)
    assert float(shares.std()) == pytest.approx(mean_error_by_chance(found), rel=4 / 4000**0.5)


def test_many_answers_are_drawn_in_sums_with_the_same_result(monkeypatch: pytest.MonkeyPatch) -> None:
    found = AnswerProbabilities(*verdict_drawn(3000), of_classes=True)
    one_by_one = calibration_error_by_chance(found)
    monkeypatch.setattr(verdict, "MANY", 10)
    assert calibration_error_by_chance(found) == pytest.approx(one_by_one, rel=0.1)  # of 25 draws in the tail


def test_confidence_without_success_is_overconfident() -> None:
    found = verdict_of(of_labels(*verdict_drawn(500, harder=0.25)))
    assert found.answers[0].word == "No"
    assert "are overconfident (they say" in found.sentences
    assert ", but the predictions are better than those of the plain network" in found.sentences


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
    found = of_labels(*verdict_drawn(500))
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
    found = of_labels(*verdict_drawn(200))
    rows = (row("nll", 0.5, 0.5 - (low + high) / 2, low, high),)
    answer = verdict_of(Evaluation(**{**vars(found), "rows": rows})).answers[1]
    assert answer.word == word
    assert answer.short.startswith(short)


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
    assert "Only 20 inputs were scored" in verdict_of(of_labels(*verdict_drawn(20))).sentences
    one = verdict_of(of_labels(*verdict_drawn(1)))
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
