"""Which curvature: the exact GGN, its sampled estimate, the Hessian of the loss."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Normal
from torch.func import functional_call

import lapwing as lw
from lapwing.data.batches import Data
from lapwing.methods import full
from tests import problems
from tests.cases import BY_NAME, Wrapped
from tests.references import dense
from tests.references.layout import assembled
from tests.tolerances import assert_close, assert_within

D = torch.float64


def small() -> tuple[nn.Module, Tensor, Tensor]:
    model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 4)).double()
    return model, torch.randn(5, 2, dtype=D), torch.randint(0, 4, (5,))


def exact_ggn(model: nn.Module, x: Tensor) -> Tensor:
    return dense.ggn(dense.jacobian(model, x, len(x)), dense.softmax_hessian(model(x).detach()))


@pytest.mark.parametrize("make", [lw.Full, lw.Diagonal, lw.Kron, lw.EKron])
def test_sampled_fisher_is_unbiased(make: Any) -> None:
    """The mean of independent estimates is the exact curvature, within its own standard error.

    For Kron that holds for the output factors, for EKron for the trace of every block.
    """
    model, x, y = small()
    n = 150
    exact = exact_ggn(model, x)
    draws = []
    batches = [(x[:3], y[:3]), (x[3:], y[3:])]
    plain = lw.fit(model, batches, "classification", method=make(), prior=1.0)
    problem, data = plain.posterior.problem, Data(batches, torch.device("cpu"))
    for seed in range(n):  # without the checks of lw.fit, which would take most of the time
        posterior = make(curvature="fisher_mc").fit(problem, data, torch.Generator().manual_seed(seed))
        curvature = posterior.curvature
        if make is lw.Full:
            draws.append(curvature.matrix)
        elif make is lw.Diagonal:
            draws.append(assembled(curvature).diagonal())
        elif make is lw.Kron:
            draws.append(torch.cat([block.out.dense().reshape(-1) for block in curvature.blocks]))
        else:
            draws.append(torch.stack([block.dense().trace() for block in curvature.blocks]))
    expected = {
        lw.Full: lambda: exact,
        lw.Diagonal: lambda: exact.diagonal(),
        lw.Kron: lambda: torch.cat([block.out.dense().reshape(-1) for block in plain.posterior.curvature.blocks]),
        lw.EKron: lambda: torch.stack([exact[:9, :9].trace(), exact[9:, 9:].trace()]),
    }[make]()
    assert_within(torch.stack(draws), expected)


@pytest.mark.parametrize("make", [lw.Full, lw.Diagonal, lw.Kron, lw.EKron])
def test_sampled_fisher_follows_its_generator(make: Any) -> None:
    model, x, y = small()

    def draw(seed: int) -> Tensor:
        gen = torch.Generator().manual_seed(seed)
        posterior = lw.fit(
            model, [(x, y)], "classification", method=make(curvature="fisher_mc"), prior=1.0, generator=gen
        )
        return posterior.functions(x).cov

    assert torch.equal(draw(3), draw(3))
    assert not torch.equal(draw(3), draw(4))


def test_sampled_fisher_of_tokens_draws_every_token_by_itself() -> None:
    """E[g gᵀ] has no terms between tokens only if their seeds are kept apart, draw by draw."""
    model = Wrapped(lambda m, x: m.lin(x), lin=nn.Linear(2, 3)).double()
    x, y = torch.randn(2, 4, 2, dtype=D), torch.randint(0, 3, (2, 4))
    exact = dense.ggn(
        dense.by_datum(dense.jacobian(model, x, 2), 3), dense.softmax_hessian(model(x).detach().reshape(-1, 3))
    )
    draws = torch.stack([
        lw.fit(model, [(x, y)], "classification", method=lw.Full(curvature="fisher_mc"), prior=1.0,
               generator=torch.Generator().manual_seed(seed)).posterior.curvature.matrix
        for seed in range(150)
    ])  # fmt: skip
    assert_within(draws, exact)


def loss_hessian(model: nn.Module, names: list[str], loss: Any) -> Tensor:
    """Of loss(outputs) in the named parameters, by autograd on the flat vector."""
    tensors = dict(model.named_parameters())
    shapes = [tensors[name].shape for name in names]

    def of(theta: Tensor) -> Tensor:
        parts = theta.split([shape.numel() for shape in shapes])
        values = {name: part.reshape(shape) for name, part, shape in zip(names, parts, shapes, strict=True)}
        return loss(lambda x: functional_call(model, values, x))

    return torch.autograd.functional.hessian(of, torch.cat([tensors[name].detach().reshape(-1) for name in names]))


@pytest.mark.parametrize("likelihood", ["classification", "regression", "poisson", "heteroscedastic"])
def test_hessian_is_autograds(likelihood: str) -> None:
    model, x, y = small()
    targets = {
        "classification": y, "regression": torch.randn(5, 4, dtype=D), "poisson": torch.randint(0, 4, (5, 4)),
        "heteroscedastic": torch.randn(5, 2, dtype=D),
    }[likelihood]  # fmt: skip
    losses = {
        "classification": lambda f: nn.functional.cross_entropy(f, targets, reduction="sum"),
        "regression": lambda f: 0.5 * (f - targets).square().sum(),
        "poisson": lambda f: (f.exp() - targets * f).sum(),
        "heteroscedastic": lambda f: -Normal(f[:, :2], (0.5 * f[:, 2:]).exp()).log_prob(targets).sum(),
    }  # fmt: skip
    names = [name for name, _ in model.named_parameters()]
    expected = loss_hessian(model, names, lambda run: losses[likelihood](run(x)))
    chosen = lw.Gaussian(noise_std=1.0) if likelihood == "regression" else likelihood
    posterior = problems.unchanged(
        model,
        lambda: lw.fit(model, [(x[:2], targets[:2]), (x[2:], targets[2:])], chosen, prior=1e3,
                       method=lw.Full(curvature="hessian")),
    )  # fmt: skip
    assert_close(posterior.posterior.curvature.matrix, expected)
    assert float(torch.linalg.eigvalsh(expected).min()) < 0  # the case that a GGN would hide
    covariance = torch.linalg.inv(expected + 1e3 * torch.eye(len(expected), dtype=D))
    assert_close(posterior.functions(x).cov, dense.output_covariance(dense.jacobian(model, x, 5), covariance))
    assert_close(posterior.posterior.curvature.logdet(torch.tensor(1.0, dtype=D), posterior.prior),
                 -torch.linalg.slogdet(covariance)[1])  # fmt: skip


@pytest.mark.parametrize("weights", [lw.last_layer, lw.named("0"), lw.subnetwork(torch.tensor([0, 7, 11, 20]))])
def test_hessian_of_some_weights(weights: Any) -> None:
    model, x, y = small()
    posterior = lw.fit(
        model, [(x, y)], "classification", prior=1e3, weights=weights, method=lw.Full(curvature="hessian")
    )
    names = [name for name, _ in model.named_parameters()]
    whole = loss_hessian(model, names, lambda run: nn.functional.cross_entropy(run(x), y, reduction="sum"))
    index = {9: torch.arange(9), 16: torch.arange(9, 25), 4: torch.tensor([0, 7, 11, 20])}[
        posterior.network.selection.size
    ]
    assert_close(posterior.posterior.curvature.matrix, whole[index][:, index])


@pytest.mark.parametrize("name", ["lstm", "embedding", "attention", "token_level"])
def test_hessian_of_a_linear_head_is_its_ggn(name: str) -> None:
    """f is linear in the last layer, so the two agree: through any body, double backward included."""
    case = BY_NAME[name]
    model, data = case.build(), problems.batches(case)
    one, two = (lw.fit(model, data, "classification", method=lw.Full(curvature=c), weights="last_layer", prior=1.0)
                for c in ("hessian", "ggn"))  # fmt: skip
    assert_close(one.posterior.curvature.matrix, two.posterior.curvature.matrix)


@pytest.mark.parametrize("name", ["lstm", "embedding", "attention", "token_level", "cnn", "norms"])
def test_hessian_runs_on_every_kind_of_network(name: str) -> None:
    case = BY_NAME[name]
    model, data = case.build(), problems.batches(case)
    weights = lw.named("hh_l0|bias_ih_l1") if name == "lstm" else lw.all_weights  # some are enough for a slow one
    method = lw.Full(curvature="hessian")
    curvature = lw.fit(model, data, "classification", method=method, weights=weights, prior=1e3).posterior.curvature
    assert_close(curvature.matrix, curvature.matrix.T)
    assert not curvature.definite


@pytest.mark.parametrize(
    ("method", "curvature", "message"),
    [
        (lw.Diagonal, "hessian", "curvature is 'hessian'; expected one of ggn, fisher_mc"),
        (lw.Kron, "hessian", "expected one of ggn, fisher_mc"),
        (lw.EKron, "observed", "'observed'; expected one of ggn, fisher_mc, empirical"),
        (lw.Full, "gauss", "'gauss'; expected one of ggn, fisher_mc, empirical, hessian"),
        (lw.LowRank, "fisher_mc", "expected one of ggn"),
    ],
)
def test_what_does_not_exist_is_refused(method: Any, curvature: str, message: str) -> None:
    with pytest.raises(lw.errors.UnsupportedError, match=message):
        method(curvature=curvature)


def test_the_limit_follows_the_byte_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """25 weights: four matrices of 8 P² bytes in four times the budget. 30,000 weights are always accepted."""
    model, x, y = small()
    run = lambda: lw.fit(model, [(x, y)], "classification", method=lw.Full(), prior=1.0)
    with lw.memory.limited(4_000):
        run()
    monkeypatch.setattr(full, "ALWAYS", 10)
    with lw.memory.limited(5_000):
        run()
    with lw.memory.limited(4_000):
        with pytest.raises(lw.errors.UnsupportedError, match=r"over 25 weights .* the limit is 22 weights"):
            run()
        assert lw.check(model, x).costs["Full"].note == "over 22 weights: choose fewer"


def test_more_weights_than_the_limit_are_refused() -> None:
    model, x, y = small()

    def run() -> None:
        with pytest.raises(lw.errors.UnsupportedError, match=r"over 25 weights.*the limit is 10 weights.*Kron\(\)"):
            lw.fit(model, [(x, y)], "classification", method=lw.Full(limit=10))

    problems.unchanged(model, run)
