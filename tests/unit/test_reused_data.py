"""Data that are used twice: a fit and its decisions notice them, and refuse them where they are all known."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lapwing as lw

WARNING = lw.errors.CalibrationWarning


def data(n: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 3, generator=generator)
    return x, (x[:, 0] + torch.randn(n, generator=generator) > 0).long()


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


TRAIN, HELD_OUT, CALIBRATION = data(120, 0), data(80, 1), data(80, 2)


def joined(*parts: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts])


def cut(pair: tuple[Tensor, Tensor], n: int) -> tuple[Tensor, Tensor]:
    return pair[0][:n], pair[1][:n]


@pytest.fixture(scope="module")
def posterior() -> lw.Fitted:
    return lw.fit(network(), TRAIN, "classification", validation=HELD_OUT)


@pytest.fixture(autouse=True)
def warnings_are_errors() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("error", WARNING)
        yield


def test_training_data_do_not_validate() -> None:
    with pytest.raises(lw.errors.DataError, match="100% of the validation data are training data of this fit too"):
        lw.fit(network(), TRAIN, "classification", validation=TRAIN)
    with pytest.raises(lw.errors.DataError, match="100% of the validation data"):
        lw.fit(network(), TRAIN, "classification", validation=[cut(TRAIN, 40)])


def test_some_training_data_in_the_validation_data() -> None:
    mixed = joined(cut(HELD_OUT, 60), cut(TRAIN, 20))
    with pytest.warns(WARNING, match="25% of the validation data are training data"):
        fitted = lw.fit(network(), TRAIN, "classification", validation=mixed)
    assert any("25% of the validation data" in finding for finding in fitted.findings)
    assert "25% of the validation data" in fitted.summary()


DECISIONS: dict[str, Callable[[lw.Fitted, Any], Any]] = {
    "conformal": lambda posterior, data: posterior.conformal(data, 0.9),
    "abstain": lambda posterior, data: posterior.abstain(data, 0.9),
    "ood": lambda posterior, data: posterior.ood(data),
}


@pytest.mark.parametrize("decision", DECISIONS)
@pytest.mark.parametrize(("used", "name"), [(TRAIN, "training"), (HELD_OUT, "validation")])
def test_a_decision_takes_data_that_were_not_used(
    decision: str, used: tuple[Tensor, Tensor], name: str, posterior: lw.Fitted
) -> None:
    decide = DECISIONS[decision]
    for _ in range(2):  # it records nothing
        decide(posterior, CALIBRATION)
    with pytest.raises(lw.errors.DataError, match=f"100% of the calibration .* are {name} data of this fit too"):
        decide(posterior, used)
    with pytest.warns(WARNING, match=f"25% of the calibration .* are {name} data"):
        decide(posterior, joined(cut(CALIBRATION, 60), cut(used, 20)))


FORMS: dict[str, Any] = {
    "float64 arrays": (HELD_OUT[0].double().numpy(), HELD_OUT[1].numpy()),
    "targets as numbers": (HELD_OUT[0].numpy(), HELD_OUT[1].numpy().astype(np.int32)),
    "a loader": DataLoader(TensorDataset(*HELD_OUT), batch_size=9, shuffle=True),
}


@pytest.mark.parametrize("form", FORMS)
def test_other_forms_of_the_same_data(form: str, posterior: lw.Fitted) -> None:
    with pytest.raises(lw.errors.DataError, match="validation data of this fit too"):
        posterior.conformal(FORMS[form], 0.9)


def test_scores_of_known_data_are_a_warning(posterior: lw.Fitted, tmp_path: Path) -> None:
    posterior.evaluate(CALIBRATION, resamples=3)
    with pytest.warns(WARNING, match="100% of the data are training data"):
        posterior.evaluate(TRAIN, resamples=3)
    with pytest.warns(WARNING, match="100% of the data are validation data"):
        lw.evaluate({"one": posterior}, HELD_OUT, resamples=3)
    with pytest.warns(WARNING, match="100% of the data are validation data"):
        posterior.conformal(CALIBRATION, 0.9).coverage(HELD_OUT)
    with pytest.warns(WARNING, match="100% of the data are training data"):
        posterior.report(TRAIN, tmp_path / "page.html", resamples=3)


def test_a_file_knows_the_rows(posterior: lw.Fitted, tmp_path: Path) -> None:
    posterior.save(tmp_path / "net")
    again = lw.load(tmp_path / "net", posterior.network.model.double())
    with pytest.raises(lw.errors.DataError, match="validation data of this fit too"):
        again.conformal((HELD_OUT[0].double(), HELD_OUT[1]), 0.9)
    posterior.network.model.float()


def test_data_that_were_added_later_are_known() -> None:
    posterior = lw.fit(network(), TRAIN, "classification", prior=1.0)
    posterior.conformal(HELD_OUT, 0.9)
    for later in (posterior.updated(HELD_OUT), posterior.tuned(lw.tuners.Temperature(HELD_OUT, (1.0, 2.0)))):
        with pytest.raises(lw.errors.DataError, match="data of this fit too"):
            later.conformal(HELD_OUT, 0.9)


def test_a_tuner_with_training_data_is_a_warning() -> None:
    with pytest.warns(WARNING, match="100% of the held-out data of the tuner are training data"):
        fitted = lw.fit(network(), TRAIN, "classification", tuner=lw.tuners.Integrate(TRAIN))
    assert "held-out data of the tuner" in fitted.summary()


def test_data_of_a_tuner_join_the_validation_data(posterior: lw.Fitted) -> None:
    tuned = posterior.tuned(lw.tuners.Grid(CALIBRATION, precisions=(0.5, 2.0)))
    for used in (HELD_OUT, CALIBRATION):
        with pytest.raises(lw.errors.DataError, match="validation data of this fit too"):
            tuned.conformal(used, 0.9)


def test_training_knows_its_rows() -> None:
    trained = lw.train(network(), TRAIN, "classification", recipe=lw.recipes.fixed(1))
    with pytest.raises(lw.errors.DataError, match="training data of this fit too"):
        trained.posterior.conformal(TRAIN, 0.9)


def test_a_discrete_table_raises_no_alarm() -> None:
    """Three columns of four values: most new rows are training rows too, by chance."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randint(0, 4, (600, 3), generator=generator).float()
    y = (x[:, 0] + 2 * torch.rand(600, generator=generator) > 2).long()
    fitted = lw.fit(network(), (x[:300], y[:300]), "classification", validation=(x[300:500], y[300:500]))
    fitted.conformal((x[500:], y[500:]), 0.9)
    fitted.ood((x[500:], y[500:]))
