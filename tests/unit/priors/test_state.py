"""Every prior as plain data and back, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import lapwing as lw
from lapwing.networks.network import Network
from lapwing.networks.normalised import group_names, scale_free_groups
from lapwing.priors.base import BoundPrior, Prior
from lapwing.runtime.state import State, class_named
from tests.cases import BY_NAME

CASE = BY_NAME["norms"]
MEAN = 0.3
PRIORS = ("Isotropic", "PerLayer", "Grouped", "DiagonalPrior", "PerNormalisedGroup", "GPrior")


def network() -> Network:
    return Network.build(CASE.build(), CASE.batch(6))


def means(size: int) -> tuple[Any, ...]:
    return 0.0, MEAN, torch.linspace(-1, 1, size)


def given(name: str, mean: float | Tensor) -> Prior:
    made: dict[str, Prior] = {
        "Isotropic": lw.isotropic(0.7, mean),
        "PerLayer": lw.per_layer(0.7, mean),
        "Grouped": lw.grouped({r".*weight": 0.7, r"(?!.*weight).*": 3.0}, mean),
        "DiagonalPrior": lw.priors.diagonal(0.7, mean),
        "PerNormalisedGroup": lw.priors.per_normalised_group(0.7, mean),
        "GPrior": lw.priors.g_prior(0.7, mean),
    }
    return made[name]


def bound(name: str, mean: float | Tensor, net: Network) -> BoundPrior:
    prior = given(name, mean)
    groups = group_names(net, scale_free_groups(net, CASE.batch(6))) if prior.needs_groups else None
    made = prior.bound(net.selection, net.theta(), groups)
    other = torch.rand(made.values.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) + 0.1
    return made.with_precision(other)


def assert_same(one: BoundPrior, two: BoundPrior) -> None:
    assert type(one.given) is type(two.given)
    assert (one.groups, one.members, one.needs_curvature) == (two.groups, two.members, two.needs_curvature)
    assert torch.equal(one.values, two.values)
    assert torch.equal(one.vector, two.vector)
    assert torch.equal(torch.as_tensor(one.mean), torch.as_tensor(two.mean))
    assert one.network_groups == two.network_groups


@pytest.mark.parametrize("mean", range(3))
@pytest.mark.parametrize("name", PRIORS)
def test_every_prior_comes_back_from_its_state(name: str, mean: int) -> None:
    net = network()
    prior = bound(name, means(net.selection.size)[mean], net)
    state = prior.state()
    assert state.name == name
    assert_same(class_named(name).from_state(state, net), prior)


def test_a_g_prior_keeps_the_curvature_it_has() -> None:
    net = network()
    prior = bound("GPrior", 0.0, net)
    assert prior.needs_curvature
    scaled = prior.with_scale(torch.linspace(1, 2, net.selection.size))
    assert not scaled.needs_curvature
    assert_same(class_named("GPrior").from_state(scaled.state(), net), scaled)


@pytest.mark.parametrize("name", PRIORS)
def test_a_bound_prior_is_bound_again_as_it_is(name: str) -> None:
    net = network()
    prior = bound(name, MEAN, net)
    assert_same(prior.bound(net.selection, net.theta()), prior)


def test_a_state_without_precisions_is_refused() -> None:
    net = network()
    with pytest.raises(lw.errors.FileError, match="precision"):
        class_named("Isotropic").from_state(State("Isotropic", {"mean": 0.0, "members": []}), net)
    with pytest.raises(lw.errors.FileError, match="members"):
        class_named("Grouped").from_state(State("Grouped", {"mean": 0.0}, {"precision": torch.ones(2)}), net)
