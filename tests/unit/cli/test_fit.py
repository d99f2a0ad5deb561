"""``lapwing fit`` gives the posterior of ``lw.fit``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import lapwing as lw
from lapwing.cli.fit import worse_than_chance
from tests.unit.cli.conftest import FITTED, Ran

Run = Callable[..., Ran]
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


def test_advice_names_options(run: Run, tmp_path: Path) -> None:
    assert "would calibrate this posterior: --validation DATA." in run(f"{FIT} --out {tmp_path / 'net'}").out


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
        ("--subset [", "'[' is no regular expression"),
        ("--prior -1", "--prior is -1.0; expected a positive, finite number"),
        ("--prior nan", "--prior is nan; expected a positive, finite number"),
        ("--method swag --validation missing.npz", "there is no file missing.npz"),
    ],
)
def test_bad_settings_are_refused_in_a_line(options: str, message: str, run: Run, tmp_path: Path) -> None:
    assert message in run(f"{FIT} --out {tmp_path / 'net'} {options}").error
    assert not list(tmp_path.iterdir())


def test_outputs_that_cannot_be_written_are_refused_before_the_fit(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lapwing.cli.fit.fit", lambda *_, **__: pytest.fail("the fit began"))
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


def test_overwrite_replaces_a_file(run: Run, tmp_path: Path) -> None:
    (tmp_path / "old").write_text("precious")
    assert run(f"{FIT} --prior 1 --overwrite --out {tmp_path / 'old'}").code == 0
    assert (tmp_path / "old").stat().st_size > 1000
