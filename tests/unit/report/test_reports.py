"""The page: self-contained, small, escaped, equal for equal calls, for every task."""

from __future__ import annotations

import json
import re
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from torch import nn

import lapwing as lw
from lapwing.errors import DataError, FileError, UnsupportedError
from lapwing.report import page
from lapwing.report.page import Report

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
