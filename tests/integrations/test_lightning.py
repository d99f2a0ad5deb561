"""Lightning: modules, Trainers and data modules as ``lw.fit`` takes them, and the callback."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Subset, TensorDataset

import lapwing as lw
from lapwing.errors import DataError, ModelError, UnsupportedError
from lapwing.lightning import LaplaceCallback

pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning's advice on workers, loggers and logging intervals
X = torch.randn(250, 3, generator=torch.Generator().manual_seed(0))
Y = (X[:, 0] + 0.3 * X[:, 1] > 0).long()
TRAIN = DataLoader(TensorDataset(X[:150], Y[:150]), 32, shuffle=True)
HELD_OUT = DataLoader(TensorDataset(X[150:], Y[150:]), 32)


class Module(lightning.LightningModule):
    """A module with all that may stand in the way: dropout, BatchNorm, logging in the forward pass, metrics."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, 2))
        self.save_hyperparameters()

    def forward(self, x: Tensor) -> Tensor:
        self.log("input", x.mean())
        return self.body(x)

    def training_step(self, batch: Any, index: int) -> Tensor:
        loss = cross_entropy(self(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("held out", cross_entropy(self(batch[0]), batch[1]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), 1e-2)


class Rows(lightning.LightningDataModule):
    def train_dataloader(self) -> DataLoader[Any]:
        return TRAIN

    def val_dataloader(self) -> DataLoader[Any]:
        return HELD_OUT


def quiet_trainer(*callbacks: Any, epochs: int = 2) -> lightning.Trainer:
    return lightning.Trainer(
        max_epochs=epochs, logger=False, enable_checkpointing=False, enable_progress_bar=False, accelerator="cpu",
        enable_model_summary=False, callbacks=list(callbacks),
    )  # fmt: skip


@pytest.fixture(scope="module")
def trainer() -> lightning.Trainer:
    torch.manual_seed(0)
    trainer = quiet_trainer()
    trainer.fit(Module(), TRAIN, HELD_OUT)
    return trainer


def plain(module: Module) -> nn.Module:
    """The network of a module on its own, in evaluation mode, as one would write it without Lightning."""
    network = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, 2))
    network.load_state_dict(module.body.state_dict())
    return network.eval()


def test_module_gives_the_posterior_of_its_network(trainer: lightning.Trainer) -> None:
    module = trainer.lightning_module
    assert module.training
    data = [(X[:150], Y[:150])]
    posterior = lw.fit(module, data, "classification")
    expected = lw.fit(plain(module), data, "classification")
    torch.testing.assert_close(posterior.predict(X).probs, expected.predict(X).probs, rtol=1e-3, atol=1e-4)
    assert module.training
    assert module.trainer is trainer
    assert callable(module.log)
    assert "log" not in vars(module)


def test_trainer_brings_module_and_data(trainer: lightning.Trainer) -> None:
    posterior = lw.fit(trainer, None, "classification", prior=1.0)
    expected = lw.fit(trainer.lightning_module, [(X[:150], Y[:150])], "classification", prior=1.0)
    torch.testing.assert_close(posterior.predict(X).probs, expected.predict(X).probs, rtol=1e-4, atol=1e-5)


def test_data_module_brings_its_training_data(trainer: lightning.Trainer) -> None:
    posterior = lw.fit(trainer, Rows(), "classification", prior=1.0)
    expected = lw.fit(trainer, TRAIN, "classification", prior=1.0)
    torch.testing.assert_close(posterior.predict(X).probs, expected.predict(X).probs, rtol=1e-4, atol=1e-5)


def test_posterior_outlives_further_training_and_is_saved(tmp_path: Path) -> None:
    torch.manual_seed(1)
    module, first = Module(), quiet_trainer()
    first.fit(module, TRAIN)
    posterior = lw.fit(first, None, "classification", prior=1.0)
    before = posterior.predict(X).probs
    posterior.save(tmp_path / "net.lapwing")
    again = lw.load(tmp_path / "net.lapwing", module)
    torch.testing.assert_close(again.predict(X).probs, before)
    quiet_trainer().fit(module, TRAIN)
    assert module.training
    torch.testing.assert_close(posterior.predict(X).probs, before)
    with pytest.raises(lw.errors.FileError):
        lw.load(tmp_path / "net.lapwing", module)


def test_check_takes_a_module(trainer: lightning.Trainer) -> None:
    assert "body.0" in lw.check(trainer.lightning_module, X[:8]).details()


def test_module_without_trainer() -> None:
    module = Module()
    assert lw.fit(module, [(X, Y)], "classification", prior=1.0).predict(X[:4]).probs.shape == (4, 2)
    assert module.training


def test_callback_fits_at_the_end_and_calibrates_with_validation_data() -> None:
    callback = LaplaceCallback("classification")
    trainer = quiet_trainer(callback)
    trainer.fit(Module(), TRAIN, HELD_OUT)
    assert callback.posterior is not None
    expected = lw.fit(trainer, None, "classification", validation=HELD_OUT)
    torch.testing.assert_close(callback.posterior.predict(X).probs, expected.predict(X).probs, rtol=1e-3, atol=1e-4)
    assert "Integrate" in callback.posterior.summary()


def test_callback_hands_its_settings_on() -> None:
    callback = LaplaceCallback("classification", calibrate=False, method=lw.Diagonal(), weights=lw.last_layer)
    quiet_trainer(callback).fit(Module(), datamodule=Rows())
    assert callback.posterior is not None
    assert callback.posterior.method == "Diagonal"
    assert callback.posterior.network.selection.size == 18
    assert "Integrate" not in callback.posterior.summary()


def test_callback_refuses_before_the_training() -> None:
    with pytest.raises(UnsupportedError, match="classification"):
        LaplaceCallback("clasification")


PROCESSES = """
import warnings
import lightning, torch
from tests.integrations.test_lightning import HELD_OUT, X, Y, Module
import lapwing as lw
from lapwing.lightning import LaplaceCallback
from torch.utils.data import DataLoader, Subset, TensorDataset

warnings.simplefilter("ignore")
torch.manual_seed(0)
module, callback = Module(), LaplaceCallback("classification")
trainer = lightning.Trainer(
    max_epochs=1, strategy="ddp", devices=2, accelerator="cpu", callbacks=[callback], logger=False,
    enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
)
train = DataLoader(TensorDataset(X[:149], Y[:149]), 32, shuffle=True)  # an odd number: one process repeats a row
trainer.fit(module, train, HELD_OUT)
alone = lw.fit(module, (X[:149], Y[:149]), "classification", validation=HELD_OUT)
difference = (callback.posterior.predict(X).probs - alone.predict(X).probs).abs().max()
print(f"process {trainer.global_rank}: {'same' if difference < 1e-3 else float(difference)}\\n", end="", flush=True)
"""


def test_two_processes_fit_the_posterior_of_one(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(PROCESSES, encoding="utf-8")
    path = os.pathsep.join([str(Path(__file__).parents[2]), *sys.path])
    settings = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    run = subprocess.run([sys.executable, str(script)], env=settings, capture_output=True, text=True, timeout=200)
    assert run.returncode == 0, run.stderr[-3000:]
    assert {"process 0: same", "process 1: same"} <= set(run.stdout.splitlines()), run.stdout[-2000:]


def test_trainer_before_training_is_refused() -> None:
    with pytest.raises(ModelError, match=r"trainer\.fit"):
        lw.fit(quiet_trainer(), TRAIN, "classification")
    with pytest.raises(DataError, match="data is None"):
        lw.fit(Module(), None, "classification")


def test_a_recipe_of_crossfit() -> None:
    data = TensorDataset(X[:150], Y[:150])

    def train_fn(rows: Tensor, seed: int) -> lightning.Trainer:
        trainer = quiet_trainer()
        trainer.fit(Module(), DataLoader(Subset(data, rows.tolist()), 32))
        return trainer

    crossed = lw.crossfit(train_fn, data, "classification", folds=2, method=lw.Diagonal())
    assert crossed.out_of_fold.probs.shape == (150, 2)
    assert not any("another network" in finding for finding in crossed.findings)  # one seed, one network
