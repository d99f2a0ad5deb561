"""Networks with images as outputs: when the model runs to show their size, and what it may return later."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lapwing.data.inputs import Batch
from lapwing.errors import DataError
from lapwing.networks.jacobians import Footprint
from lapwing.networks.network import Network
from lapwing.values.outputs import ImageForm
from tests.cases import Wrapped
from tests.tolerances import assert_close

X = torch.randn(6, 2, 4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def convolution() -> nn.Module:
    torch.manual_seed(1)
    return nn.Conv2d(2, 3, (1, 3), padding="same").double()


def test_outputs_are_pixels_inside() -> None:
    network, f = Network.build(convolution(), X), convolution()(X).detach()
    assert network.image == (4, 5)
    assert network.output_shape == (20, 3)
    assert_close(network(X), f.flatten(2).mT)
    assert network.head == "weight"  # the last layer keeps its closed form
    assert Network.build(nn.Linear(5, 7).double(), X[:, 0]).image == ()


def test_channels_last_in_memory_is_the_same() -> None:
    model = convolution().to(memory_format=torch.channels_last)
    network = Network.build(model, X.to(memory_format=torch.channels_last))
    assert_close(network(X), Network.build(convolution(), X)(X))
    assert network.image_form(X) == ImageForm((4, 5))


def test_a_sample_runs_once_for_every_shape_of_inputs() -> None:
    runs: list[int] = []

    def run(m: Any, x: Tensor) -> Tensor:
        runs.append(len(x))
        return m.net(x)

    network = Network.build(Wrapped(run, net=convolution()), X)
    runs.clear()
    for size in (6, 3):
        assert network.image_form(X[:size]) == ImageForm((4, 5))
    assert runs == []
    for _ in range(2):
        assert network.image_form(X.mT) == ImageForm((5, 4))
    assert runs == [1]


def test_several_inputs() -> None:
    """The size of the images may be that of a tensor that all samples share."""
    model = Wrapped(lambda m, x, grid: m.net(x)[..., : grid.shape[0], :] + grid.sum(), net=convolution())
    network = Network.build(model, (X, torch.zeros(3, 7).double()))
    assert network.image_form((X, torch.zeros(3, 7).double())) == ImageForm((3, 5))
    assert network.image_form((X, torch.zeros(2, 7).double())) == ImageForm((2, 5))


def test_outputs_of_another_kind_are_refused() -> None:
    model = Wrapped(lambda m, x: m.net(x).squeeze(-2), net=convolution())
    network = Network.build(model, X)
    with pytest.raises(DataError, match=r"outputs of shape \(1, 3, 5\); expected \(1, 3, H, W\), images as before"):
        network.image_form(X[:, :, :1])


def test_targets_take_the_form_of_the_outputs() -> None:
    network, labels = Network.build(convolution(), X), torch.arange(120).reshape(6, 4, 5)
    assert torch.equal(network.arrange_targets(Batch(X, labels)).targets, labels.flatten(1))
    numbers = torch.randn(6, 3, 4, 5)
    batch = network.arrange_targets(Batch(X, numbers, "labels"))
    assert torch.equal(batch.targets, numbers.flatten(2).mT)
    assert batch.key == "labels"
    plain = Network.build(nn.Linear(5, 7).double(), X[:, 0])
    given = Batch(X[:, 0], labels[..., 0])
    assert plain.arrange_targets(given) is given


def test_the_footprint_of_another_size_is_that_of_a_network_built_there() -> None:
    torch.manual_seed(2)
    layers = nn.Conv2d(2, 6, (3, 1), padding="same"), nn.Tanh(), nn.Conv2d(6, 3, (1, 3), padding="same")
    model, large = nn.Sequential(*layers).double(), torch.zeros(3, 2, 7, 9, dtype=torch.float64)
    network, there = Network.build(model, X), Network.build(model, large)
    resized = network.for_inputs(large)
    assert resized.output_shape == there.output_shape == (63, 3)
    assert resized.footprint == there.footprint
    assert resized.blockwise.footprint == network.blockwise.for_inputs(large).footprint == there.blockwise.footprint
    assert network.for_inputs(X) is network
    assert network.linearise(large).network.footprint == there.footprint
    assert_close(resized(large), network(large))
    assert network.batch_size_for(large) == there.batch_size_for(large) < network.batch_size_for(X)


def test_jacobians_that_are_kept_whole_do_not_grow_with_the_size() -> None:
    footprint = Footprint(width=7, patches=5, whole=11, graph=3, live=2, widest=6)
    assert footprint.for_positions(30, 20) == Footprint(width=11, patches=8, whole=11, graph=5, live=3, widest=9)


def test_sequences_of_another_length() -> None:
    """As for images: one sample runs once for every length that was not seen before."""
    runs: list[int] = []

    def run(m: Any, x: Tensor) -> Tensor:
        runs.append(len(x))
        return m.net(x)

    torch.manual_seed(3)
    model = Wrapped(run, net=nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)).double())
    short, long = X[:, 0].contiguous(), X[:, 0].repeat(1, 3, 1)  # 4 and 12 tokens
    network, there = Network.build(model, short), Network.build(model, long)
    runs.clear()
    assert network.for_inputs(short[:2]) is network
    assert runs == []
    for _ in range(2):
        assert network.for_inputs(long).output_shape == (12, 3)
    assert runs == [1]
    assert network.for_inputs(long).footprint == network.linearise(long).network.footprint == there.footprint
    with pytest.raises(DataError, match=r"outputs of shape \(1, 3\); expected \(1, T, 3\), tokens as before\. Has x a"):
        network.for_inputs(short[0])


def test_a_sequence_without_tokens_has_a_footprint() -> None:
    footprint = Footprint(width=7, patches=5, whole=11, graph=3, live=2, widest=6)
    assert footprint.for_positions(0, 4).width == 2
    assert footprint.for_positions(4, 0).width == 28
