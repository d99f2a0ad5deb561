"""Weights of data: a datum with weight w counts w times, in sums over the data and in their number."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lapwing.core.settings import DATA, KEY, is_array, seen
from lapwing.errors import DataError

TARGET_KEYS = ("labels", "label", "targets", "target", "y")


@dataclass(frozen=True, eq=False)
class Weighted:
    """Targets with a weight for each sample, in the place of targets in a batch: ``(inputs, Weighted(y, w))``.

    A weight of 2 counts a sample twice, a weight of 0 leaves it out; weights need not be whole numbers, and their scale
    matters: with a mean of one the data count as often as without weights. All tokens or pixels of a sample have its
    weight.

    Args:
        targets: The targets of a batch, as they would be without weights.
        weights: Numbers that are not negative, one for each sample, (B,).

    >>> import lapwing as lw
    >>> x, net = torch.linspace(-1, 1, 4).unsqueeze(1), torch.nn.Linear(1, 1)
    >>> weights = torch.tensor([2.0, 1.0, 1.0, 0.0])
    >>> lw.fit(net, [(x, lw.samples.Weighted(x, weights))], lw.Gaussian(0.1), prior=1.0).base.statistics.data
    4
    """

    targets: Any
    weights: Any


@dataclass(frozen=True, eq=False)
class WeightedBatches:
    """A loader whose items hold weights; made by ``weighted``."""

    loader: Iterable[Any]
    key: str
    target_key: str | None

    def __iter__(self) -> Iterator[Any]:
        return map(self._item, iter(self.loader))

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]

    def _item(self, item: Any) -> Any:
        """Return the batch with its weights beside the targets."""
        if isinstance(item, Mapping):
            if self.key not in item:
                raise DataError(
                    f"a batch with the keys {sorted(map(str, item))} has no weights under {self.key!r}; say where they "
                    "are: lw.samples.weighted(loader, key=...)."
                )
            name = target_name(item, self.target_key)
            rest = {key: value for key, value in item.items() if key != self.key}
            return {**rest, name: Weighted(item[name], item[self.key])}
        if isinstance(item, tuple | list) and len(item) == 3:
            return item[0], Weighted(item[1], item[2])
        what = f"{type(item).__name__} of {len(item)}" if isinstance(item, tuple | list) else type(item).__name__
        raise DataError(
            f"a batch is a {what}; expected (inputs, targets, weights), or a mapping with {self.key!r}. Other items "
            "are unpacked by a function of yours: lw.samples.unpacked(loader, lambda item: (inputs, "
            "lw.samples.Weighted(targets, weights)))."
        )


def weighted(data: Iterable[Any], key: str = "weights", target_key: str | None = None) -> Iterable[Any]:
    """Return data whose batches hold a weight for each sample, for ``fit``, ``train`` and ``updated``.

    A sample of weight w counts w times: in the loss, the curvature, the evidence, the number of data and the noise that
    is estimated from them.

    Args:
        data: A loader or a list with batches ``(inputs, targets, weights)`` or mappings, or one such batch of three
            tensors or arrays. Weights are (B,), finite and not negative.
        key: The key of the weights in batches that are mappings.
        target_key: The key of the targets in these, as for ``fit``.

    Raises:
        DataError: If the data are no batches; while they are read, if a batch has no weights.

    >>> from torch.utils.data import DataLoader, TensorDataset
    >>> import lapwing as lw
    >>> x = torch.linspace(-1, 1, 6).unsqueeze(1)
    >>> loader = DataLoader(TensorDataset(x, x.sin(), torch.tensor([1.0, 1, 1, 3, 3, 3])), batch_size=4)
    >>> posterior = lw.fit(torch.nn.Linear(1, 1), lw.samples.weighted(loader), lw.Gaussian(0.1), prior=1.0)
    >>> posterior.base.statistics.data
    12
    """
    DATA.check("data", data)
    KEY.check("key", key)
    KEY.check("target_key", target_key)
    if isinstance(data, tuple) and len(data) == 3 and is_array(data[1]):
        return data[0], Weighted(data[1], data[2])
    if not hasattr(data, "__iter__"):
        raise DataError(
            f"data is a {type(data).__name__} of single samples; expected batches. Wrap it in a DataLoader first."
        )
    if hasattr(data, "__next__"):
        raise DataError("data is a one-shot iterator; expected a DataLoader or a list, which is read several times.")
    batches = WeightedBatches(data, key, target_key)
    return list(batches) if isinstance(data, list) else batches  # a list is the same at every pass


def target_name(item: Mapping[Any, Any], target_key: str | None) -> Any:
    """Return the key of the targets in a batch that is a mapping; raise if there is none."""
    keys = [target_key] if target_key else [key for key in TARGET_KEYS if key in item]
    if not keys or keys[0] not in item:
        raise DataError(
            f"a batch with the keys {sorted(map(str, item))} has no target; "
            f"pass target_key=..., or use one of {', '.join(TARGET_KEYS)}."
        )
    return keys[0]


def checked_weights(given: Any, n_samples: int, device: torch.device, where: str) -> Tensor:
    """Return the weights (B,) in float64; raise if they are no weights of so many samples."""
    try:
        weights = torch.as_tensor(given).detach().to(device)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(f"the weights of {where} are {seen(given)}; expected a tensor (B,).") from error
    if tuple(weights.shape) != (n_samples,) or weights.is_complex():
        raise DataError(
            f"the weights of {where} are {seen(weights)} for {n_samples} samples; expected a real number for each "
            "sample, (B,). Tokens and pixels have the weight of their sample: mark those that do not count by "
            "ignore_index."
        )
    weights = weights.double()
    if not bool(((weights >= 0) & weights.isfinite()).all()):
        raise DataError(
            f"the weights of {where} run from {float(weights.min()):g} to {float(weights.max()):g}; expected "
            "finite numbers from zero."
        )
    return weights
