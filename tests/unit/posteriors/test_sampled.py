"""Posteriors of samples and members."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lapwing as lw
from lapwing.methods.members import FixedMask, Masks
from lapwing.networks.network import Network
from lapwing.runtime.threads import global_seed

# What surrounds a call on samples: inference mode and autocast must leave no trace; and numbers that are none.


def setting() -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 3))
    return model, torch.randn(40, 3), torch.randint(0, 3, (40,))


def fitted(prior: Any = 1.0) -> lw.Fitted:
    model, x, y = setting()
    return lw.fit(model, [(x, y)], "classification", method=lw.Sampled(num_samples=8, width=4), prior=prior)


def weight(w: Any) -> Tensor:
    return w["0.weight"][0, 0]


ASKED: dict[str, Callable[[lw.Fitted], Any]] = {
    "evidence": lambda p: p.log_evidence(),
    "evidence of the posterior": lambda p: p.posterior.log_evidence(),
    "error": lambda p: p.evidence_error,
    "gamma": lambda p: p.effective_parameters().total,
    "std": lambda p: p.functions(setting()[1][:5]).std,
    "variance of a weight": lambda p: p.variance_of(weight),
    "tuned": lambda p: p.tuned().prior.values,
    "tuned by samples": lambda p: p.tuned(lw.tuners.SampleEM(mode="network")).prior.values,
    "tuned by their optimum": lambda p: (
        p.tuned(lw.tuners.SampleEM([setting()[1:]], max_steps=2, tolerance=10.0)).prior.values
    ),
    "fixed point": lambda p: p.tuned(lw.tuners.FixedPoint(max_steps=1)).prior.values,
}


@pytest.mark.parametrize("what", ASKED)
def test_nothing_of_inference_mode_is_remembered(what: str) -> None:
    """What was computed there must be able to take part in a gradient."""
    asked = fitted()
    with torch.inference_mode():
        ASKED[what](asked)
    assert not asked.posterior.samples.is_inference()
    prior = asked.prior.with_precision(torch.tensor(2.0, dtype=torch.float64, requires_grad=True))
    changed = asked.posterior.with_problem(asked.posterior.problem.with_prior(prior))
    (slope,) = torch.autograd.grad(changed.log_evidence(), prior.values)
    assert bool(slope.isfinite())
    assert float(asked.tuned().prior.values) == pytest.approx(float(fitted().tuned().prior.values), rel=1e-3)


def test_no_grad_stays() -> None:
    asked = fitted()
    prior = asked.prior.with_precision(torch.tensor(2.0, dtype=torch.float64, requires_grad=True))
    changed = asked.posterior.with_problem(asked.posterior.problem.with_prior(prior))
    assert changed.log_evidence().requires_grad
    with torch.no_grad():
        assert not changed.log_evidence().requires_grad


@pytest.mark.parametrize("narrow", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("joint", [False, True])
def test_autocast_changes_nothing(narrow: torch.dtype, joint: bool) -> None:
    """Covariances of wide beliefs would overflow in half precision."""
    posterior, x = fitted(1e-4), 30 * setting()[1][:5]
    expected = posterior.functions(x, joint)
    expected_cov, expected_std = expected.cov, posterior.functions(x, joint).std
    with torch.autocast("cpu", narrow):
        assert torch.equal(posterior.functions(x, joint).cov, expected_cov)
        assert torch.equal(posterior.functions(x, joint).std, expected_std)
    assert expected_cov.dtype == torch.float32
    assert float(expected_cov.abs().max()) > 7e4


def test_nothing_of_autocast_is_remembered() -> None:
    """The basis behind samples and errors is the same whoever asks first, and where."""
    one, other, third = fitted(), fitted(), fitted()
    with torch.autocast("cpu", torch.bfloat16):
        error, samples = other.evidence_error, third.posterior.samples
    assert error == one.evidence_error
    assert torch.equal(other.log_evidence(), one.log_evidence())
    assert torch.equal(samples, one.posterior.samples)


# The random numbers that members take: of their seed, without touching anybody else's.

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
