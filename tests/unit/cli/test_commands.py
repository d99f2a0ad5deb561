"""The commands as a user meets them."""

from __future__ import annotations

import csv
import json
import re
import runpy
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from torch import nn

import lapwing as lw
from lapwing.cli import main
from lapwing.cli.commands import COMMANDS, worse_than_chance
from lapwing.demo.result import Result, Row, table
from tests.unit.cli.conftest import FITTED, Ran

# ``lapwing check`` prints what ``lw.check`` reports.

Run = Callable[..., Ran]


def test_the_report_is_that_of_the_library(run: Run, folder: Path) -> None:
    expected = lw.check(classifier(folder), tensors(folder / "train.npz")[0])
    ran = run(f"check {FITTED} --data train.npz")
    assert ran.out == f"train.npz: 40 rows, inputs 'x'\n{expected}\n".replace("timed=True", "--timed").replace(
        "print(report.details())", "--details"
    )
    whole = expected.details().replace("timed=True", "--timed")
    assert run(f"check {FITTED} --data train.npz --details").out.endswith(f"\n{whole}\n")
    facts = run(f"check {FITTED} --data train.npz --json").facts
    assert facts["weights"] == expected.weights == 4 * 5 + 5 + 5 * 3 + 3
    assert facts["methods"]["Kron"]["stored"] == expected.costs["Kron"].stored
    assert facts["recommended"]["method"] == "Kron"


def test_subset_rows_and_batches_of_a_loader(run: Run) -> None:
    facts = run(f"check {FITTED} --data cli_nets:make_loader --subset last_layer --json").facts
    assert facts["weights"] == 5 * 3 + 3
    assert "30 data" in run(f"check {FITTED} --data cli_nets:make_loader").out


# ``lapwing fit`` gives the posterior of ``lw.fit``.

FIT = f"fit {FITTED} --data train.npz --likelihood classification"


def classifier(folder: Path) -> nn.Module:
    net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    net.load_state_dict(torch.load(folder / "classifier.pt", weights_only=True))
    return net.eval()


def tensors(path: Path) -> tuple[torch.Tensor, torch.Tensor]:
    arrays = np.load(path)
    return torch.from_numpy(arrays["x"]), torch.from_numpy(arrays["y"])


def test_the_posterior_is_that_of_the_library(run: Run, folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "net.lapwing"
    words = f"{FIT} --validation test.npz --method full --subset last_layer --out {out} --json"
    facts = run(words).facts
    net = classifier(folder)
    train, held_out = (tensors(folder / name) for name in ("train.npz", "test.npz"))
    expected = lw.fit(net, [train], "classification", validation=[held_out], method="full", weights="last_layer")
    x = held_out[0]
    torch.testing.assert_close(lw.load(out, net).predict(x).probs, expected.predict(x).probs)
    assert facts["method"] == "Full"
    assert facts["weights"] == 5 * 3 + 3
    assert facts["likelihood"] == "Categorical"
    assert facts["scores"]["on"] == "validation"
    np.testing.assert_allclose(facts["precision"], expected.prior.values, rtol=1e-4)
    assert facts["validation"]["rows"] == 20
    assert facts["out"] == str(out)


def test_without_a_method_regression_is_the_average_of_the_library(run: Run, folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "net.lapwing"
    ran = run(f"fit cli_nets:regressor --weights regressor.pt --data numbers.npz --likelihood regression --out {out}")
    net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))
    net.load_state_dict(torch.load(folder / "regressor.pt", weights_only=True))
    expected = lw.fit(net, [tensors(folder / "numbers.npz")], "regression")
    assert ran.out.splitlines()[0] == "numbers.npz: 60 rows, inputs 'x', target y"
    assert ran.out.splitlines()[-1] == f"Written to {out}"
    assert f"mixture of {len(expected.posterior.cells)}" in ran.out


def test_prior_subset_and_seed(run: Run, tmp_path: Path) -> None:
    facts = run(f"{FIT} --prior 2.5 --subset ^0 --out {tmp_path / 'a'} --json").facts
    assert facts["precision"] == 2.5
    assert facts["weights"] == 4 * 5 + 5
    ella = lambda seed, name: run(f"{FIT} --prior 1 --method ella --seed {seed} --out {tmp_path / name}")
    assert ella(3, "b").code == ella(3, "c").code == ella(4, "d").code == 0
    assert (tmp_path / "b").read_bytes() == (tmp_path / "c").read_bytes()
    assert (tmp_path / "b").read_bytes() != (tmp_path / "d").read_bytes()


def test_a_file_is_replaced_if_asked_and_advice_names_options(run: Run, tmp_path: Path) -> None:
    (tmp_path / "old").write_text("precious")
    ran = run(f"{FIT} --overwrite --out {tmp_path / 'old'}")
    assert "would calibrate these error bars: --validation DATA," in ran.out
    assert (tmp_path / "old").stat().st_size > 1000


def nll_of(note: str) -> float:
    return float(note.partition("(NLL ")[2].partition(",")[0])


def test_a_network_that_is_worse_than_chance_is_noted(run: Run, folder: Path, tmp_path: Path) -> None:
    """Texts of classes in another order than the network's outputs; the figures are those of the training data."""
    words = f"fit {FITTED} --data train.csv --target kind --drop id --likelihood classification --prior 2"
    right = run(f"{words} --out {tmp_path / 'a'}", "--json").facts
    assert right["notes"] == []
    ran = run(f"{words} --classes dog,bird,cat --out {tmp_path / 'b'}")
    x, y = tensors(folder / "train.npz")
    nll = nn.functional.cross_entropy(classifier(folder)(x), torch.tensor([1, 2, 0])[y]).item()
    assert nll > np.log(3)
    (note,) = [line for line in ran.out.splitlines() if "chance" in line]
    assert note.startswith("Note: the network predicts the training targets worse than chance (NLL ")
    assert nll_of(note) == pytest.approx(nll, rel=0.005)  # three digits
    assert ", log 3 = 1.10): are its weights loaded" in note
    assert note.endswith("Give their order by --classes.")


def test_labels_of_two_classes_have_the_chance_of_one_half() -> None:
    x = torch.randn(12, 2, generator=torch.Generator().manual_seed(0))
    net = nn.Linear(2, 2)
    with torch.no_grad():
        net.weight.copy_(5 * torch.eye(2))
        net.bias.zero_()
    fitted = lambda y: lw.fit(net, [(x, y.float())], "multilabel", prior=2.0)
    assert worse_than_chance(fitted(x > 0)) == []
    (note,) = worse_than_chance(fitted(x < 0))
    nll = nn.functional.binary_cross_entropy_with_logits(net(x), (x < 0).float()).item()
    assert nll_of(note) == pytest.approx(nll, rel=0.005)
    assert "log 2 = 0.69" in note
    assert worse_than_chance(lw.fit(net, [(x, -x)], lw.Gaussian(noise_std=0.1), prior=2.0)) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--likelihood clasification", "--likelihood is 'clasification'; expected one of classification, "),
        ("--likelihood clasification", "Did you mean 'classification'?"),
        ("--method krone", "--method is 'krone'; expected one of full, "),
        ("--likelihood regression", "targets have the shape"),
        ("--subset nothing", "no parameter name matches 'nothing'; the model has 0.weight, 0.bias"),
        ("--subset [", "'[' is not a regular expression"),
        ("--prior -1", "--prior is -1.0; expected a positive, finite number"),
    ],
)
def test_bad_settings_are_refused_in_a_line(options: str, message: str, run: Run, tmp_path: Path) -> None:
    assert message in run(f"{FIT} --out {tmp_path / 'net'} {options}").error
    assert not list(tmp_path.iterdir())


def test_outputs_that_cannot_be_written_are_refused_before_the_fit(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lapwing.cli.commands.fit", lambda *_, **__: pytest.fail("the fit began"))
    (tmp_path / "old").write_text("precious")
    cases = {
        "old": "exists; expected a new name. Change --out, or replace it by --overwrite.",
        "no/net": "there is no folder",
        "old/net": "there is no folder",
        ".": "is a folder; expected the name of a file",
    }
    for name, message in cases.items():
        assert message in run(f"{FIT} --out {tmp_path / name}").error
    monkeypatch.setattr("os.access", lambda *_: False)
    assert "may not be written to. Change its permissions, or --out." in run(f"{FIT} --out {tmp_path / 'new'}").error
    assert (tmp_path / "old").read_text() == "precious"


# ``lapwing evaluate`` gives the scores of ``posterior.evaluate`` and ``lw.evaluate``.

EVALUATE = f"evaluate {FITTED} --posterior classifier.lapwing"


def test_one_posterior_is_scored_beside_the_plain_network(run: Run, folder: Path, posterior: Path) -> None:
    loaded = lw.load(posterior, classifier(folder))
    expected = loaded.evaluate([tensors(folder / "test.npz")])
    facts = run(f"{EVALUATE} --data test.npz --json").facts
    scores = facts["evaluation"]["scores"]
    assert list(scores) == [row.name for row in expected.rows]
    for row in expected.rows:
        assert scores[row.name]["posterior"]["value"] == pytest.approx(row.posterior.value, rel=1e-4, abs=1e-6)
        assert scores[row.name]["plain"]["value"] == pytest.approx(row.plain.value, rel=1e-4, abs=1e-6)
    printed = run(f"{EVALUATE} --data test.csv --target kind --drop id").out
    assert "(0 = bird, 1 = cat, 2 = dog)" in printed
    assert "plain network" in printed


def test_several_posteriors_are_ranked_with_one_plain_network(run: Run, tmp_path: Path, posterior: Path) -> None:
    last = tmp_path / "last.lapwing"
    words = f"fit {FITTED} --data train.npz --likelihood classification --subset last_layer --out {last}"
    assert run(words).code == 0
    rows = run(f"{EVALUATE} {last} --data test.npz --json").facts["evaluation"]["rows"]
    assert {row["name"] for row in rows} == {"classifier", "last", "plain network"}
    values = [row["scores"]["nll"]["value"] for row in rows]
    assert values == sorted(values)


def test_networks_without_error_bars_are_named_as_such(run: Run, tmp_path: Path, posterior: Path) -> None:
    words = f"fit {FITTED} --data train.npz --likelihood classification --method map_only --out"
    plain, scaled = tmp_path / "map.lapwing", tmp_path / "scaled.lapwing"
    assert run(f"{words} {plain}").code == run(f"{words} {scaled} --validation test.npz").code == 0
    rows = run(f"{EVALUATE} {plain} {scaled} --data test.npz --json").facts["evaluation"]["rows"]
    assert {row["name"] for row in rows} == {
        "classifier", "map (plain network)", "scaled (plain network with a temperature)",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--data test.csv --drop id,kind", "and no target; expected one. Say which: --target NAME."),
        ("--data numbers.npz", "expected whole class numbers"),
    ],
)
def test_evaluate_refuses_bad_input_in_a_line(options: str, message: str, run: Run, posterior: Path) -> None:
    assert message in run(f"{EVALUATE} {options}").error


# ``lapwing predict`` writes the predictions of the library, row by row.

PREDICT = f"predict {FITTED} --posterior classifier.lapwing"


def columns(path: Path) -> dict[str, list[str]]:
    with path.open(newline="") as file:
        header, *rows = csv.reader(file)
    return dict(zip(header, map(list, zip(*rows, strict=True)), strict=True))


def test_classes_in_every_format(run: Run, folder: Path, tmp_path: Path, posterior: Path) -> None:
    expected = lw.load(posterior, classifier(folder)).predict(tensors(folder / "test.npz")[0])
    names = ["class", "probability_bird", "probability_cat", "probability_dog", "entropy", "epistemic"]
    for suffix in ("csv", "npz", "parquet"):
        out = tmp_path / f"p.{suffix}"
        facts = run(f"{PREDICT} --data test.npz --classes bird,cat,dog --batch-size 7 --out {out} --json").facts
        assert (facts["rows"], facts["out"]) == (20, str(out))
        assert facts["columns"] == (names if suffix != "npz" else [*facts["columns"]])
    table, arrow, arrays = (
        columns(tmp_path / "p.csv"),
        pq.read_table(tmp_path / "p.parquet"),
        np.load(tmp_path / "p.npz"),
    )
    labels = np.array(["bird", "cat", "dog"])[expected.probs.argmax(1)]
    assert table["class"] == arrow["class"].to_pylist() == list(labels)
    assert list(table) == arrow.column_names == names
    np.testing.assert_allclose(arrays["probability"], expected.probs, rtol=1e-4)
    for values in ([float(v) for v in table["probability_dog"]], arrow["probability_dog"].to_pylist()):
        np.testing.assert_allclose(values, expected.probs[:, 2], rtol=1e-4)
    for name in ("entropy", "epistemic"):
        np.testing.assert_allclose(arrays[name], getattr(expected, name), rtol=1e-3, atol=1e-5)
        np.testing.assert_allclose([float(v) for v in table[name]], arrays[name], rtol=1e-8)
    assert arrays["classes"].tolist() == ["bird", "cat", "dog"]
    assert arrays["class"].tolist() == expected.probs.argmax(1).tolist()


def test_numbers_have_means_and_intervals(run: Run, folder: Path, tmp_path: Path, regression: Path) -> None:
    net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))
    net.load_state_dict(torch.load(folder / "regressor.pt", weights_only=True))
    expected = lw.load(regression, net.eval()).predict(tensors(folder / "numbers.npz")[0])
    words = "predict cli_nets:regressor --weights regressor.pt --posterior regressor.lapwing --data numbers.npz"
    out = tmp_path / "p.csv"
    ran = run(f"{words} --level 0.8 --out {out}")
    assert ran.out.splitlines() == [
        "numbers.npz: 60 rows, inputs 'x'",
        f"60 predictions written to {out}: mean, std, low, high, epistemic_std",
    ]
    table = {name: np.array(values, dtype=float) for name, values in columns(out).items()}
    low, high = expected.interval(0.8)
    for name, values in (
        ("mean", expected.mean), ("std", expected.std), ("low", low), ("high", high),
        ("epistemic_std", expected.epistemic_variance.sqrt()),
    ):  # fmt: skip
        np.testing.assert_allclose(table[name], values[:, 0], rtol=1e-4, atol=1e-5)


def test_a_binary_network_has_one_probability(run: Run, folder: Path, tmp_path: Path) -> None:
    torch.save({"weight": torch.tensor([[1.0, -1.0, 0.5, 0.0]]), "bias": torch.zeros(1)}, folder / "binary.pt")
    arrays = np.load(folder / "train.npz")
    np.savez(folder / "binary.npz", x=arrays["x"], y=arrays["y"] > 0)
    model = "cli_nets:binary --weights binary.pt"
    assert run(f"fit {model} --data binary.npz --likelihood binary --prior 1 --out {tmp_path / 'b'}").code == 0
    out = tmp_path / "p.csv"
    assert run(f"predict {model} --posterior {tmp_path / 'b'} --data binary.npz --out {out}").code == 0
    assert list(columns(out)) == ["probability", "entropy", "epistemic"]
    words = f"predict {model} --posterior {tmp_path / 'b'} --data binary.npz --classes no,yes"
    assert run(f"{words} --out {tmp_path / 'q.csv'} --json").facts["columns"][0] == "probability_yes"


def test_targets_are_left_out_and_loaders_are_read(run: Run, tmp_path: Path, posterior: Path) -> None:
    words = f"{PREDICT} --data test.csv --target kind --drop id --out {tmp_path / 'a.csv'}"
    assert run(words).out.startswith("test.csv: 20 rows, 4 inputs\n")
    assert run(f"{PREDICT} --data cli_nets:make_loader --out {tmp_path / 'b.csv'} --json").facts["rows"] == 30


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--data test.npz --out p.txt", "--out is 'p.txt'; expected a name that ends in .csv or .npz or .parquet."),
        (
            "--data test.npz --out test.npz",
            "--out is test.npz, which is the file of --data test.npz; expected another. Change --out.",
        ),
        ("--data test.npz --out p.csv --posterior none.lapwing", "there is no file none.lapwing; expected a posterior"),
        ("--data test.npz --out p.csv --posterior train.npz", "train.npz"),
        (
            "--data test.npz --out p.csv --classes bird,cat",
            "--classes has 2 names and the network 3 outputs; expected 3 names.",
        ),
        ("--data test.csv --out p.csv", "the column 'id' of test.csv is text"),
        ("--data test.csv --drop id,kind,a --out p.csv", "does not take the inputs of test.csv"),
    ],
)
def test_predict_refuses_bad_input_in_a_line(
    options: str, message: str, run: Run, posterior: Path, folder: Path
) -> None:
    assert message in run(f"{PREDICT} {options}").error
    assert not (folder / "p.csv").exists()


def test_a_posterior_of_another_model_is_refused(run: Run, folder: Path, tmp_path: Path, posterior: Path) -> None:
    state = torch.load(folder / "classifier.pt", weights_only=True)
    torch.save({name: 2 * tensor for name, tensor in state.items()}, tmp_path / "other.pt")
    words = f"{PREDICT} --data test.npz --out {tmp_path / 'p.csv'} --weights {tmp_path / 'other.pt'}"
    assert "belongs to another model" in run(words).error


def test_columns_are_kept_beside_their_predictions(run: Run, folder: Path, tmp_path: Path, posterior: Path) -> None:
    for name in ("p.csv", "p.parquet", "p.npz"):
        out = tmp_path / name
        facts = run(f"{PREDICT} --data test.csv --keep id,kind --out {out} --json").facts
        assert facts["columns"][:3] == ["id", "kind", "class"]
    assert columns(tmp_path / "p.csv")["id"] == [f"row {i}" for i in range(20)]
    assert pq.read_table(tmp_path / "p.parquet")["id"].to_pylist() == [f"row {i}" for i in range(20)]
    assert np.load(tmp_path / "p.npz")["id"].tolist() == [f"row {i}" for i in range(20)]
    assert "test.csv has no 'ids'" in run(f"{PREDICT} --data test.csv --keep ids --out {tmp_path / 'q.csv'}").error
    (folder / "same.csv").write_text("a,b,c,d,class\n1,2,3,4,5\n")
    error = run(f"{PREDICT} --data same.csv --keep class --out {tmp_path / 'q.csv'}").error
    assert "--keep names 'class', and a prediction has that name too" in error
    error = run(f"{PREDICT} --data test.npz --keep y --out {tmp_path / 'q.csv'}").error
    assert "test.npz has no columns to keep" in error


# ``lapwing compare`` ranks as ``lw.compare`` does.

BOTH = "compare cli_nets:classifier cli_nets:wide --weights classifier.pt wide.pt"


def test_models_are_ranked_by_their_evidence(run: Run, folder: Path, posterior: Path, other: Path) -> None:
    wide = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    wide.load_state_dict(torch.load(folder / "wide.pt", weights_only=True))
    loaded = {"classifier": lw.load(posterior, classifier(folder)), "wide": lw.load(other, wide.eval())}
    expected = lw.compare(loaded)
    words = f"{BOTH} --posterior classifier.lapwing wide.lapwing"
    facts = run(f"{words} --json").facts
    assert facts["best"] == expected.best
    assert [row["name"] for row in facts["candidates"]] == [row.name for row in expected.candidates]
    for row, candidate in zip(facts["candidates"], expected.candidates, strict=True):
        assert row["log_evidence"] == pytest.approx(candidate.log_evidence, rel=1e-5)
    again = run(f"{BOTH} --posterior classifier.lapwing --posterior wide.lapwing")
    assert again.out.splitlines()[0].split() == str(expected).splitlines()[0].split()


def test_one_model_serves_several_posteriors(run: Run, tmp_path: Path, posterior: Path) -> None:
    last = tmp_path / "classifier.lapwing"  # the same name in another folder
    words = f"{FITTED} --data train.npz --likelihood classification"
    assert run(f"fit {words} --subset last_layer --out {last}").code == 0
    facts = run(f"compare {FITTED} --posterior classifier.lapwing {last} --json").facts
    assert {row["name"] for row in facts["candidates"]} == {"classifier.lapwing", str(last)}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (f"{BOTH} --posterior classifier.lapwing", "MODEL was given 2 times and --posterior 1 times; expected as many"),
        (
            "compare cli_nets:classifier --weights classifier.pt wide.pt --posterior classifier.lapwing a b",
            "--weights was given 2 times and --posterior 3 times",
        ),
        (f"{BOTH} --posterior classifier.lapwing classifier.lapwing", "names classifier.lapwing twice"),
        (f"{BOTH} --posterior wide.lapwing classifier.lapwing", "belongs to another model"),
        (
            "compare cli_nets:classifier cli_nets:regressor --weights classifier.pt regressor.pt "
            "--posterior classifier.lapwing regressor.lapwing",
            "different numbers of data",
        ),
    ],
)
def test_what_does_not_match_is_refused(
    words: str, message: str, run: Run, posterior: Path, other: Path, regression: Path
) -> None:
    assert message in run(words).error


# ``lapwing report`` writes the page of ``posterior.report``.

REPORT = f"report {FITTED} --posterior classifier.lapwing --data test.npz"


def test_the_page_names_its_command_and_has_the_verdict_of_the_library(
    run: Run, folder: Path, tmp_path: Path, posterior: Path
) -> None:
    out = tmp_path / "report.html"
    words = f"{REPORT} --seed 4 --out {out}"
    facts = run(f"{words} --json").facts
    loaded = lw.load(posterior, classifier(folder))
    expected = loaded.evaluate([tensors(folder / "test.npz")], resamples=10)["nll"].posterior.value
    page = out.read_text()
    assert facts["out"] == str(out)
    assert f"lapwing {words} --json" in page
    assert "cli_nets:classifier" in page
    nll = facts["report"]["evaluation"]["scores"]["nll"]["posterior"]["value"]
    assert nll == pytest.approx(expected, rel=1e-4)
    assert facts["verdict"] in page.replace("&#39;", "'")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--out report.pdf", "--out is 'report.pdf'; expected a name that ends in .html or .htm."),
        ("--out no/report.html", "there is no folder no."),
    ],
)
def test_report_refuses_bad_input_in_a_line(options: str, message: str, run: Run, posterior: Path) -> None:
    assert message in run(f"{REPORT} {options}").error


# The command line as a user meets it.


def test_tables_are_printed_then_paths_and_the_picture_shows_its_results(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With runs that end at once."""
    names = ("digits", "diabetes", "bands")
    results = {name: Result(name, {}, 0, (Row("plain", {"NLL": 1.25}),), {}) for name in names}
    for name, result in results.items():
        monkeypatch.setattr(f"lapwing.demo.tasks.run_{name}", lambda settings, result=result: result)
    draw = lambda one, other, path: path.write_text(f"{one.experiment} and {other.experiment}")
    monkeypatch.setattr("lapwing.demo.tasks.draw_overview", draw)
    assert main(["demo", "--out", str(tmp_path)]) == 0
    files = ["overview.png", "results.json"]
    tables = "".join(table(result) + "\n\n" for result in results.values())
    printed = capsys.readouterr()
    assert printed.out == tables + "".join(f"{tmp_path / name}\n" for name in files)
    assert printed.err == ""
    assert list(json.loads((tmp_path / "results.json").read_text())) == list(names)
    assert {path.name for path in tmp_path.iterdir()} == set(files)
    assert (tmp_path / "overview.png").read_text() == "digits and bands"


def test_a_run_leaves_the_number_of_threads_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, seen = torch.get_num_threads(), []

    def ended(settings: object) -> Result:
        seen.append(torch.get_num_threads())
        raise OSError("the disk is full")

    monkeypatch.setattr("lapwing.demo.tasks.run_digits", ended)
    torch.set_num_threads(2)
    try:
        assert main(["demo", "--out", str(tmp_path)]) == 1
        assert (seen, torch.get_num_threads()) == ([1], 2)
    finally:
        torch.set_num_threads(before)


def test_missing_extras_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "lapwing.demo.tasks", raising=False)
    monkeypatch.delattr("lapwing.demo.tasks", raising=False)
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    assert main(["demo", "--out", str(tmp_path)]) == 1
    assert "pip install 'lapwing[run]'" in capsys.readouterr().err


def test_python_m_lapwing_is_the_same_command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run as ``python -m`` runs it, in this process: another one would import PyTorch again."""
    monkeypatch.delitem(sys.modules, "lapwing.__main__", raising=False)
    monkeypatch.setattr(sys, "argv", ["lapwing", "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("lapwing", run_name="__main__", alter_sys=True)
    assert ended.value.code == 0
    assert "demo" in capsys.readouterr().out


# The commands of docs/command_line.md run as they are printed, and print what is shown.

PAGE = (Path(__file__).parents[3] / "docs" / "command_line.md").read_text(encoding="utf-8")
PYTHON = re.search(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
SHELL = re.compile(r"^```sh\n(.*?)^```$(?:\n\n^```text\n(.*?)^```$)?", re.MULTILINE | re.DOTALL)


def test_the_worked_example(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Lines of output begin with the words that are shown; numbers may differ between machines."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "digits", raising=False)
    assert PYTHON is not None
    (tmp_path / "digits.py").write_text(PYTHON.group(1))
    ran = set()
    with torch.random.fork_rng(devices=[]):
        for commands, shown in SHELL.findall(PAGE):
            for line in commands.splitlines():
                words = shlex.split(line)
                if words[0] == "python":
                    runpy.run_path(words[1], run_name="__main__")
                    continue
                assert main(words[1:]) == 0, capsys.readouterr().err
                printed = capsys.readouterr().out
                ran.add(words[1])
            if shown:
                assert [line.split()[:1] for line in shown.splitlines()] == [
                    line.split()[:1] for line in printed.splitlines()
                ]
    monkeypatch.delitem(sys.modules, "digits")
    assert json.loads(printed)["command"] == "evaluate"
    assert ran == set(COMMANDS) - {"demo"}
    assert {path.name for path in tmp_path.iterdir()} >= {"digits.lapwing", "predictions.csv", "report.html"}


def test_every_command_and_option_is_on_the_page() -> None:
    assert all(f"`lapwing {name}`" in PAGE for name in COMMANDS)
    documented = (
        "weights", "target", "inputs", "drop", "keep", "classes", "batch-size", "likelihood", "validation", "method",
        "subset", "prior", "json", "traceback", "overwrite", "seed", "device", "version", "level", "out",
    )  # fmt: skip
    assert all(f"--{name}" in PAGE for name in documented)
