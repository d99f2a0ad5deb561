"""Training with the evidence: what is minimised, what is learned, what is kept."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch import distributions as d

import lapwing as lw
from lapwing.priors import PerLayer
from lapwing.runtime.trace import Trace
from tests import problems
from tests.cases import BY_NAME
from tests.references.evidence import Linearised
from tests.tolerances import assert_close
from tests.unit.training.settings import CUTS, LAYERS, SIZE, D, Fixup, arrays, flat, kept, mlp, set_to, shuffled

LIKELIHOODS: dict[str, Any] = {"gaussian": lw.Gaussian(), "categorical": lw.Categorical(), "bernoulli": lw.Bernoulli()}


def log_likelihood(kind: str, f: Tensor, y: Tensor, phi: Tensor | float) -> Tensor:
    """Return the log-likelihood without the normaliser of the noise, which does not depend on the weights."""
    if kind == "gaussian":
        return -0.5 * (f - y).square().sum() / phi
    return (d.Categorical(logits=f) if kind == "categorical" else d.Bernoulli(logits=f)).log_prob(y).sum()


def regularised(
    model: nn.Module, kind: str, x: Tensor, y: Tensor, precision: Tensor, phi: Tensor | float, mean: float = 0.0
) -> Tensor:
    """(-log p(y | x, w) / n - log p(w) / N) of a batch, constants left out, with ``precision`` (P,)."""
    theta = torch.cat([p.reshape(-1) for p in model.parameters()])
    penalty = 0.5 * (precision * (theta - mean).square()).sum()
    return -log_likelihood(kind, model(x), y, phi) / len(y) + penalty / SIZE


@pytest.mark.parametrize("kind", list(LIKELIHOODS))
def test_a_full_batch_follows_the_gradient_of_the_posterior(kind: str) -> None:
    """One step of SGD, whose first step with Nesterov's momentum of 0.9 is 1.9 times the rate."""
    x, y = arrays(kind)
    prior = lw.per_layer({"0": 0.5, "2": 3.0, "4": 7.0}, mean=0.2)
    recipe = lw.recipes.online(1, prior=prior, update=kept, optimiser="sgd", rate=1e-2, last_rate=1e-2)
    trained = lw.train(mlp(), [(x, y)], LIKELIHOODS[kind], recipe=recipe)
    start = mlp()
    precision = torch.tensor([0.5, 3.0, 7.0], dtype=D)[LAYERS]
    value = regularised(start, kind, x, y, precision, 1.0, mean=0.2)
    gradient = torch.cat([g.reshape(-1) for g in torch.autograd.grad(value, list(start.parameters()))])
    assert_close((flat(start) - flat(trained.model)) / (1.9 * 1e-2), gradient)
    assert trained.history[0].loss == pytest.approx(value.item(), rel=1e-12)


@pytest.mark.parametrize("kind", list(LIKELIHOODS))
@pytest.mark.parametrize("optimiser", ["adam", "sgd"])
def test_training_is_a_plain_loop_on_that_objective(kind: str, optimiser: str) -> None:
    """Three epochs of three unequal batches, a cosine rate, and other precisions and noise after every epoch."""
    x, y = arrays(kind)
    data = problems.split(x, y, CUTS)
    values = lambda number: torch.tensor([1.0, 2.0, 3.0], dtype=D) + number
    phi = lambda number: 0.5 + 0.25 * number
    update = set_to(values, phi if kind == "gaussian" else None)
    recipe = lw.recipes.online(
        3, prior=lw.per_layer(0.5), update=update, optimiser=optimiser, rate=0.02, last_rate=0.005, keep_best=False
    )
    trained = lw.train(mlp(), data, LIKELIHOODS[kind], recipe=recipe)

    model = mlp()
    make = {"adam": torch.optim.Adam, "sgd": lambda p: torch.optim.SGD(p, lr=1.0, momentum=0.9, nesterov=True)}
    stepper = make[optimiser](list(model.parameters()))
    precision, noise, losses = torch.full((83,), 0.5, dtype=D), 1.0, []
    for epoch in range(3):
        total, seen = 0.0, 0
        for inputs, targets in data:
            progress = (epoch + seen / SIZE) / 3
            for group in stepper.param_groups:
                group["lr"] = 0.005 + 0.015 * (1 + math.cos(math.pi * progress)) / 2
            loss = regularised(model, kind, inputs, targets, precision, noise)
            stepper.zero_grad()
            loss.backward()
            stepper.step()
            total, seen = total + len(targets) * loss.item(), seen + len(targets)
        losses.append(total / SIZE)
        precision, noise = values(epoch)[LAYERS], phi(epoch) if kind == "gaussian" else 1.0
    assert_close(flat(trained.model), flat(model))
    assert [epoch.loss for epoch in trained.history] == pytest.approx(losses, rel=1e-11)
    assert [epoch.precisions for epoch in trained.history] == [tuple(values(i).tolist()) for i in range(3)]
    assert trained.posterior.prior.values.tolist() == values(2).tolist()


def test_lbfgs_sees_all_batches_at_once() -> None:
    """The objective does not depend on the batches, up to rounding that twenty line searches amplify."""
    x, y = arrays("gaussian")
    recipe = lambda: lw.recipes.classic(1, update=kept)
    whole = lw.train(mlp(), [(x, y)], "regression", recipe=recipe())
    cut = lw.train(mlp(), problems.split(x, y, CUTS), "regression", recipe=recipe())
    assert cut.history[0].loss == pytest.approx(whole.history[0].loss, rel=1e-12)
    assert_close(flat(cut.model), flat(whole.model), 0.25)
    assert float((flat(whole.model) - flat(mlp())).abs().max()) > 0.1


def wave() -> tuple[Tensor, Tensor]:
    """sin 2x with a noise of 0.2."""
    gen = torch.Generator().manual_seed(0)
    x = torch.linspace(-2, 2, 120, dtype=D)[:, None]
    return x, (2 * x).sin() + 0.2 * torch.randn(120, 1, dtype=D, generator=gen)


def test_classic_ends_at_mackays_fixed_point() -> None:
    """Stationary weights, α = γ/|w|² and φ = SSE/(N - γ), all by dense matrices, each to 1e-5; noise near the truth.

    The gradient of the mean loss starts at about one and is driven below 1e-4: torch's L-BFGS skips updates with
    y·s below 1e-10, so it may be slow once gradients are below 1e-5 or so. The noise is known to 1 part in √(2·110),
    0.014, and three times that is allowed.
    """
    x, y = wave()
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(1, 6), nn.Tanh(), nn.Linear(6, 1)).to(D)
    trained = lw.train(net, problems.split(x, y, (50, 37, 33)), "regression", recipe=lw.recipes.classic(35))
    model, alpha, phi = trained.model, trained.posterior.prior.values, trained.posterior.likelihood.dispersion
    reference = Linearised.of("gaussian", model, x, y)
    theta = flat(model)
    covariance = torch.linalg.inv(reference.ggn / phi + alpha * torch.eye(19, dtype=D))
    gamma = 19 - alpha * covariance.trace()
    sse = (model(x) - y).detach().square().sum()
    value = 0.5 * (model(x) - y).square().sum() / phi + 0.5 * alpha * sum(p.square().sum() for p in model.parameters())
    slope = torch.cat([g.reshape(-1) for g in torch.autograd.grad(value / 120, list(model.parameters()))])
    assert float(slope.abs().max()) < 1e-4
    assert float(alpha) == pytest.approx(float(gamma / theta.square().sum()), rel=1e-5)
    assert float(phi) == pytest.approx(float(sse / (120 - gamma)), rel=1e-5)
    assert float(phi.sqrt()) == pytest.approx(0.2, abs=0.042)
    assert 5 < float(gamma) < 19
    assert trained.history[-1].log_evidence == pytest.approx(reference.evidence(alpha.expand(19), phi).item(), rel=1e-9)


def test_classic_by_layer() -> None:
    """One α for each layer: γ_d / |w_d|²."""
    x, y = wave()
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(1, 6), nn.Tanh(), nn.Linear(6, 1)).to(D)
    trained = lw.train(net, [(x, y)], "regression", recipe=lw.recipes.classic(25, prior=lw.per_layer(1.0)))
    phi, values = trained.posterior.likelihood.dispersion, trained.posterior.prior.values
    owner = torch.tensor([0] * 12 + [1] * 7)
    reference = Linearised.of("gaussian", trained.model, x, y)
    decided = 1 - values[owner] * torch.linalg.inv(reference.ggn / phi + torch.diag(values[owner])).diagonal()
    for layer in (0, 1):
        in_layer = owner == layer
        expected = decided[in_layer].sum() / flat(trained.model)[in_layer].square().sum()
        assert float(values[layer]) == pytest.approx(float(expected), rel=1e-4)
    assert abs(float((values[0] / values[1]).log())) > 0.3


def test_online_learns_noise_and_precisions() -> None:
    """Kronecker evidence on mini-batches: noise near the truth, different precisions, more evidence."""
    x, y = wave()
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(1, 6), nn.Tanh(), nn.Linear(6, 1)).to(D)
    recipe = lw.recipes.online(150, rate=0.05, update=lw.tuners.Ascend(steps=10), frequency=5)
    trained = lw.train(net, problems.split(x, y, (50, 37, 33)), "regression", recipe=recipe)
    assert float(trained.posterior.likelihood.dispersion.sqrt()) == pytest.approx(0.2, abs=0.05)
    asked = [e for e in trained.history if e.log_evidence is not None]
    assert asked[-1].log_evidence > asked[0].log_evidence + 50
    assert len(set(asked[-1].precisions)) == 2
    assert float((trained.model(x).detach() - (2 * x).sin()).square().mean().sqrt()) < 0.1


@pytest.mark.parametrize("best", [True, False])
def test_the_best_moment_or_the_last(best: bool) -> None:
    """The precisions get worse with every update: the first evidence is the best."""
    update = set_to(lambda number: torch.tensor(10.0 ** (number + 1), dtype=D))
    recipe = lw.recipes.online(4, prior=lw.isotropic(1.0), update=update, method=lw.Full(), keep_best=best, rate=1e-2)
    trained = lw.train(mlp(), shuffled("categorical"), "classification", recipe=recipe)
    evidences = [epoch.log_evidence for epoch in trained.history]
    assert max(evidences) == evidences[0] > evidences[-1] + 1
    expected = evidences[0] if best else evidences[-1]
    assert float(trained.posterior.log_evidence()) == pytest.approx(expected, rel=1e-12)
    assert float(trained.posterior.prior.values) == (10.0 if best else 10000.0)
    same = all(torch.equal(a, b) for a, b in zip(trained.model.state_dict().values(), trained.state.weights.values()))
    assert same is not best  # the state goes on from the last moment in any case
    assert trained.state.precision.item() == 10000.0


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, [0, 1, 2, 3, 4, 5, 6, 7]),
        ({"burn_in": 3}, [3, 4, 5, 6, 7]),
        ({"burn_in": 2, "frequency": 2}, [2, 4, 6, 7]),
        ({"frequency": 3}, [0, 3, 6, 7]),
        ({"burn_in": 100}, [7]),
    ],
)
def test_when_the_evidence_is_asked(settings: dict[str, Any], expected: list[int]) -> None:
    """From ``burn_in`` on, every ``frequency`` epochs, and after the last in any case."""
    calls: list[int] = []

    def update(posterior: Any) -> Any:
        calls.append(1)
        return posterior

    data = [arrays("categorical")]
    recipe = lw.recipes.online(8, update=update, method=lw.Diagonal(), **settings)
    history = lw.train(mlp(), data, "classification", recipe=recipe).history
    assert [epoch.number for epoch in history] == list(range(8))
    assert [epoch.number for epoch in history if epoch.log_evidence is not None] == expected
    assert [epoch.number for epoch in history if epoch.precisions] == expected
    assert len(calls) == len(expected)


NETWORKS: dict[str, Any] = {
    "mlp": BY_NAME["mlp"].build,
    "cnn": BY_NAME["cnn"].build,
    "resnet_batchnorm": BY_NAME["resnet_batchnorm"].build,
    "fixup": lambda: (torch.manual_seed(3), Fixup().to(D))[1],
    "norms": BY_NAME["norms"].build,
    "tied": BY_NAME["tied"].build,
    "shared_weight": BY_NAME["shared_weight"].build,
    "dict_input": BY_NAME["dict_input"].build,
    "token_level": BY_NAME["token_level"].build,
    "squeezed": BY_NAME["squeezed"].build,
}
PRIORS: dict[str, Any] = {
    "isotropic": lw.isotropic(0.5),
    "per_layer": lw.per_layer(0.5),
    "grouped": lw.grouped({r".*bias.*": 0.3, r"(?!.*bias).*": 1.4}),
}


def training_data(name: str, kind: str) -> tuple[Any, Tensor]:
    case = BY_NAME["cnn" if name == "fixup" else name]
    x = case.batch(12)
    y = torch.randn(12, *case.outputs, dtype=D) if kind == "gaussian" else problems.targets(case, 12)
    return x, y


@pytest.mark.parametrize(
    ("name", "kind", "prior"),
    [
        *[(name, "gaussian", "per_layer") for name in ("mlp", "fixup")],
        *[(name, "categorical", "per_layer") for name in ("mlp", "cnn", "norms")],
        *[(name, "categorical", "grouped") for name in ("resnet_batchnorm", "fixup")],
        *[(name, "categorical", "per_layer") for name in ("tied", "dict_input", "token_level")],
        ("shared_weight", "gaussian", "grouped"),
        ("resnet_batchnorm", "gaussian", "isotropic"),
        ("squeezed", "bernoulli", "per_layer"),
    ],
)  # fmt: skip
def test_networks_of_every_kind(name: str, kind: str, prior: str) -> None:
    """The given model is not changed; the copy fits better; its evidence is that of dense matrices."""
    x, y = training_data(name, kind)
    data = problems.split(x, y, (5, 3, 4))
    model = NETWORKS[name]()
    recipe = lw.recipes.online(3, method=lw.Full(), prior=PRIORS[prior], update=lw.tuners.Ascend(steps=4), rate=0.02)
    trained = problems.unchanged(model, lambda: lw.train(model, data, LIKELIHOODS[kind], recipe=recipe))
    assert all(not epoch.finding for epoch in trained.history)
    assert not any(module.training for module in trained.model.modules())
    before, after = (Linearised.of(kind, net, x, y) for net in (model, trained.model))
    phi = trained.posterior.likelihood.dispersion if kind == "gaussian" else 1.0
    assert float(after.log_likelihoods(phi).sum()) > float(before.log_likelihoods(phi).sum())
    named = [(n, p.numel()) for n, p in model.named_parameters()]
    groups = {
        "isotropic": lambda n: "all",
        "per_layer": lambda n: n.rpartition(".")[0],
        "grouped": lambda n: "bias" in n,
    }[prior]
    order = list(dict.fromkeys(groups(n) for n, _ in named))
    owner = torch.tensor([order.index(groups(n)) for n, _ in named]).repeat_interleave(
        torch.tensor([s for _, s in named])
    )
    precision = trained.posterior.prior.values.reshape(-1)[owner]
    assert_close(trained.posterior.log_evidence(), after.evidence(precision, phi), 0.55)
    best = max(epoch.log_evidence for epoch in trained.history)
    assert float(trained.posterior.log_evidence()) == pytest.approx(best, rel=1e-9)


def test_running_statistics_are_those_of_training() -> None:
    """BatchNorm: momentum 0.1 towards the batches' own statistics, in the copy alone."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 3)).to(D)  # in training mode, as it is made
    x, y = arrays("categorical")
    data, recipe = problems.split(x, y, CUTS), lw.recipes.online(2, keep_best=False)
    trained = problems.unchanged(model, lambda: lw.train(model, data, "classification", recipe=recipe))
    mean = torch.zeros(4, dtype=D)
    for inputs, _ in data * 2:
        mean = 0.9 * mean + 0.1 * inputs.mean(0)
    assert_close(trained.model[0].running_mean, mean)
    assert int(trained.model[0].num_batches_tracked) == 6


def test_frozen_weights_stay() -> None:
    model = BY_NAME["frozen_weight"].build()
    trained = lw.train(model, [arrays("categorical")], "classification", recipe=lw.recipes.online(2, rate=0.1))
    assert torch.equal(trained.model[2].weight, model[2].weight)
    assert not trained.model[2].weight.requires_grad
    assert not torch.equal(trained.model[2].bias, model[2].bias)
    assert trained.posterior.network.selection.size == 83 - 30


def test_some_weights_uncertain_all_trained() -> None:
    """The prior covers what is selected; the rest is trained without a penalty."""
    x, y = arrays("categorical")
    recipe = lw.recipes.online(1, update=kept, prior=lw.isotropic(5.0), optimiser="sgd", rate=1e-2, last_rate=1e-2)
    trained = lw.train(mlp(), [(x, y)], "classification", recipe=recipe, weights="last_layer")
    start = mlp()
    precision = torch.where(LAYERS == 2, 5.0, 0.0).to(D)
    value = regularised(start, "categorical", x, y, precision, 1.0)
    gradient = torch.cat([g.reshape(-1) for g in torch.autograd.grad(value, list(start.parameters()))])
    assert_close((flat(start) - flat(trained.model)) / 1.9e-2, gradient)
    assert trained.posterior.network.selection.size == 18


def test_ignored_targets_do_not_count() -> None:
    """The penalty is spread over the data that count."""
    x, y = arrays("categorical")
    keep = torch.arange(SIZE) % 4 != 0
    recipe = lambda: lw.recipes.online(2, prior=lw.isotropic(5.0), update=kept, rate=1e-2)
    hidden = lw.train(mlp(), [(x, y.masked_fill(~keep, -100))], "classification", recipe=recipe())
    without = lw.train(mlp(), [(x[keep], y[keep])], "classification", recipe=recipe())
    assert_close(flat(hidden.model), flat(without.model))


def raising(posterior: Any) -> Any:
    raise lw.errors.DivergedError("made to fail.", Trace("made"), posterior)


def test_an_update_that_diverges_is_reported() -> None:
    """Prior and noise stay where they were, training goes on, and the next update may do better."""
    calls: list[int] = []

    def update(posterior: Any) -> Any:
        calls.append(1)
        if len(calls) in (2, 3):
            raising(posterior)
        return set_to(lambda _: torch.tensor(float(len(calls)), dtype=D), lambda _: 0.5 + len(calls))(posterior)

    recipe = lw.recipes.online(4, prior=lw.isotropic(9.0), update=update, method=lw.Full(), keep_best=False)
    trained = lw.train(mlp(), [arrays("gaussian")], "regression", recipe=recipe)
    assert [epoch.precisions for epoch in trained.history] == [(1.0,), (1.0,), (1.0,), (4.0,)]
    assert [epoch.noise for epoch in trained.history] == [(1.5,), (1.5,), (1.5,), (4.5,)]
    assert [bool(epoch.finding) for epoch in trained.history] == [False, True, True, False]
    assert trained.history[1].finding == "prior and noise kept: made to fail."
    reference = Linearised.of("gaussian", trained.model, *arrays("gaussian"))
    expected = reference.evidence(torch.full((83,), 4.0, dtype=D), 4.5)
    assert trained.history[-1].log_evidence == pytest.approx(expected.item(), rel=1e-9)


def test_an_update_that_diverges_at_once() -> None:
    """The prior stays as given, and the noise is the residual's."""
    recipe = lw.recipes.online(1, prior=lw.isotropic(9.0), update=raising, method=lw.Full())
    trained = lw.train(mlp(), [arrays("gaussian")], "regression", recipe=recipe)
    x, y = arrays("gaussian")
    assert trained.history[0].precisions == (9.0,)
    assert trained.history[0].noise[0] == pytest.approx((trained.model(x) - y).square().mean().item(), rel=1e-9)


def test_a_precision_that_really_runs_away() -> None:
    """With weights near the prior mean and targets without noise, the evidence rises with the precision without end."""
    x, y = arrays("gaussian")
    prior = lw.isotropic(1e4, mean=flat(mlp()))
    recipe = lw.recipes.online(
        2, prior=prior, update=lw.tuners.Ascend(steps=40, rate=1.0), method=lw.Full(), rate=1e-12, last_rate=1e-12
    )
    trained = lw.train(mlp(), [(x, y)], lw.Gaussian(noise_std=1e-7), recipe=recipe)
    for epoch in trained.history:
        assert epoch.precisions == (1e4,)
        assert "prior and noise kept: the evidence has no optimum: a prior precision ran to" in epoch.finding
    assert float(trained.posterior.prior.values) == 1e4


@pytest.mark.parametrize("optimiser", ["sgd", "adam", "lbfgs"])
def test_a_loss_that_is_no_number(optimiser: str) -> None:
    """Overflow in single precision, in the loss or in the last step; the given model is not changed."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
    x, y = arrays("gaussian")
    data = [(x.float() * 1e18, y.float())] * 2
    recipe = lw.recipes.online(2, optimiser=optimiser, rate=1e15, burn_in=5)
    remedy = "Scale inputs and targets" if optimiser == "lbfgs" else r"Lower the rate \(1e\+15\)"
    message = rf"the (training loss|sum of the weights) is -?(nan|inf) in epoch \d; expected a finite number. {remedy}"
    with pytest.raises(lw.errors.NumericalError, match=message):
        problems.unchanged(model, lambda: lw.train(model, data, "regression", recipe=recipe))


def test_an_update_that_needs_data_gets_them() -> None:
    data = [arrays("categorical")]
    given, without_data = (lw.tuners.MaximiseBound(d, block=5, steps=4) for d in (data, None))
    one, two = (
        lw.train(mlp(), data, "classification", recipe=lw.recipes.online(2, update=u)) for u in (given, without_data)
    )
    assert one.history == two.history
    assert one.history[0].precisions != (1.0, 1.0, 1.0)


def test_single_precision_on_wrapped_models_and_under_autocast() -> None:
    """The module inside a wrapper is trained; autocast has no effect, as in fit."""
    x, y = arrays("categorical")
    data = [(x.float(), y)]
    recipe = lambda: lw.recipes.online(2, rate=1e-2)
    plain = lw.train(mlp().float(), data, "classification", recipe=recipe())
    wrapped = lw.train(nn.DataParallel(mlp().float()), data, "classification", recipe=recipe())
    assert list(wrapped.model.state_dict()) == list(mlp().state_dict())
    assert torch.equal(flat(wrapped.model), flat(plain.model))
    with torch.autocast("cpu"):
        assert lw.train(mlp().float(), data, "classification", recipe=recipe()).history == plain.history
    assert {p.dtype for p in wrapped.model.parameters()} == {torch.float32}


def test_the_posterior_belongs_to_the_trained_model() -> None:
    """It predicts with the copy, can be tuned, and raises an error if the weights of the copy change."""
    x, _ = arrays("categorical")
    trained = lw.train(mlp(), shuffled("categorical"), "classification", recipe=lw.recipes.online(2, rate=1e-2))
    assert_close(trained.posterior.functions(x).mean, trained.model(x))
    assert trained.posterior.network.model is trained.model
    assert float(trained.posterior.tuned().log_evidence()) >= float(trained.posterior.log_evidence())
    trained.model[0].weight.data += 0.1
    with pytest.raises(lw.errors.ModelError, match="changed since the fit"):
        trained.posterior.predict(x)


def test_default_recipe_and_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """ "classification" with one output is Bernoulli, as in fit."""
    x = BY_NAME["squeezed"].batch(12)
    y = problems.targets(BY_NAME["squeezed"], 12)
    short = lw.recipes.online(2)
    trained = lw.train(BY_NAME["squeezed"].build(), [(x, y)], "classification", recipe=short)
    assert isinstance(trained.posterior.likelihood, lw.Bernoulli)
    assert isinstance(short.method, lw.Kron)
    assert lw.recipes.online().epochs == 100
    monkeypatch.setattr("lapwing.api.online", lambda: lw.recipes.online(2))
    default = lw.train(nn.Linear(4, 3), [(x.float(), torch.randn(12, 3))], "regression")
    assert len(default.history) == 2
    assert isinstance(default.posterior.prior.given, PerLayer)
