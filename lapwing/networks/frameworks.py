"""Models and data as training frameworks hold them: a skorch net, a Lightning module, Trainer or data module.

They are recognised by the attributes that they document, here and nowhere else, so that none of them is imported.
"""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor, nn

from lapwing.errors import DataError, ModelError


def plain_module(model: Any) -> Any:
    """Return the network inside a model of a framework; other models as they are.

    A skorch net becomes its module in evaluation mode: skorch sets the mode at every step. A Lightning module, or that
    of a Trainer, becomes a copy in evaluation mode without its Trainer: the module itself keeps its mode, which
    Lightning does not restore when training goes on.

    Raises:
        ModelError: If a skorch net or a Trainer has no network yet.
    """
    if _is_skorch_net(model):
        return _skorch_module(model)
    if _is_trainer(model):
        if model.lightning_module is None:
            raise ModelError("the Trainer has no module yet; expected one that was trained: trainer.fit(module) first.")
        model = model.lightning_module
    return _detached(model) if _is_lightning_module(model) else model


def plain_data(model: Any, data: Any) -> Any:
    """Return the data as ``fit`` reads them, for a model as the user gave it.

    A pair of arrays for a skorch net becomes the loader that the net would use. A Lightning data module
    becomes its training data. None stands for the training data of a Trainer.

    Raises:
        DataError: If there are no data.
    """
    if data is None and _is_trainer(model):
        data = model.train_dataloader
        if data is None:
            raise DataError("the Trainer has no training data; expected trainer.fit(module, loader) first, or data.")
    if data is None:
        raise DataError(
            "data is None; expected the training data, such as a DataLoader. Only a Lightning Trainer knows its own."
        )
    if callable(getattr(data, "train_dataloader", None)):
        return data.train_dataloader()
    if _is_skorch_net(model) and _is_pair_of_arrays(data):
        return model.get_iterator(model.get_dataset(*data), training=False)
    return data


def _has(value: Any, *names: str) -> bool:
    """Return whether the class of the value has all these members."""
    return all(hasattr(type(value), name) for name in names)


def _is_skorch_net(model: Any) -> bool:
    return _has(model, "get_iterator", "get_dataset", "initialize_module", "train_step_single")


def _is_trainer(model: Any) -> bool:
    return _has(model, "lightning_module", "train_dataloader", "val_dataloaders")


def _is_lightning_module(model: Any) -> bool:
    return isinstance(model, nn.Module) and _has(model, "training_step", "configure_optimizers", "log_dict", "trainer")


def _skorch_module(net: Any) -> nn.Module:
    module: nn.Module | None = getattr(net, "module_", None)
    if module is None:
        raise ModelError("the skorch net has no module_ yet; expected one that was trained: net.fit(X, y) first.")
    return module.eval()


def _detached(module: Any) -> nn.Module:
    """Return a copy of a Lightning module in evaluation mode, without its Trainer; its logging does nothing."""
    trainer = _trainer_of(module)
    try:
        copied = copy.deepcopy(module, {} if trainer is None else {id(trainer): _NO_TRAINER})
    except (TypeError, RuntimeError) as error:
        raise ModelError(
            f"the Lightning module {type(module).__name__} cannot be copied: {error}; expected one that copy.deepcopy "
            "takes. Give the network inside it, in evaluation mode: lw.fit(module.network.eval(), ...)."
        ) from error
    for part in copied.modules():
        if _is_lightning_module(part):
            part.trainer = None
            part.log = part.log_dict = _ignore
    return copied.eval()


_NO_TRAINER = object()  # in the place of the Trainer while a module is copied, whose data it holds


def _trainer_of(module: Any) -> Any:
    try:
        return module.trainer
    except RuntimeError:  # it has none
        return None


def _ignore(*args: Any, **kwargs: Any) -> None:
    """Take the place of ``log`` outside a training loop, where Lightning refuses it."""


def _is_pair_of_arrays(data: Any) -> bool:
    """Return whether the data are (inputs, targets) with arrays that are no tensors, or inputs of several arrays."""
    is_pair = isinstance(data, tuple | list) and len(data) == 2
    return is_pair and hasattr(data[1], "shape") and not isinstance(data[1], Tensor)
