"""Chosen outputs of posteriors over weights: exact, and at the cost of the chosen ones alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lapwing as lw
from lapwing.networks.jacobians import Footprint
from lapwing.networks.network import Network
from lapwing.networks.tangent import Tangent
from tests import problems
from tests.cases import BY_NAME
from tests.conformance.declared import small_method
from tests.tolerances import SOLVED, assert_close

D = torch.float64
MANY = 40  # more outputs than those for which a covariance is built at once


def wide(method: Any, prior: float | None = 2.0) -> tuple[lw.Fitted, Tensor]:
    """Return a posterior over a network of many outputs, and inputs."""
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, MANY)).double().eval()
    x, y = torch.randn(8, 3, dtype=D), torch.randint(0, MANY, (8,))
    return lw.fit(net, [(x, y)], "classification", method=method, prior=prior), x[:5]


def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list of the numbers of seeds of all Jacobians from now on."""
    counts: list[int] = []
    plain = Tangent.jacobians

    def jacobians(self: Tangent, *given: Any) -> Any:
        result = plain(self, *given)
        counts.append(result.outputs)
        return result

    monkeypatch.setattr(Tangent, "jacobians", jacobians)
    return counts


@pytest.mark.parametrize(
    "method",
    [lw.Kron(), lw.Diagonal(), lw.Full(), lw.LowRank(rank=5), lw.Sampled(num_samples=30), lw.HFL(mode="linearised")],
)
def test_only_the_chosen_outputs_are_differentiated(method: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    posterior, x = wide(method)
    top = posterior.functions(x).mean.topk(3).indices
    whole = posterior.functions(x).cov
    expected = whole.gather(1, top[:, :, None].expand(-1, -1, MANY)).gather(2, top[:, None].expand(-1, 3, -1))
    seeds = counted(monkeypatch)
    some = posterior.functions(x, outputs=top)
    assert_close(some.cov, expected, SOLVED)
    assert_close(some.std, expected.diagonal(dim1=1, dim2=2).sqrt(), SOLVED)
    assert set(seeds) == {3}
    posterior.functions(x, joint=True, outputs=top)
    assert set(seeds) == {3}


def test_few_samples_take_forward_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    """With twice as many chosen outputs as samples, forward mode is cheaper than a backward pass for each output."""
    posterior, x = wide(lw.Sampled(num_samples=3))
    outputs = torch.arange(3, 9).expand(5, -1).clone()
    outputs[0] = outputs[0].flip(0)
    whole, rows, seeds = posterior.functions(x), torch.arange(5)[:, None], counted(monkeypatch)
    some = posterior.functions(x, outputs=outputs)
    assert not seeds
    assert_close(some.mean, whole.mean[rows, outputs])
    assert_close(some.cov, whole.cov[rows[:, :, None], outputs[:, :, None], outputs[:, None]], SOLVED)


def test_many_chosen_outputs_build_no_covariance_for_variances(monkeypatch: pytest.MonkeyPatch) -> None:
    posterior, x = wide(lw.Kron())
    outputs = torch.randperm(MANY)[:36]
    whole, some = posterior.functions(x), posterior.functions(x, outputs=outputs)
    built = posterior.posterior.precision
    forms: list[bool] = []
    plain = type(built).quadratic
    monkeypatch.setattr(
        type(built), "quadratic", lambda self, j, full=True: (forms.append(full), plain(self, j, full))[1]
    )
    assert_close(some.variance, whole.variance[:, outputs])
    assert not any(forms)
    assert_close(some.cov, whole.cov[:, outputs][:, :, outputs])
    assert some.centred_variance.shape == (5, 36)


def test_each_input_keeps_its_outputs_where_a_batch_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    posterior, x = wide(lw.Kron())
    top = posterior.functions(x).mean.topk(4).indices
    whole = posterior.functions(x, outputs=top)
    plain, parts = Footprint.chunks, list[slice]()

    def chunks(self: Footprint, batch: int, seeds: int, dtype: Any, device: Any, most: int | None = None) -> Any:
        parts.extend(plain(self, batch, seeds, dtype, device, 2))
        return iter(parts)

    monkeypatch.setattr(Footprint, "chunks", chunks)
    cut = posterior.functions(x, outputs=top)
    assert len(parts) == 3
    assert_close(cut.mean, whole.mean)
    assert_close(cut.cov, whole.cov)


def test_a_mixture_shares_one_jacobian_of_the_chosen_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    posterior, x = wide(lw.Kron(), prior=None)
    assert len(posterior.posterior.members) > 1
    whole = posterior.functions(x)
    joint = posterior.functions(x, joint=True).cov
    seeds = counted(monkeypatch)
    some = posterior.functions(x, outputs=[7, 3])
    assert seeds == [2]
    assert_close(some.mean, whole.mean[:, [7, 3]])
    assert_close(some.cov, whole.cov[:, [7, 3]][:, :, [7, 3]])
    assert_close(posterior.functions(x, joint=True, outputs=[7, 3]).cov, joint[:, [7, 3]][:, :, :, [7, 3]])


@pytest.mark.parametrize("method", ["kron", "full", "sampled", "hfl", "hfl linearised", "dropout", "swag"])
def test_tokens_of_interest(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some positions of a text, with the top classes of each: no other position is differentiated."""
    case = BY_NAME["token_level"]
    model = case.build()
    if method == "dropout":
        model = nn.Sequential(model, nn.Dropout(0.3)).eval()
    data, likelihood = problems.batches(case), problems.likelihood(case)
    posterior = lw.fit(model, data, likelihood, method=small_method(method, model), prior=1e3)
    x = case.batch(3, seed=1)
    whole = posterior.functions(x)
    tokens = torch.tensor([[3, 0], [1, 2], [2, 2]])
    at = whole.mean[torch.arange(3)[:, None], tokens]
    top = at.topk(2).indices  # (B, S, k)
    seeds = counted(monkeypatch)
    some = posterior.functions(x, outputs=top, tokens=tokens)
    assert set(seeds) <= {4}
    assert_close(some.mean, at.gather(2, top))
    for b in range(3):
        for s in range(2):
            block = whole.cov[b, tokens[b, s]][top[b, s]][:, top[b, s]]
            assert_close(some.cov[b, s], block, SOLVED)
    joint = posterior.functions(x, joint=True, outputs=top, tokens=tokens)
    assert joint.cov.shape == (3, 2, 2, 3, 2, 2)
    assert_close(joint.marginal.cov, some.cov, SOLVED)


def test_covariances_of_tokens_in_pieces_are_those_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Token by token, and two runs of its outputs at a time."""
    case = BY_NAME["token_level"]
    posterior = lw.fit(case.build(), problems.batches(case), "classification", method=lw.Full(), prior=2.0)
    x = case.batch(3, seed=1)
    whole, seeds = posterior.functions(x).cov, counted(monkeypatch)
    with lw.memory.limited(1):
        assert_close(posterior.functions(x).cov, whole)
    assert max(seeds) < case.outputs[-1]


def test_a_shifted_network_gives_its_own_outputs() -> None:
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 4)).double().eval()
    x, y = torch.randn(30, 3, dtype=D), torch.randn(30, 4, dtype=D)
    posterior = lw.fit(net, [(x, y)], "regression", tuner=lw.tuners.LinearMode(mean="tangent"))
    assert isinstance(posterior.network, Network)
    assert posterior.network.shift is not None
    assert_close(posterior.functions(x, outputs=[3, 1]).mean, posterior.functions(x).mean[:, [3, 1]])


def test_numbers_that_do_not_fit_are_refused() -> None:
    posterior, x = wide(lw.Kron())
    with pytest.raises(lw.errors.DataError, match="outputs has 40; expected numbers of outputs from 0 to 39"):
        posterior.functions(x, outputs=[40])
    with pytest.raises(lw.errors.DataError, match=r"outputs have the shape \(4, 1\) for 5 inputs"):
        posterior.functions(x, outputs=torch.zeros(4, 1, dtype=torch.long))
