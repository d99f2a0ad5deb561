"""Training by the evidence: the loop, recipes, and runs that go on."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch import distributions as d

import lapwing as lw
from lapwing import errors, recipes
from lapwing.api import Trained
from lapwing.posteriors.base import Trace
from lapwing.priors import PerLayer
from lapwing.training import TrainingState
from tests import problems
from tests.attack.damage import Contents
from tests.cases import BY_NAME
from tests.references.evidence import Linearised
from tests.tolerances import assert_close
from tests.unit.training.settings import (
    CUTS,
    LAYERS,
    SIZE,
    D,
    Fixup,
    arrays,
    dropped,
    flat,
    kept,
    mlp,
    same,
    set_to,
    shuffled,
)

# Training with the evidence: what is minimised, what is learned, what is kept.

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


def wave() -> tuple[nn.Module, Tensor, Tensor]:
    """A network of 19 weights, and sin 2x with a noise of 0.2."""
    gen = torch.Generator().manual_seed(0)
    x = torch.linspace(-2, 2, 120, dtype=D)[:, None]
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(1, 6), nn.Tanh(), nn.Linear(6, 1)).to(D)
    return net, x, (2 * x).sin() + 0.2 * torch.randn(120, 1, dtype=D, generator=gen)


def test_classic_ends_at_mackays_fixed_point() -> None:
    """Stationary weights, α = γ/|w|² and φ = SSE/(N - γ), all by dense matrices, each to 1e-5; noise near the truth.

    The gradient of the mean loss starts at about one and is driven below 1e-4: torch's L-BFGS skips updates with
    y·s below 1e-10, so it may be slow once gradients are below 1e-5 or so. The noise is known to 1 part in √(2·110),
    0.014, and three times that is allowed.
    """
    net, x, y = wave()
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
    net, x, y = wave()
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
    net, x, y = wave()
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
    model = (torch.manual_seed(3), Fixup().to(D))[1] if name == "fixup" else BY_NAME[name].build()
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
def test_a_loss_that_is_nan(optimiser: str) -> None:
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


# The settings of a training run, what is refused, and what is shown.


def test_settings_have_their_place() -> None:
    recipe = recipes.classic(epochs=7, prior=lw.per_layer(2.0), seed=3)
    assert (recipe.epochs, recipe.seed, recipe.optimiser) == (7, 3, "lbfgs")
    assert isinstance(recipe.prior, PerLayer)
    assert isinstance(recipe.method, lw.Full)
    with pytest.raises(errors.UnsupportedError, match=r"is 'epoch'; expected one of epochs.*Did you mean 'epochs'"):
        recipes.online(epoch=3)


def test_the_rate_falls_by_a_cosine() -> None:
    recipe = recipes.online(10, rate=1.0, last_rate=0.2)
    assert [recipe.rate_at(p) for p in (0.0, 0.5, 1.0, 2.0)] == pytest.approx([1.0, 0.6, 0.2, 0.2])


@pytest.mark.parametrize(
    ("recipe", "likelihood", "error", "message"),
    [
        (recipes.online, "classification", errors.UnsupportedError, r"recipe is .*expected online\(...\)"),
        (recipes.Recipe, "classification", errors.UnsupportedError, "recipe is .*expected online"),
        ("online", "classification", errors.UnsupportedError, "recipe is 'online'"),
        (None, lw.Categorical, errors.UnsupportedError, "likelihood is the class Categorical"),
        (None, "classify", errors.UnsupportedError, "likelihood is 'classify'; expected one of"),
        (None, lw.Gaussian(per_output=True), errors.UnsupportedError, "one noise for all outputs"),
        (recipes.online(2, prior=lw.priors.g_prior()), "classification", errors.UnsupportedError, "a g-prior depends on the curvature"),  # noqa: E501
        (recipes.online(2, prior=lw.priors.per_normalised_group()), "classification", errors.UnsupportedError, "per_normalised_group"),  # noqa: E501
        (recipes.online(2, method=lw.baselines.MapOnly()), "classification", errors.UnsupportedError, r"MapOnly\(\) has no evidence"),  # noqa: E501
        (None, "regression", errors.DataError, "Gaussian: targets have the shape"),
    ],
)  # fmt: skip
def test_what_is_refused(recipe: Any, likelihood: Any, error: Any, message: str) -> None:
    model = mlp()
    with pytest.raises(error, match=message):
        problems.unchanged(model, lambda: lw.train(model, [arrays("categorical")], likelihood, recipe=recipe))


def test_bad_models_and_data() -> None:
    x, y = arrays("categorical")
    with pytest.raises(errors.ModelError, match=r"expected a torch\.nn\.Module"):
        lw.train(lambda x: x, [(x, y)], "classification")  # type: ignore[arg-type]
    with pytest.raises(errors.DataError, match="data is empty"):
        lw.train(mlp(), [], "classification")
    with pytest.raises(errors.DataError, match="one-shot iterator"):
        lw.train(mlp(), iter([(x, y)]), "classification")
    with pytest.raises(errors.DataError, match="NaN or infinite"):
        lw.train(mlp(), [(x * float("nan"), y)], "classification")
    mixing = nn.Sequential(mlp(), nn.Softmax(0))
    with pytest.raises(errors.ModelError, match="with the rest of its batch"):
        lw.train(mixing, [(x, y)], "classification")


def recipe() -> recipes.Recipe:
    values = lambda number: torch.tensor([0.125, 4.0, 2.0], dtype=D)
    return recipes.online(4, burn_in=2, update=set_to(values))


def test_the_bar_shows_loss_evidence_and_precisions(capsys: pytest.CaptureFixture[str]) -> None:
    trained = lw.train(mlp(), [arrays("categorical")], "classification", recipe=recipe(), progress=True)
    printed = capsys.readouterr().err
    assert "training: 100%" in printed
    assert "4/4" in printed
    last = trained.history[-1]
    assert f"loss {last.loss:.4g}, log evidence {last.log_evidence:.6g}, precision 0.12..4" in printed
    lw.train(mlp(), [arrays("categorical")], "classification", recipe=recipe(), progress=False)
    assert capsys.readouterr().err == ""


def test_a_resumed_bar_starts_where_it_stopped(capsys: pytest.CaptureFixture[str]) -> None:
    data = [arrays("categorical")]
    state = lw.train(mlp(), data, "classification", recipe=recipes.online(3), progress=False).state
    lw.train(mlp(), data, "classification", recipe=recipes.online(4), resume=state, progress=True)
    assert "3/4" in capsys.readouterr().err


# Equal seeds give equal results; a resumed run ends like an uninterrupted one.

OPTIMISERS = ["adam", "sgd", "lbfgs"]
DATA = ["batches", "shuffled"]


class CrashError(Exception):
    """An error that ends a run in the middle."""


def data(name: str) -> Any:
    return problems.split(*arrays("gaussian"), CUTS) if name == "batches" else shuffled()


def resuming_recipe(optimiser: str, epochs: int = 5, crash: int | None = None, **changes: Any) -> lw.recipes.Recipe:
    """A constant rate, so that a shorter run is the beginning of a longer one; ``crash`` is an epoch."""
    calls: list[int] = []
    climb = lw.tuners.Ascend(steps=5)

    def update(posterior: Any) -> Any:
        calls.append(1)
        if crash is not None and len(calls) > crash:
            raise CrashError
        return climb(posterior)

    settings = {"rate": 1e-2, "last_rate": 1e-2, "optimiser": optimiser, "update": update}
    return lw.recipes.online(epochs, **{**settings, **changes})


def run(
    recipe: lw.recipes.Recipe, source: Any, noise: int = 0, model: nn.Module | None = None, **settings: Any
) -> Trained:
    """Train, starting with the global generator in an arbitrary state."""
    model = dropped() if model is None else model
    torch.manual_seed(noise)
    return lw.train(model, source, "regression", recipe=recipe, **settings)


@pytest.mark.parametrize("optimiser", OPTIMISERS)
def test_equal_seeds_give_equal_results(optimiser: str) -> None:
    """With dropout and a shuffling loader, from any state of the global generator; other seeds give other results."""
    one, two = (run(resuming_recipe(optimiser, 3), shuffled(), noise=noise) for noise in (1, 2))
    same(one, two)
    other = run(resuming_recipe(optimiser, 3, seed=1), shuffled(), noise=1)
    assert float((flat(one.model) - flat(other.model)).abs().max()) > 1e-4
    assert one.history[0].loss != other.history[0].loss


def test_epochs_differ_from_each_other() -> None:
    """A seed for each epoch, and not one for all: with weights and noise at rest the losses still differ."""
    still = run(
        resuming_recipe("sgd", 3, rate=1e-15, last_rate=1e-15, update=kept, prior=lw.isotropic(1e-9)), shuffled()
    )
    assert abs(still.history[1].loss / still.history[2].loss - 1) > 1e-6


def test_random_numbers_of_the_caller_are_left_alone() -> None:
    """A list of batches draws no random numbers, so the global generator must not change."""
    torch.manual_seed(5)
    expected = torch.rand(3)
    model, source = dropped(), data("batches")
    torch.manual_seed(5)
    lw.train(model, source, "regression", recipe=resuming_recipe("adam", 2))
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize("source", DATA)
@pytest.mark.parametrize("optimiser", OPTIMISERS)
def test_resuming_from_memory(optimiser: str, source: str) -> None:
    whole = run(resuming_recipe(optimiser), data(source), noise=1)
    first = run(resuming_recipe(optimiser, 2), data(source), noise=2)
    assert first.state.epoch == 2
    assert first.history == whole.history[:2]
    model = dropped()
    second = problems.unchanged(
        model, lambda: run(resuming_recipe(optimiser), data(source), noise=3, model=model, resume=first.state)
    )
    same(second, whole)
    again = run(resuming_recipe(optimiser), data(source), noise=4, resume=first.state)  # the state was not used up
    same(again, whole)


@pytest.mark.parametrize("source", DATA)
@pytest.mark.parametrize("optimiser", OPTIMISERS)
def test_resuming_after_a_crash(optimiser: str, source: str, tmp_path: Path) -> None:
    """With a falling learning rate, and an update after every other epoch from the second on."""
    settings = {"rate": 2e-2, "last_rate": 1e-3, "burn_in": 1, "frequency": 2}
    whole = run(resuming_recipe(optimiser, 6, **settings), data(source), noise=1)
    path = tmp_path / "run.state"
    with pytest.raises(CrashError):
        run(resuming_recipe(optimiser, 6, crash=1, **settings), data(source), noise=2, checkpoint=path)
    assert TrainingState.load(path).epoch == 3
    resumed = run(resuming_recipe(optimiser, 6, **settings), data(source), noise=3, resume=path, checkpoint=str(path))
    same(resumed, whole)
    assert TrainingState.load(path).epoch == 6
    assert list(tmp_path.iterdir()) == [path]
    same(
        run(resuming_recipe(optimiser, 6, **settings), data(source), noise=4, resume=str(path)), whole
    )  # nothing left to do


@pytest.mark.parametrize("best", [True, False])
def test_the_best_moment_may_lie_before_the_crash(best: bool, tmp_path: Path) -> None:
    """The learning rate is so large that the evidence jumps; which epoch is best depends on rounding."""
    settings = {"rate": 1.0, "last_rate": 1.0, "keep_best": best, "update": lw.tuners.Ascend(steps=5)}
    whole = run(resuming_recipe("sgd", 4, **settings), data("batches"))
    first = run(resuming_recipe("sgd", 2, **settings), data("batches"), checkpoint=tmp_path / "state")
    second = run(resuming_recipe("sgd", 4, **settings), data("batches"), resume=tmp_path / "state")
    same(second, whole)
    before = [epoch.log_evidence for epoch in whole.history[:2]]
    assert first.state.best["evidence"] == pytest.approx(max(before) if best else before[1])


def test_buffers_are_resumed_too() -> None:
    build = BY_NAME["norms"].build
    source = problems.split(*arrays("gaussian"), CUTS)
    whole = run(resuming_recipe("adam", 3), source, model=build())
    first = run(resuming_recipe("adam", 1), source, model=build())
    same(run(resuming_recipe("adam", 3), source, model=build(), resume=first.state), whole)


def test_a_checkpoint_stays_whole_while_the_next_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "state"
    run(resuming_recipe("adam", 1), data("batches"), checkpoint=path)
    before = path.read_bytes()

    def crash(*_: Any) -> None:
        raise CrashError

    monkeypatch.setattr("os.replace", crash)
    with pytest.raises(CrashError):
        run(resuming_recipe("adam", 2), data("batches"), resume=path, checkpoint=path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_files_without_a_state_are_refused(tmp_path: Path) -> None:
    path, good = tmp_path / "state", tmp_path / "good"
    run(resuming_recipe("adam", 1), data("batches"), checkpoint=good)
    whole = good.read_bytes()
    opened = tmp_path / "opened"

    class Trap:
        def __reduce__(self) -> Any:
            return (Path.touch, (opened,))

    torch.save({"weights": Trap()}, path)  # code in a file is not run
    foreign = {
        "cut": whole[: len(whole) // 2],
        "empty": b"",
        "text": b"not a state at all",
        "pickle": path.read_bytes(),
    }
    for content in foreign.values():
        path.write_bytes(content)
        with pytest.raises(lw.errors.FileError, match=r"cannot be read: .* Expected a file with a Lapwing training"):
            run(resuming_recipe("adam", 2), data("batches"), resume=path)
    assert not opened.exists()


DAMAGE: dict[str, Any] = {
    "epoch -5": lambda file: file.root["settings"].update(epoch=-5),
    "more epochs than recorded": lambda file: file.root["settings"].update(epoch=2),
    "a setting too many": lambda file: file.root["settings"].update(extra=1),
    "no precision": lambda file: file.tensors.pop("precision"),
    "negative precision": lambda file: file.tensors["precision"].neg_(),
    "negative noise": lambda file: file.tensors["noise"].neg_(),
    "noise of the best epoch not finite": lambda file: file.tensors["best.noise"].fill_(torch.inf),
    "negative moment": lambda file: file.tensors["optimiser.0.exp_avg_sq"].neg_(),
    "weight not finite": lambda file: file.tensors["weights.0.weight"].fill_(torch.nan),
    "weight of the best epoch not finite": lambda file: file.tensors["best.weights.0.weight"].fill_(torch.nan),
    "weight in another dtype": lambda file: file.tensors.update({"weights.0.bias": torch.zeros(6)}),
    "moment of another shape": lambda file: file.tensors.update({"optimiser.0.exp_avg": torch.zeros(6, dtype=D)}),
    "loss not finite": lambda file: file.root["settings"]["history"][0].update(loss=float("inf")),
    "another optimiser": lambda file: file.root["parts"]["recipe"]["settings"].update(optimiser="momentum"),
    "prior of another kind": lambda file: file.root["parts"]["recipe"]["parts"]["prior"].update(name="Gaussian"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_checkpoint_with_impossible_values(damage: str, tmp_path: Path) -> None:
    """With the right checksum: the values themselves are checked."""
    path = tmp_path / "state"
    run(resuming_recipe("adam", 1), data("batches"), checkpoint=path)
    file = Contents.of(path.read_bytes())
    DAMAGE[damage](file)
    path.write_bytes(file.packed())
    with pytest.raises(lw.LapwingError, match="is damaged"):
        run(resuming_recipe("adam", 2), data("batches"), resume=path)


def test_a_checkpoint_without_a_place(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        run(resuming_recipe("adam", 2), data("batches"), resume=tmp_path / "nowhere")
    with pytest.raises(lw.errors.FileError, match="no folder for the checkpoint"):
        run(resuming_recipe("adam", 2), data("batches"), checkpoint=tmp_path / "nowhere" / "state")


def test_states_of_another_run() -> None:
    """Another network, optimiser, prior or likelihood: each is recognised, and the given model is not changed."""
    state = run(resuming_recipe("adam", 1), data("batches")).state
    model = dropped()

    def resumed(recipe: lw.recipes.Recipe, likelihood: str = "regression", net: nn.Module = model) -> None:
        kind = "gaussian" if likelihood == "regression" else "categorical"
        with pytest.raises(
            lw.errors.DataError, match="this training state belongs to another model or recipe"
        ) as error:
            problems.unchanged(net, lambda: lw.train(net, [arrays(kind)], likelihood, recipe=recipe, resume=state))
        seen.append(str(error.value))

    seen: list[str] = []
    resumed(resuming_recipe("adam"), net=mlp())
    resumed(
        resuming_recipe("adam"), net=nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Dropout(0.3), nn.Linear(7, 3)).to(D)
    )
    resumed(resuming_recipe("adam"), net=nn.Sequential(nn.Flatten(), nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).to(D))
    resumed(resuming_recipe("sgd"))
    resumed(resuming_recipe("lbfgs"))
    resumed(resuming_recipe("adam", prior=lw.isotropic()))
    resumed(resuming_recipe("adam", prior=lw.priors.diagonal(), method=lw.Diagonal()))
    resumed(resuming_recipe("adam"), "classification")
    resumed(resuming_recipe("adam", seed=3))
    resumed(resuming_recipe("adam", prior=lw.per_layer(2.0)))
    resumed(resuming_recipe("adam", prior=lw.per_layer(mean=0.5)))
    resumed(resuming_recipe("adam", method=lw.Diagonal()))
    words = ("other weights", "(6, 4)", "other weights", "not sgd", "not lbfgs", "not the present Isotropic",
             "its method is 'Kron'", "its likelihood is 'Gaussian'", "its seed is 0, not 3", "other precisions",
             "another mean", "not Diagonal")  # fmt: skip
    for message, word in zip(seen, words, strict=True):
        assert word in message


def test_more_epochs_and_other_rates_are_allowed() -> None:
    state = run(resuming_recipe("adam", 2), data("batches")).state
    assert run(resuming_recipe("adam", 3, rate=1e-4, last_rate=1e-4), data("batches"), resume=state).state.epoch == 3
    with pytest.raises(lw.errors.DataError, match="finished 2 epochs and the recipe has 1"):
        run(resuming_recipe("adam", 1), data("batches"), resume=state)
