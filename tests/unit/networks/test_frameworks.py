"""Models and data of training frameworks, with stand-ins that have the members by which these are recognised.

The real packages are tested in tests/integrations.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lapwing.errors import DataError, ModelError
from lapwing.networks.forward import extract_data, extract_network


class Trainer:
    lightning_module: nn.Module | None = None
    train_dataloader: Any = None
    val_dataloaders: Any = None

    def __deepcopy__(self, memo: Any) -> Trainer:
        raise AssertionError("the Trainer must not be copied")


class Module(nn.Module):
    """Has the members of a Lightning module: the Trainer raises while there is none, and so does logging outside it."""

    def __init__(self, trainer: Trainer | None = None) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 3)
        self._trainer = trainer

    @property
    def trainer(self) -> Trainer:
        if self._trainer is None:
            raise RuntimeError("not attached")
        return self._trainer

    @trainer.setter
    def trainer(self, trainer: Trainer | None) -> None:
        self._trainer = trainer

    def training_step(self) -> None: ...
    def configure_optimizers(self) -> None: ...
    def log_dict(self) -> None: ...

    def log(self, name: str, value: Any) -> None:
        raise AssertionError("no logging outside of training")

    def forward(self, x: Tensor) -> Tensor:
        self.log("mean", x.mean())
        return self.layer(x)


class Net:
    """Has the members of a skorch net."""

    def __init__(self, module: nn.Module | None) -> None:
        self.module_ = module

    def initialize_module(self) -> None: ...
    def train_step_single(self) -> None: ...

    def get_dataset(self, x: Any, y: Any) -> Any:
        return ("dataset", x, y)

    def get_iterator(self, dataset: Any, training: bool) -> Any:
        return ("loader", dataset, training)


@pytest.mark.parametrize("trainer", [None, Trainer()])
def test_module_of_lightning_is_copied_without_its_trainer(trainer: Trainer | None) -> None:
    module = Module(trainer)
    copied = extract_network(module)
    x = torch.ones(4, 2)
    torch.testing.assert_close(copied(x), module.layer(x))
    assert not copied.training
    assert module.training
    assert module._trainer is trainer
    with pytest.raises(RuntimeError, match="not attached"):
        _ = copied.trainer
    copy.deepcopy(copied)


def test_module_that_cannot_be_copied_is_refused() -> None:
    module = Module()
    module.open_file = open(__file__)  # noqa: SIM115
    with module.open_file, pytest.raises(ModelError, match="cannot be copied"):
        extract_network(module)


def test_trainer_gives_its_module_and_its_data() -> None:
    trainer = Trainer()
    with pytest.raises(ModelError, match=r"trainer\.fit"):
        extract_network(trainer)
    with pytest.raises(DataError, match="no training data"):
        extract_data(trainer, None)
    trainer.lightning_module, trainer.train_dataloader = Module(trainer), ["batches"]
    assert isinstance(extract_network(trainer), Module)
    assert extract_data(trainer, None) == ["batches"]
    assert extract_data(trainer, ["others"]) == ["others"]


def test_skorch_net_gives_its_module_in_evaluation_mode_and_loads_arrays() -> None:
    np = pytest.importorskip("numpy")
    module, arrays = nn.Linear(2, 3), (np.ones((4, 2)), np.ones(4))
    assert extract_network(Net(module)) is module
    assert not module.training
    assert extract_data(Net(module), arrays) == ("loader", ("dataset", *arrays), False)
    tensors = (torch.ones(4, 2), torch.ones(4))
    assert extract_data(Net(module), tensors) is tensors
    with pytest.raises(ModelError, match=r"net\.fit"):
        extract_network(Net(None))


def test_other_models_and_data_stay_as_they_are() -> None:
    module, data = nn.Linear(2, 3), [(torch.ones(4, 2), torch.ones(4))]
    assert extract_network(module) is module
    assert module.training
    assert extract_data(module, data) is data
    with pytest.raises(DataError, match="data is None"):
        extract_data(module, None)
