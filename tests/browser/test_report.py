"""Reports in headless Chromium: no errors, no requests, no overflow, on a phone and a desk, light and dark."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn

import lapwing as lw
from tests.browser.chromium import Chromium, browser, visit

SCREENSHOTS = Path("out/browser")
SMALLEST = 8.0  # pixels, of the exponents on a logarithmic axis; all other text is larger


def trained(net: nn.Module, loss: nn.Module, x: torch.Tensor, y: torch.Tensor, steps: int = 200) -> nn.Module:
    optimiser = torch.optim.Adam(net.parameters(), lr=1e-2)
    for _ in range(steps):
        optimiser.zero_grad()
        loss(net(x), y).backward()
        optimiser.step()
    return net


def classification(path: Path) -> None:
    """Noisy images of digits, with validation data and a title that must be escaped."""
    pixels, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(pixels / 16).float().reshape(-1, 1, 8, 8), torch.tensor(labels)
    x = x + 0.4 * torch.randn_like(x)
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    trained(net, nn.CrossEntropyLoss(), x[:900], y[:900])
    posterior = lw.fit(net, [(x[:900], y[:900])], "classification", validation=(x[900:1100], y[900:1100]))
    title = "Digits <with noise> & error bars"
    posterior.report([(x[1100:], y[1100:])], path, title=title, seed=0, command="make test-browser")


def regression(path: Path) -> None:
    """A curve with a gap in the training data, which gives a band."""
    x = torch.cat([torch.linspace(-3, -1, 60), torch.linspace(1, 3, 60)]).unsqueeze(1)
    y = (2 * x).sin() + 0.2 * torch.randn_like(x)
    net = trained(nn.Sequential(nn.Linear(1, 20), nn.Tanh(), nn.Linear(20, 1)), nn.MSELoss(), x, y, 400)
    test = torch.rand(150, 1) * 6 - 3
    lw.fit(net, [(x, y)], "regression").report([(test, (2 * test).sin() + 0.2 * torch.randn_like(test))], path)


def many_classes(path: Path) -> None:
    """A hundred and twenty classes, and long names of layers."""
    x = torch.randn(700, 20)
    y = (x @ torch.randn(20, 120)).argmax(1)
    layers = {f"encoder_of_table_columns_{i}": nn.Linear(20, 20) for i in range(12)}
    net = nn.Sequential()
    for name, layer in layers.items():
        net.add_module(name, layer)
        net.add_module(f"{name}_activation", nn.Tanh())
    net.add_module("classes", nn.Linear(20, 120))
    trained(net, nn.CrossEntropyLoss(), x[:400], y[:400], 60)
    posterior = lw.fit(net, [(x[:400], y[:400])], "classification")
    posterior.report([(x[400:], y[400:])], path, title="A title of a hundred and twenty classes " * 3)


REPORTS = {"classification": classification, "regression": regression, "many-classes": many_classes}


@pytest.fixture(scope="module")
def page() -> Iterator[Chromium]:
    with browser() as opened:
        yield opened


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("reports")
    paths = {name: folder / f"{name}.html" for name in REPORTS}
    for name, path in paths.items():
        torch.manual_seed(0)
        REPORTS[name](path)
    return paths


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [375, 1280])
@pytest.mark.parametrize("name", REPORTS)
def test_a_report_is_shown_as_it_should_be(
    page: Chromium, written: dict[str, Path], name: str, width: int, dark: bool
) -> None:
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    screenshot = SCREENSHOTS / f"{name}-{width}-{'dark' if dark else 'light'}.png"
    seen = visit(page, written[name], width, dark, screenshot)
    assert seen.messages == []
    assert seen.requests == []
    assert seen.window == width
    assert seen.width <= seen.window
    assert seen.smallest_text >= SMALLEST
    assert seen.facts["ids"] == 0  # no id twice
    assert seen.facts["unnamed"] == 0
    assert seen.facts["captions"]
    assert seen.facts["figures"] >= 4
    assert "evaluation" in seen.facts["numbers"]
    red = int(seen.facts["background"].split("(")[1].split(",")[0])
    assert red < 60 if dark else red > 200
    assert screenshot.stat().st_size > 10_000


def test_errors_requests_and_overflow_are_seen(page: Chromium, tmp_path: Path) -> None:
    """The checks above can fail."""
    bad = tmp_path / "bad.html"
    bad.write_text(
        "<!DOCTYPE html><body><p id=a style='width:3000px;font-size:5px'>wide</p><p id=a>x</p><img src='missing.png'>"
        "<script id=numbers type='application/json'>{}</script><script>console.error('said'); nothing()</script>"
    )
    seen = visit(page, bad, 375, False, tmp_path / "bad.png")
    assert len(seen.messages) >= 2
    assert seen.requests == [(tmp_path / "missing.png").as_uri()]
    assert seen.width > 375
    assert seen.smallest_text < SMALLEST
    assert seen.facts["ids"] == 1
    assert seen.facts["unnamed"] == 1
