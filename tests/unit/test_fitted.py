"""What a fitted posterior takes and gives beside tensors: NumPy arrays, data frames, results in a line."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import lapwing as lw
from tests.tolerances import assert_close
from tests.unit.decisions.problems import classes, classifier, generator


class Frame:
    """Like a data frame: NumPy makes an array of it, and it yields the names of its columns."""

    def __init__(self, values: Any) -> None:
        self.values = values

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        return self.values

    def __iter__(self) -> Iterator[str]:
        return iter(("width", "height"))

    def mask(self) -> None:
        """Data frames have a method of this name, which is no mask."""


@pytest.fixture(scope="module")
def single() -> lw.Fitted:
    x = torch.linspace(-1, 1, 24).reshape(12, 2)
    return lw.fit(nn.Linear(2, 1), [(x, x[:, :1])], "regression", method=lw.Full(), prior=1.0)


def test_arrays_get_the_dtype_of_the_model(single: lw.Fitted) -> None:
    x = torch.linspace(-2, 3, 14).reshape(7, 2)
    wide = x.double().numpy()
    read_only = wide.copy()
    read_only.flags.writeable = False
    parts = [wide[:3], wide[3:]]
    strange = (wide[::-1][::-1], np.asfortranarray(wide), wide.astype(">f8"), read_only)
    loaders = (parts, [(parts[0], 0), (Frame(parts[1]), 0)], (part for part in parts))
    for form in (x.numpy(), wide, *strange, Frame(wide), *loaders):
        assert_close(single.predict(form).mean, single.predict(x).mean)
    for form in (x.numpy(), wide, Frame(wide)):
        assert_close(single.functions(form).std, single.functions(x).std)
        assert single.function_samples(form, 3).shape == (3, 7, 1)
        assert single.acquire(form, 2).tolist() == single.acquire(x, 2).tolist()


def test_whole_numbers_stay_whole() -> None:
    model = nn.Sequential(nn.Embedding(9, 4), nn.Flatten(), nn.Linear(12, 2))
    x = torch.randint(9, (5, 3), generator=generator(1))
    posterior = lw.fit(model, [(x, x[:, 0] % 2)], "classification", prior=1.0)
    for form in (x.numpy(), x.numpy().astype("int32"), x.numpy().astype("uint8")):
        assert_close(posterior.predict(form).probs, posterior.predict(x).probs)


def test_arrays_inside_mappings_and_tuples() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(5, 1)

        def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return self.layer(torch.cat([a, b], 1))

    a, b = (torch.randn(6, size, generator=generator(size)) for size in (2, 3))
    posterior = lw.fit(Two(), [((a, b), a[:, :1])], "regression", prior=1.0)
    arrays = a.double().numpy(), b.double().numpy()
    assert_close(posterior.predict(arrays).mean, posterior.predict((a, b)).mean)
    assert_close(posterior.predict({"a": arrays[0], "b": arrays[1]}).mean, posterior.predict((a, b)).mean)


def test_arrays_without_numbers_are_refused(single: lw.Fitted) -> None:
    with pytest.raises(lw.LapwingError, match="a ndarray with the dtype <U1; expected numbers"):
        single.predict(np.array([["a", "b"]]))
    with pytest.raises(lw.LapwingError, match="a ndarray with the dtype object; expected numbers"):
        single.predict(Frame(np.array([[1.0, None]])).values)
    with pytest.raises(lw.LapwingError, match="a MaskedArray with masked entries; expected numbers"):
        single.predict(np.ma.masked_array([[1.0, 2.0]], [[True, False]]))
    with pytest.raises(lw.LapwingError, match="NaN or infinite"):
        single.predict(np.array([[np.nan, 1.0]]))


def test_results_as_arrays_and_in_a_line(single: lw.Fitted) -> None:
    x, labels = torch.ones(5, 2), classes(4, generator(2))[0]
    numbers, probs = single.predict(x), classifier().predict(labels)
    assert {name: each.shape for name, each in numbers.numpy().items()} == {"mean": (5, 1), "std": (5, 1)}
    np.testing.assert_array_equal(probs.numpy()["probs"], probs.probs.numpy())
    np.testing.assert_array_equal(single.functions(x).numpy()["std"], single.functions(x).std.numpy())
    assert repr(numbers) == "<NormalPredictive: mean, std (5, 1)>"
    assert repr(probs) == "<SoftmaxPredictive: probs (4, 3)>"
    assert repr(single.predict([x, x])) == "<NumberView: mean, std (10, 1)>"
    assert repr(single.functions(x, joint=True)) == "<FunctionGaussian: mean (5, 1), joint>"
