"""The documentation: examples, links, the README and the site."""

from __future__ import annotations

import importlib
import inspect
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
import torch
from effective_parameters import GAMMA, effective_parameters_picture
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lapwing as lw
from tests.pages import DOCS, PAGES, examples, named, pages_with_examples, run_examples
from tests.pixels import drawn, inked, share

# Every Python example of a page runs, every link leads somewhere.

LINK = re.compile(r"\]\(([^)#:]+)(?:#[^)]*)?\)")


@pytest.mark.parametrize("page", pages_with_examples(integrations=False), ids=named)
def test_examples_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # examples may write files
    run_examples(page, integrations=False)


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_links_lead_somewhere(page: Path) -> None:
    missing = [link for link in LINK.findall(page.read_text(encoding="utf-8")) if not (page.parent / link).exists()]
    assert not missing


@pytest.mark.parametrize("page", sorted((DOCS / "methods").glob("*.md")), ids=named)
def test_a_page_of_methods_has_an_example_and_ends_with_references(page: Path) -> None:
    sections = re.findall(r"^## (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    assert "Example" in sections
    assert sections[-1] in ("Reference", "References")


def test_notebooks_are_executed_small_and_linked() -> None:
    """`make notebooks` executes them; the site shows what is stored."""
    for path in (DOCS / "notebooks").glob("*.ipynb"):
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        code = [cell for cell in cells if cell["cell_type"] == "code"]
        assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
        kinds = [output["output_type"] for cell in code for output in cell["outputs"]]
        assert "display_data" in kinds
        assert "error" not in kinds
        assert path.stat().st_size < 150_000
        assert f"notebooks/{path.stem}.md" in NAVIGATION
        text = "".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
        assert not [link for link in LINK.findall(text) if not (path.parent / link).exists()]


def test_the_gallery_shows_what_its_examples_draw() -> None:
    text = (DOCS / "gallery.md").read_text(encoding="utf-8")
    drawn_there = re.findall(r'savefig\("(\w+\.png)"', text)
    assert drawn_there == re.findall(r"\]\(images/gallery/(\w+\.png)\)", text)
    assert set(drawn_there) == {path.name for path in (DOCS / "images" / "gallery").iterdir()}


PARTS = [source for _, source in examples(DOCS / "extending.md") if re.search("^class (?!Sinh)", source, re.MULTILINE)]


@pytest.mark.parametrize("source", PARTS, ids=lambda source: re.search(r"^class (\w+)", source, re.MULTILINE)[1])
def test_a_part_of_ones_own_is_short(source: str) -> None:
    """docs/extending.md promises it."""
    lines = [line for line in source.splitlines() if line.strip()]
    assert len(lines) <= 25
    assert sum(line.startswith("from lapwing.") for line in lines) <= 2


# docs/architecture.md names the files that a fit and a prediction pass through.

ARCHITECTURE = (DOCS / "architecture.md").read_text(encoding="utf-8")
LIBRARY = DOCS.parent / "lapwing"


def passed(call: Callable[[], Any]) -> tuple[Any, dict[str, set[CodeType]]]:
    """Return the result of a call, and which functions of each file of the library it enters."""
    entered: dict[str, set[CodeType]] = {}

    def watch(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if code.co_filename.startswith(str(LIBRARY)) and not code.co_name.startswith("<"):
            entered.setdefault(Path(code.co_filename).relative_to(LIBRARY).as_posix(), set()).add(code)

    before = sys.gettrace()
    sys.settrace(watch)
    try:
        return call(), entered
    finally:
        sys.settrace(before)


def test_the_walks_are_those_that_the_code_takes() -> None:
    """Every file of a walk runs, and every file that runs eight functions is named."""
    net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2)).eval()
    x, y = torch.randn(20, 3), torch.randint(0, 2, (20,))
    data = DataLoader(TensorDataset(x, y), 8)
    posterior, fit = passed(lambda: lw.fit(net, data, "classification", progress=False))
    _, predict = passed(lambda: posterior.predict(x).probs)
    for title, entered in (("fit", fit), ("predict", predict)):
        walk = re.split("\n## |\nLoaders ", ARCHITECTURE.partition(f"## How one `{title}` travels")[2])[0]
        files = set(re.findall(r"`([a-z_/]+\.py)`", walk))
        assert files <= set(entered)
        unnamed = {name for name, functions in entered.items() if len(functions) >= 8} - files
        assert unnamed <= {"runtime/settings.py", "runtime/threads.py"}  # at every call


# The lines of the README do what they say.

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")


def test_the_lines_of_the_readme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    centres = 3 * torch.randn(4, 5)
    labels = torch.randint(0, 4, (500,))
    drawn = centres[labels] + 0.6 * torch.randn(500, 5)
    train, held_out, test = ((drawn[rows], labels[rows]) for rows in torch.arange(500).split([200, 200, 100]))
    model = nn.Linear(5, 4)
    optimiser = torch.optim.Adam(model.parameters(), lr=0.1)
    for _ in range(40):
        optimiser.zero_grad()
        nn.functional.cross_entropy(model(train[0]), train[1]).backward()
        optimiser.step()
    names: dict[str, Any] = {
        "model": model, "train_loader": [train], "held_out": held_out, "test": test, "x": test[0]
    }  # fmt: skip
    (lines,) = re.findall(r"^```python\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    exec(compile(lines, "README.md", "exec"), names)
    torch.testing.assert_close(names["probs"].sum(1), torch.ones(100))
    assert names["error_bars"].shape == (100, 4)
    assert (tmp_path / "report.html").stat().st_size < 1_000_000
    (line,) = re.findall(r"`low, high = (.*?)`\.", README)
    numbers = {
        "lw": lw,
        "model": model,
        "train": (drawn, drawn[:, :4]),
        "held_out": (drawn, drawn[:, :4] + 1),
        "x": drawn,
    }
    low, high = eval(line, numbers)
    assert (low < high).all()


def test_links_of_the_readme_lead_somewhere() -> None:
    assert not [link for link in LINK.findall(README) if not (Path(__file__).parents[2] / link).exists()]


# The map of the code is true.


def files_passed(call: Callable[[], object]) -> set[str]:
    """The files of the library that have functions which run in a call, relative to its folder."""
    library, files = str(Path(lw.__file__).parent) + "/", set[str]()

    def note(frame: FrameType, event: str, value: object) -> None:
        files.add(frame.f_code.co_filename)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(before)
    return {name.removeprefix(library) for name in files if name.startswith(library)}


def test_the_map_names_the_files_of_a_fit_and_of_a_prediction() -> None:
    text = (DOCS / "architecture.md").read_text(encoding="utf-8")
    sections = re.findall(r"^## How one `(\w+)` travels$(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    listed = {call: set(re.findall(r"`([\w/]+\.py)`", section)) for call, section in sections}
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))
    x, y = torch.randn(20, 3), torch.arange(20) % 2
    fitted: list[lw.Fitted] = []
    run = lambda: fitted.append(lw.fit(model, [(x, y)], "classification"))
    run()  # what is computed once for a process is left out, whichever tests ran before
    fitted[0].predict(x)
    fit = files_passed(run)
    predict = files_passed(lambda: fitted[0].predict(x).probs)
    assert fit <= listed["fit"]
    assert listed["fit"] - fit <= {"fitted.py"}  # the result, which no function of that file makes
    assert predict <= listed["fit"] | listed["predict"]
    assert all((Path(lw.__file__).parent / name).exists() for name in listed["predict"])


# The documentation site has every page in its navigation, and every public name with an example in its reference.

ROOT = Path(__file__).parents[2]
SITE_DOCS = ROOT / "docs"
NAVIGATION = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2]
ENTRIES = {
    name.rpartition(".")[2]
    for page in (SITE_DOCS / "reference").glob("*.md")
    for name in re.findall(
        r"^(?:::: |    options: \{heading: )([^\s}]+)", page.read_text(encoding="utf-8"), re.MULTILINE
    )
}


def public() -> Iterator[tuple[str, Any]]:
    """Every public name with its object: those of ``lw`` itself and of its namespaces."""
    for name in lw.__all__:
        value = getattr(lw, name)
        if inspect.ismodule(value):
            yield from ((f"{name}.{each}", getattr(value, each)) for each in value.__all__)
        else:
            yield name, value


NAMES = dict(public())
MEMBERS = {
    f"Fitted.{name}": getattr(lw.Fitted, name)
    for name in dir(lw.Fitted)
    if not name.startswith("_") and inspect.isfunction(getattr(lw.Fitted, name))
}


def test_every_page_is_in_the_navigation() -> None:
    pages = {page.relative_to(SITE_DOCS).as_posix() for page in SITE_DOCS.rglob("*.md")}
    assert not {page for page in pages if not re.search(rf"(?:- |: ){re.escape(page)}$", NAVIGATION, re.MULTILINE)}


@pytest.mark.parametrize("name", NAMES)
def test_every_public_name_has_an_entry_in_the_reference(name: str) -> None:
    assert name.rpartition(".")[2] in ENTRIES


def test_a_posterior_inherits_no_members() -> None:
    """The site lists the members of a class without those that it inherits."""
    assert {member.__qualname__.partition(".")[0] for member in MEMBERS.values()} == {"Fitted"}


@pytest.mark.parametrize("name", {**NAMES, **MEMBERS})
def test_every_public_name_has_an_example(name: str) -> None:
    assert ">>>" in (inspect.getdoc({**NAMES, **MEMBERS}[name]) or "")


# Modules for other packages name the extra to install where the package is missing.


@pytest.mark.parametrize(
    ("module", "packages"),
    [
        ("sklearn", ("sklearn",)), ("lightning", ("lightning", "lightning.pytorch", "pytorch_lightning")),
        ("botorch", ("botorch",)),
    ],
)  # fmt: skip
def test_missing_packages_are_named(module: str, packages: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = (f"lapwing.{module}", *(f"{package}." for package in packages))
    for name in [name for name in sys.modules if name.startswith(loaded)]:
        monkeypatch.delitem(sys.modules, name)
    for package in packages:
        monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=rf"pip install 'lapwing\[{module}\]'"):
        importlib.import_module(f"lapwing.{module}")


# The picture of effective parameters in the tutorials.


def draw(layers: Any, path: Path) -> None:
    effective_parameters_picture(*layers, path)


def layers(count: int = 3, part: float = 0.5) -> tuple[dict[str, float], dict[str, int]]:
    """γ and the number of weights of each layer."""
    sizes = {str(i): 20 * (i + 1) for i in range(count)}
    return {name: part * size for name, size in sizes.items()}, sizes


@pytest.fixture(scope="module")
def half(tmp_path_factory: pytest.TempPathFactory) -> torch.Tensor:
    """Three layers, of whose weights the data determine half."""
    return drawn(draw, layers(), tmp_path_factory.mktemp("half"))


def test_it_is_not_blank(half: torch.Tensor, tmp_path: Path) -> None:
    for pixels in (half, drawn(draw, ({"": 1.0}, {"": 4}), tmp_path)):
        assert min(pixels.shape[:2]) > 500
        assert 0.02 < inked(pixels) < 0.9


def test_effective_parameters_fill_their_share_of_the_weights(half: torch.Tensor, tmp_path: Path) -> None:
    none, quarter, whole = (share(drawn(draw, layers(part=part), tmp_path), GAMMA) for part in (0.0, 0.25, 1.0))
    assert none < 0.01  # the legend
    assert share(half, GAMMA) - none == pytest.approx(2 * (quarter - none), rel=0.02)
    assert whole - none == pytest.approx(4 * (quarter - none), rel=0.02)


def test_many_layers_need_more_room(half: torch.Tensor, tmp_path: Path) -> None:
    many = drawn(draw, layers(30), tmp_path)
    assert many.shape[0] > 3 * half.shape[0]
    assert many.shape[1] == half.shape[1]
