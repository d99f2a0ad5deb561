"""Input that was once taken silently and gave wrong answers: refused, or made right."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lapwing as lw
from tests.conformance.test_wrong_calls import LABELS, NET, X, Y, fit, small

# Subnetworks


@pytest.mark.parametrize("method", [lw.Full(), lw.Diagonal(), lw.LowRank(rank=3), lw.KernelSpace()])
def test_vectors_of_a_prior_are_in_the_order_of_the_indices(method: Any) -> None:
    """The same weights in another order, with their precisions and means in that order, are the same posterior."""
    order, values, means = torch.tensor([7, 0, 21]), torch.tensor([1.0, 5.0, 25.0]), torch.tensor([0.1, 0.2, 0.3])
    rising = order.argsort()
    priors = lw.priors.diagonal(values, means), lw.priors.diagonal(values[rising], means[rising])
    one, other = (
        lw.fit(NET, [(X, Y)], lw.Gaussian(0.5), method=method, weights=lw.subnetwork(index), prior=prior)
        for index, prior in zip((order, order[rising]), priors, strict=True)
    )
    assert torch.allclose(one.functions(X).cov, other.functions(X).cov, rtol=1e-9, atol=1e-12)
    assert torch.allclose(one.log_evidence(), other.log_evidence())
    assert torch.equal(one.prior.vector, values.double())
    flat = torch.cat([p.detach().reshape(-1) for p in NET.parameters()])
    assert torch.equal(one.network.theta(), flat[order])


# Outputs of another kind


class Ends(nn.Module):
    """A linear map and one more function of its outputs."""

    def __init__(self, end: Callable[[Tensor], Tensor], outputs: int = 1) -> None:
        super().__init__()
        self.linear, self.end = nn.Linear(3, outputs).double(), end

    def forward(self, x: Tensor) -> Tensor:
        return self.end(self.linear(x))


INSIDE: dict[str, tuple[str, Callable[[Tensor], Tensor], str]] = {
    "sigmoid": ("binary", torch.sigmoid, "ends in sigmoid; expected logits"),
    "sigmoid and a view": ("binary", lambda f: f.sigmoid().squeeze(-1), "ends in sigmoid; expected logits"),
    "sigmoid as a cast": ("binary", lambda f: f.sigmoid().float(), "ends in sigmoid; expected logits"),
    "exp": ("counts", torch.exp, "ends in exp; expected log-rates"),
    "softplus": ("counts", nn.functional.softplus, "ends in softplus; expected log-rates"),
}


@pytest.mark.parametrize("case", INSIDE)
def test_a_link_inside_the_network_is_refused(case: str) -> None:
    likelihood, end, message = INSIDE[case]
    for run in (lw.fit, lw.train):
        with pytest.raises(lw.errors.ModelError, match=message):
            run(Ends(end), [(X, LABELS)], likelihood)


HONEST: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = {
    "logits that are all between 0 and 1": ("binary", lambda f: 0.5 + 0.01 * f),
    "logits in a range": ("binary", lambda f: 4 * f.sigmoid() - 2),
    "log-probabilities": ("binary", lambda f: nn.functional.logsigmoid(f)),
    "log-rates that are all positive": ("counts", lambda f: f.square()),
    "a logarithm of rates": ("counts", lambda f: nn.functional.softplus(f).log()),
    "a rectified log-rate": ("counts", lambda f: f.relu()),
    "positive means": ("regression", torch.exp),
}


@pytest.mark.parametrize("case", HONEST)
def test_honest_outputs_are_not_refused(case: str) -> None:
    likelihood, end = HONEST[case]
    fit(Ends(end), [(X, LABELS[:, None].double())], likelihood)


# A model that changes after the fit


class Scaled(nn.Module):
    """A module of a user's own, with settings, a function and a counter of its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale, self.act, self.calls = nn.Linear(4, 4).double(), 2.0, torch.tanh, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.share = 0.5 * self.calls
        return self.act(self.scale * self.linear(x))


def changes() -> nn.Sequential:
    torch.manual_seed(1)
    body = [nn.Linear(3, 4), nn.LeakyReLU(0.1), Scaled(), nn.LayerNorm(4), nn.Linear(4, 2)]
    return nn.Sequential(*body).double().eval()


CHANGES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "another activation": (lambda net: net.__setitem__(1, nn.ReLU()), "module '1' has changed.*LeakyReLU.*ReLU"),
    "a slope": (lambda net: setattr(net[1], "negative_slope", 0.5), "negative_slope of the module '1' has changed"),
    "a norm's floor": (lambda net: setattr(net[3], "eps", 0.5), "eps of the module '3' has changed"),
    "a setting of one's own": (lambda net: setattr(net[2], "scale", 3.0), "scale of the module '2' has changed"),
    "a function": (lambda net: setattr(net[2], "act", torch.relu), "act of the module '2' has changed"),
    "a module more": (lambda net: net.append(nn.Tanh()), "module '5' has changed since the fit .None then, 'Tanh' now"),
}


@pytest.mark.parametrize("case", CHANGES)
def test_a_module_that_changes_after_the_fit_is_noticed(case: str, tmp_path: Path) -> None:
    net = changes()
    posterior = fit(net)
    posterior.predict(X)
    posterior.predict(X)  # a module may count its calls
    change, message = CHANGES[case]
    change(net)
    for use in (lambda: posterior.predict(X), posterior.log_evidence, lambda: posterior.save(tmp_path / "net.lapwing")):
        with pytest.raises(lw.errors.ModelError, match=message):
            use()


def test_a_file_is_refused_for_a_model_with_another_activation(tmp_path: Path) -> None:
    fit(small()).save(tmp_path / "net.lapwing")
    lw.load(tmp_path / "net.lapwing", small()).predict(X)
    other = small()
    other[1] = nn.ReLU()
    with pytest.raises(lw.errors.FileError, match=r"module '1' has changed.*Tanh"):
        lw.load(tmp_path / "net.lapwing", other)
