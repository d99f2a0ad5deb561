"""The random numbers that members take: of their seed, without touching anybody else's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import lapwing as lw
from lapwing.methods.dropout import FixedMask, Masks
from lapwing.networks.network import Network
from lapwing.runtime.threads import global_seed

CPU = torch.device("cpu")


@pytest.fixture
def untouched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails where the generators of all GPUs are seeded."""

    def refused(seed: int) -> None:
        raise AssertionError(f"all GPUs were seeded with {seed}")

    monkeypatch.setattr(torch.cuda, "manual_seed_all", refused)


def test_seeded_numbers_are_those_of_the_seed() -> None:
    before = torch.get_rng_state()
    with global_seed(7, CPU):
        weights = torch.rand(3)
    assert torch.equal(torch.get_rng_state(), before)
    with torch.random.fork_rng([]):
        torch.manual_seed(7)
        assert torch.equal(weights, torch.rand(3))


@pytest.mark.usefixtures("untouched")
@pytest.mark.parametrize("layer", [nn.Dropout(0.5), nn.AlphaDropout(0.5)], ids=["mask", "shift"])
def test_masks_seed_no_gpu(layer: nn.Module) -> None:
    x = torch.ones(3, 4)
    FixedMask(layer, 1)(x)
    Masks.of(Network.build(nn.Sequential(nn.Linear(4, 2), layer).eval(), x), 2, 0)(x)


@pytest.mark.usefixtures("untouched")
def test_training_seeds_no_gpu() -> None:
    x = torch.linspace(-1, 1, 12).unsqueeze(1)
    data: Any = [(x, x.sin())]
    lw.train(nn.Linear(1, 1), data, "regression", recipe=lw.recipes.online(epochs=2))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_numbers_of_a_gpu_are_put_back() -> None:
    before = torch.cuda.get_rng_state()
    with global_seed(7, CPU):
        pass
    assert torch.equal(torch.cuda.get_rng_state(), before)
    with global_seed(7, torch.device("cuda", 0)):
        one = torch.rand(3, device="cuda")
    assert torch.equal(torch.cuda.get_rng_state(), before)
    with global_seed(7, torch.device("cuda", 0)):
        assert torch.equal(torch.rand(3, device="cuda"), one)
