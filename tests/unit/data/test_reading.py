"""Loaders that change between passes: refused where rows must match, a finding where passes are averaged."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lapwing as lw
from lapwing.data.batches import Data
from lapwing.errors import DataError

CPU = torch.device("cpu")
GENERATOR = torch.Generator().manual_seed(0)
X, Y = torch.randn(30, 3, generator=GENERATOR), torch.randn(30, 2, generator=GENERATOR)
Change = Callable[[int, torch.Generator], tuple[Tensor, Tensor]]


def rows(index: Tensor) -> tuple[Tensor, Tensor]:
    return X[index], Y[index]


def flipped(_: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
    return torch.where(torch.rand(30, 1, generator=g) < 0.5, X.flip(1), X), Y


CHANGES: dict[str, Change] = {
    "noise": lambda number, g: (X + 1e-4 * torch.randn(X.shape, generator=g), Y),
    "flips": flipped,  # the same numbers in every row
    "other rows": lambda number, g: rows(torch.randint(0, 30, (30,), generator=g)),
    "fewer rows": lambda number, g: (X[number:], Y[number:]),
    "more rows": lambda number, g: (torch.cat([X, X[:number]]), torch.cat([Y, Y[:number]])),
    "other pairs": lambda number, g: (X, Y[torch.randperm(30, generator=g)]),
}


class Loader:
    def __init__(self, change: Change) -> None:
        self.change, self.passes, self.generator = change, 0, torch.Generator().manual_seed(1)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        self.passes += 1
        x, y = self.change(self.passes, self.generator)
        return iter(list(zip(x.split(7), y.split(7), strict=True)))


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))


def read(data: Data) -> None:
    for _ in data.batches("pass"):
        pass


@pytest.mark.parametrize("name", CHANGES)
def test_a_pass_with_other_rows_is_noticed(name: str) -> None:
    data = Data(Loader(CHANGES[name]), CPU)
    read(data)
    assert not data.findings
    read(data)
    assert len(data.findings) == 1
    with pytest.raises(DataError, match="second reading of the data gave"):
        data.requiring_same_rows()
    strict = Data(Loader(CHANGES[name]), CPU).requiring_same_rows()
    read(strict)
    with pytest.raises(DataError, match="second reading of the data gave"):
        read(strict)


@pytest.mark.parametrize("batch", [1, 7, 30])
def test_order_and_batches_do_not_matter(batch: int) -> None:
    loader = DataLoader(TensorDataset(X, Y), batch, shuffle=True, generator=torch.Generator().manual_seed(0))
    data = Data(loader, CPU).requiring_same_rows()
    for _ in range(5):
        read(data)
    assert data.is_repeatable()
    assert data.readings.passes == 5


def test_padded_rows_are_only_counted() -> None:
    """The padding of a text depends on the other texts of its batch."""

    def padded(number: int, g: torch.Generator) -> Any:
        return [(torch.ones(4, 3 + number), torch.zeros(4)), (torch.ones(4, 5), torch.zeros(4))][: 3 - number]

    class Texts(Loader):
        def __iter__(self) -> Iterator[Any]:
            self.passes += 1
            return iter(padded(min(self.passes, self.longest), self.generator))

        longest = 1

    data = Data(Texts(padded), CPU)
    assert data.is_repeatable()
    shorter = Texts(padded)
    shorter.longest = 2
    assert not Data(shorter, CPU).is_repeatable()


def test_sparse_inputs_complex_inputs_and_no_inputs_pass() -> None:
    for x in (X.to_sparse(), torch.view_as_complex(torch.ones(30, 3, 2)), torch.zeros(30, 0)):
        assert Data(DataLoader([(x, Y)], batch_size=None), CPU).is_repeatable()


REFUSED: dict[str, dict[str, Any]] = {
    "Sampled": {"method": lw.Sampled(num_samples=2), "prior": 1.0},
    "KernelSpace": {"method": lw.KernelSpace(), "prior": 1.0},
    "VaLLA": {"method": lw.VaLLA(num_inducing=3, optimiser="lbfgs", steps=2), "prior": 1.0},
    "LinearMode": {"tuner": lw.tuners.LinearMode()},
}


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("call", REFUSED)
def test_methods_that_compare_passes_refuse_other_rows(call: str, name: str) -> None:
    with pytest.raises(DataError, match="second reading of the data gave"):
        lw.fit(network(), Loader(CHANGES[name]), lw.Gaussian(), **REFUSED[call])


@pytest.mark.parametrize("name", CHANGES)
def test_operators_and_lbfgs_refuse_other_rows(name: str) -> None:
    posterior = lw.fit(network(), [(X, Y)], lw.Gaussian(0.5), prior=1.0)
    for operator in (posterior.jacobian, posterior.ggn):
        with pytest.raises(DataError, match="second reading of the data gave"):
            operator(Loader(CHANGES[name]))
    with pytest.raises(DataError, match="second reading of the data gave"):
        lw.train(network(), Loader(CHANGES[name]), "regression", recipe=lw.recipes.classic(epochs=2))


AVERAGED: dict[str, tuple[lw.Gaussian, dict[str, Any]]] = {
    "EKron": (lw.Gaussian(0.5), {"method": lw.EKron(), "prior": 1.0}),
    "noise of each output": (lw.Gaussian(per_output=True), {"prior": 1.0}),
    "default": (lw.Gaussian(), {}),
}


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("call", AVERAGED)
def test_methods_that_average_passes_say_so(call: str, name: str) -> None:
    likelihood, settings = AVERAGED[call]
    posterior = lw.fit(network(), Loader(CHANGES[name]), likelihood, **settings)
    assert "Note: a later pass over the data gave" in posterior.summary()
    assert any("later pass" in finding for finding in posterior.trace.findings)
    assert "Nothing was tuned." in posterior.summary() or not settings


def test_one_pass_over_augmented_data_is_fine() -> None:
    for method in (lw.Kron(), lw.Full(), lw.Diagonal()):
        loader = Loader(CHANGES["noise"])
        posterior = lw.fit(network(), loader, lw.Gaussian(), method=method, prior=1.0)
        assert posterior.trace is None
    lw.train(network(), Loader(CHANGES["noise"]), "regression", recipe=lw.recipes.online(epochs=2))
