"""Baselines that take networks as they are: ensembles, dropout that stays active, and mixtures of posteriors."""

from __future__ import annotations

import copy
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lapwing as lw
from lapwing.methods.members import reinitialise
from tests import problems
from tests.cases import BY_NAME, Wrapped
from tests.tolerances import assert_close, assert_near, assert_within

D = torch.float64
CLASSES = 3
X = torch.randn(9, 4, dtype=D, generator=torch.Generator().manual_seed(1))
Y = torch.randn(9, CLASSES, dtype=D, generator=torch.Generator().manual_seed(2))
LABELS = torch.randint(0, CLASSES, (9,), generator=torch.Generator().manual_seed(3))
NEW = torch.randn(5, 4, dtype=D, generator=torch.Generator().manual_seed(4))
DATA: dict[str, Any] = {"classification": [(X[:4], LABELS[:4]), (X[4:], LABELS[4:])],
                        "regression": [(X[:4], Y[:4]), (X[4:], Y[4:])]}  # fmt: skip
MASKS = torch.tensor(list(product((0.0, 1.0), repeat=8)), dtype=D)
SHARES = (0.7, 0.2, 0.1)


def net(seed: int, outputs: int = CLASSES, units: int = 5) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, units), nn.Tanh(), nn.Linear(units, outputs)).double().eval()


def fit(model: nn.Module, method: Any, likelihood: Any = "regression", **options: Any) -> lw.Fitted:
    kind = likelihood if isinstance(likelihood, str) else "regression"
    return lw.fit(model, DATA[kind], likelihood, method=method, **options)


def assert_moments_of(posterior: lw.Fitted, each: Tensor) -> None:
    """Compare the beliefs with plain sums over the outputs of all members, (K, 5, C)."""
    count, mean = len(each), each.sum(0) / len(each)
    belief = posterior.functions(NEW)
    assert_close(belief.mean, mean)
    for b in range(5):
        total = torch.zeros(CLASSES, CLASSES, dtype=D)
        for f in each:
            total += torch.outer(f[b] - mean[b], f[b] - mean[b])
        assert_close(belief.cov[b], total / (count - 1))
        assert_close(belief.variance[b], total.diagonal() / (count - 1))
    flat = (each - mean).flatten(1)
    assert_close(posterior.functions(NEW, joint=True).cov.reshape(15, 15), flat.T @ flat / (count - 1))
    assert float(belief.variance.min()) > 0


# Ensembles.


def ensemble(models: list[nn.Module], likelihood: Any = "regression") -> lw.Fitted:
    return fit(models[0], lw.baselines.Ensemble(models=models[1:]), likelihood)


def several(count: int) -> list[nn.Module]:
    return [net(seed) for seed in range(count)]


@pytest.mark.parametrize("count", [2, 4])
def test_mean_and_covariance_of_the_members(count: int) -> None:
    models = several(count)
    assert_moments_of(ensemble(models), torch.stack([model(NEW) for model in models]).detach())


def test_functions_are_the_members() -> None:
    models = several(3)
    posterior = ensemble(models)
    draws = posterior.function_samples(NEW, 3)
    for draw, model in zip(draws, models, strict=True):
        assert_close(draw, model(NEW).detach())
    with pytest.raises(lw.errors.UnsupportedError, match="4 samples were asked for and there are 3 members"):
        posterior.function_samples(NEW, 4)


def test_the_noise_is_the_residual_of_the_mean() -> None:
    models = several(4)
    posterior = ensemble(models)
    mean = torch.stack([model(X) for model in models]).mean(0)
    assert_close(posterior.likelihood.dispersion, (mean - Y).square().mean().detach())
    alone = (models[0](X) - Y).square().mean().detach()
    assert float((alone / posterior.likelihood.dispersion - 1).abs()) > 0.01
    assert float(ensemble(models, lw.Gaussian(noise_std=0.3)).likelihood.dispersion) == pytest.approx(0.09)


def test_predictions_follow_from_the_moments() -> None:
    models = several(3)
    predicted = ensemble(models, lw.Gaussian(noise_std=0.3)).predict(NEW)
    each = torch.stack([model(NEW) for model in models]).detach()
    assert_close(predicted.mean, each.mean(0))
    assert_close(predicted.std, (each.var(0) + 0.09).sqrt())
    classes = ensemble(models, "classification")
    probs = classes.predict(NEW).probs
    assert_close(probs, lw.Categorical().predict(classes.functions(NEW)).probs)
    assert float((probs - models[0](NEW).detach().softmax(1)).abs().max()) > 1e-3


def trained(model: nn.Module, seed: int) -> nn.Module:
    """Take a few steps, on a sample of the data that the seed draws."""
    rows = torch.randint(0, 9, (9,), generator=torch.Generator().manual_seed(seed))
    problems.descend(model, lambda model: (model(X[rows]) - Y[rows]).square().mean(), 3, 0.01)
    return model.eval()


def test_members_are_trained_from_new_weights() -> None:
    calls: list[tuple[int, Tensor]] = []

    def train(model: nn.Module, seed: int) -> nn.Module:
        calls.append((seed, model[0].weight.detach().clone()))
        return trained(model, seed)

    first, method = net(0), lw.baselines.Ensemble(train=train, members=4)
    random = torch.get_rng_state()
    found = problems.unchanged(first, lambda: fit(first, method))
    assert torch.equal(torch.get_rng_state(), random)
    assert [seed for seed, _ in calls] == [1, 2, 3]
    starts = [weight for _, weight in calls]
    assert all(not torch.equal(a, b) for a, b in ((starts[0], starts[1]), (starts[0], first[0].weight)))
    draws = found.function_samples(NEW, 4)
    assert_close(draws[0], first(NEW).detach())
    assert_close(draws[2], trained(reinitialise(first, 2), 2)(NEW).detach())
    fit(first, method, generator=torch.Generator().manual_seed(40))
    assert [seed for seed, _ in calls[3:]] == [41, 42, 43]


def test_given_models_count_as_members() -> None:
    posterior = fit(net(0), lw.baselines.Ensemble(models=several(3)[1:], train=trained, members=5))
    assert len(posterior.posterior.members) == 5
    assert_close(posterior.function_samples(NEW, 5)[1], net(1)(NEW).detach())


def test_new_weights_are_those_of_each_layer() -> None:
    """Seeds fix them; buffers of a normalisation start anew; the model is a copy."""
    case = BY_NAME["resnet_batchnorm"]
    model = case.build()
    one, two, other = (problems.unchanged(model, lambda s=seed: reinitialise(model, s)) for seed in (5, 5, 6))
    for (name, a), b, c in zip(one.named_parameters(), two.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b), name
        assert torch.equal(a, c) == (a.ndim == 1 and "head" not in name and "short" not in name), name
    assert bool((one.norm.running_mean == 0).all())
    assert bool((model.norm.running_mean != 0).all())
    attention = BY_NAME["attention"].build()  # reset by a method of another name
    assert not torch.equal(reinitialise(attention, 1).attend.in_proj_weight, attention.attend.in_proj_weight)


def test_tokens_and_other_inputs() -> None:
    for name in ("token_level", "dict_input", "lstm"):
        case = BY_NAME[name]
        models = [case.build(), *(reinitialise(case.build(), seed) for seed in (1, 2))]
        method = lw.baselines.Ensemble(models[1:])
        posterior = problems.fit(case, method, model=models[0])
        belief = posterior.functions(case.batch(2, seed=1))
        assert belief.cov.shape == (2, *case.outputs, case.outputs[-1])
        assert float(belief.variance.min()) > 0


def without_reset() -> nn.Module:
    return Wrapped(lambda m, x: m.lin(x) * m.scale, lin=nn.Linear(4, 3), scale=nn.Parameter(torch.ones(3))).double()


def dropping(training: bool) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.Dropout(0.5), nn.Linear(5, 3)).double().train(training)


def broken() -> nn.Module:
    model = net(1)
    model[2].bias.data[0] = float("nan")
    return model


REFUSED: dict[str, tuple[type, str, dict[str, Any], nn.Module]] = {
    "one network": (lw.errors.UnsupportedError, r"has one network; expected others: models=\[\.\.\.\], or train=", {},
                    net(0)),
    "other outputs": (lw.errors.ModelError, r"member 2 gives outputs of the shape \(9, 2\); expected \(9, 3\)",
                      {"models": [net(1), net(2, outputs=2)]}, net(0)),
    "training mode": (lw.errors.ModelError, r"1 \(Dropout\) is in training mode; expected evaluation mode",
                      {"models": [dropping(True)]}, net(0)),
    "trained in training mode": (lw.errors.ModelError, r"1 \(Dropout\) is in training mode; expected evaluation mode",
                                 {"train": lambda m, seed: m.train()}, dropping(False)),
    "nothing": (lw.errors.ModelError, "a member is a NoneType; expected a trained torch.nn.Module",
                {"train": lambda m, seed: None}, net(0)),
    "no reset": (lw.errors.UnsupportedError, r"Wrapped: no reset_parameters\(\) to draw new weights with\. Train net",
                 {"train": trained}, without_reset()),
    "not finite": (lw.errors.DataError, "outputs of a member: 9 of 27 entries are NaN or infinite",
                   {"models": [broken()]}, net(0)),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_members_that_are_refused(what: str) -> None:
    error, message, settings, model = REFUSED[what]

    def run() -> None:
        with pytest.raises(error, match=message):
            lw.fit(model, [(X, Y)], "regression", method=lw.baselines.Ensemble(**settings))

    problems.unchanged(model, run)


def test_an_ensemble_has_no_file_and_no_prior(tmp_path: Path) -> None:
    posterior = ensemble(several(2))
    with pytest.raises(lw.errors.UnsupportedError, match="an ensemble is its networks, which a file does not hold; sa"):
        posterior.save(tmp_path / "it")
    assert not (tmp_path / "it").exists()
    with pytest.raises(lw.errors.UnsupportedError, match="no prior over weights to change"):
        posterior.with_prior(1.0)


# Dropout that stays active: every pass is the network without some of its units.


def with_dropout(p: float = 0.4) -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(p), nn.Linear(8, CLASSES)
    model = nn.Sequential(*layers).double()
    model[1].running_mean += 0.1
    return model.eval()


def masks_of(draws: Tensor, every: Tensor) -> Tensor:
    """Return the number of the network in ``every`` (256, B, C) that each draw is; each must be one."""
    gap = (draws[:, None] - every.detach()).abs().flatten(2).amax(2)
    assert float(gap.min(1).values.max()) < 1e-12
    return gap.argmin(1)


def test_every_pass_drops_some_units_for_all_inputs() -> None:
    """Each is one of the 2⁸ networks with hidden units taken out and the others scaled up."""
    model = with_dropout(0.25)
    every = torch.stack([model[4](model[:3](NEW) * mask / 0.75) for mask in MASKS])
    draws = fit(model, lw.baselines.MCDropout(400)).function_samples(NEW, 400)
    kept = MASKS[masks_of(draws, every)].mean(0)  # how often each unit is left
    assert float((kept - 0.75).abs().max()) < 5 * (0.25 * 0.75 / 400) ** 0.5


@pytest.mark.parametrize(("samples", "seed"), [(2, 0), (7, 100)])
def test_mean_and_covariance_of_the_passes(samples: int, seed: int) -> None:
    posterior = fit(with_dropout(), lw.baselines.MCDropout(samples, seed))
    assert_moments_of(posterior, posterior.function_samples(NEW, samples))


def test_seeds_follow_each_other() -> None:
    """Member k has the seed ``seed + k``."""
    one, other = (fit(with_dropout(), lw.baselines.MCDropout(6, seed)).function_samples(NEW, 6) for seed in (3, 5))
    assert_close(other[:4], one[2:])
    assert not torch.equal(one[0], one[1])


def test_the_noise_is_the_residual_without_dropout() -> None:
    model = with_dropout()
    posterior = fit(model, lw.baselines.MCDropout())
    assert_close(posterior.likelihood.dispersion, (model(X) - Y).square().mean().detach())
    members = posterior.posterior.members
    assert len(members) == 32
    assert not members.model[1].training  # batch norm stays in evaluation mode
    assert torch.equal(members.model[1].running_mean, model[1].running_mean)


def test_one_layer_in_two_places_drops_in_both() -> None:
    torch.manual_seed(0)
    drop = nn.Dropout(0.5)
    layers = nn.Linear(4, 4), nn.Tanh(), drop, nn.Linear(4, 4), nn.Tanh(), drop, nn.Linear(4, CLASSES)
    model = nn.Sequential(*layers).double().eval()
    every = torch.stack([model[6](model[3:5](model[:2](NEW) * m[:4] / 0.5) * m[4:] / 0.5) for m in MASKS])
    second = MASKS[masks_of(fit(model, lw.baselines.MCDropout(40)).function_samples(NEW, 40), every)][:, 4:]
    assert 0.2 < float(second.mean()) < 0.8


def test_whole_channels() -> None:
    """nn.Dropout2d takes a channel away or leaves it."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.Dropout2d(0.5), nn.Tanh(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(8, 2),
    ).double().eval()  # fmt: skip
    x = torch.randn(5, 1, 4, 4, dtype=D)
    data = [(x, torch.randn(5, 2, dtype=D))]
    posterior = lw.fit(model, data, "regression", method=lw.baselines.MCDropout(samples=30))
    every = torch.stack([model[2:](model[0](x) * mask[:, None, None] / 0.5) for mask in MASKS])
    masks_of(posterior.function_samples(x, 30), every)


def test_a_transformer_layer_drops_as_in_training() -> None:
    """In evaluation mode PyTorch runs the layer as one kernel, without any dropout; training is the measure."""
    torch.manual_seed(0)
    model = Wrapped(
        lambda m, x: m.head(m.layer(m.embed(x))[:, 0]), embed=nn.Linear(4, 8), head=nn.Linear(8, 2),
        layer=nn.TransformerEncoderLayer(8, 2, 12, batch_first=True, dropout=0.3),
    ).double().eval()  # fmt: skip
    x, y = torch.randn(6, 3, 4, dtype=D), torch.randn(6, 2, dtype=D)
    posterior = lw.fit(model, [(x, y)], "regression", method=lw.baselines.MCDropout(samples=300))
    variance = problems.unchanged(model, lambda: posterior.functions(x).variance)
    model.train()
    spread = torch.stack([model(x).detach() for _ in range(300)]).var(0)
    assert float((variance / spread - 1).abs().max()) < 0.6  # standard errors of a tenth on either side


@pytest.mark.parametrize("kind", ["attention", "recurrent"])
def test_dropout_inside_of_a_layer(kind: str) -> None:
    torch.manual_seed(0)
    if kind == "attention":
        run = lambda m, x: m.head(m.cell(x, x, x, need_weights=False)[0].mean(1))
        model = Wrapped(run, cell=nn.MultiheadAttention(4, 2, dropout=0.5, batch_first=True), head=nn.Linear(4, 2))
    else:
        run = lambda m, x: m.head(m.cell(x)[0][:, -1])
        model = Wrapped(run, cell=nn.LSTM(4, 5, num_layers=2, dropout=0.5, batch_first=True), head=nn.Linear(5, 2))
    x, y = torch.randn(6, 3, 4, dtype=D), torch.randn(6, 2, dtype=D)
    method = lw.baselines.MCDropout(samples=5)
    posterior = lw.fit(model.double().eval(), [(x, y)], "regression", method=method)
    assert float(posterior.functions(x).variance.min()) > 1e-12
    assert torch.equal(posterior.functions(x).cov, posterior.functions(x).cov)


@pytest.mark.parametrize("p", [0.0, None])
def test_a_network_without_dropout(p: float | None) -> None:
    message = "no dropout layer with a probability above zero; expected nn.Dropout or a similar layer. Use another"
    with pytest.raises(lw.errors.UnsupportedError, match=message):
        fit(net(0) if p is None else with_dropout(p), lw.baselines.MCDropout())


# Mixtures of Laplace approximations: the average of what each network says by itself.


def nets() -> list[nn.Module]:
    """Return three networks, one of another width: nothing but the outputs must agree."""
    return [net(0), net(1), net(2, units=7)]


def mixture(kind: str = "classification", shares: Any = None, method: Any = None, **options: Any) -> lw.Fitted:
    first, *others = nets()
    return fit(first, lw.baselines.MixtureOfLaplace(others, method or lw.Kron(), shares), kind, **options)


def each(kind: str = "classification", method: Any = None, **options: Any) -> list[lw.Fitted]:
    return [fit(one, method or lw.Kron(), kind, **options) for one in nets()]


def averaged(parts: list[Tensor], shares: Any) -> Tensor:
    weights = torch.tensor(shares or [1 / 3] * 3, dtype=D)
    return torch.einsum("k,k...->...", weights, torch.stack(parts))


METHODS = {"kron": None, "full": lw.Full(), "map": lw.baselines.MapOnly(), "sampled": lw.Sampled(num_samples=8)}


@pytest.mark.parametrize(("method", "shares"), [("kron", SHARES), ("full", None), ("map", SHARES), ("sampled", None)])
def test_probabilities_are_the_average_of_all_networks(method: str, shares: Any) -> None:
    found = mixture(shares=shares, method=METHODS[method], prior=2.0)
    expected = averaged([one.predict(NEW).probs for one in each(method=METHODS[method], prior=2.0)], shares)
    assert_close(found.predict(NEW).probs, expected)


def test_a_regression_has_the_density_of_the_mixture() -> None:
    found, parts = mixture("regression", SHARES, prior=2.0), each("regression", prior=2.0)
    y = torch.randn(5, CLASSES, dtype=D, generator=torch.Generator().manual_seed(5))
    density = averaged([one.predict(NEW).log_prob(y).exp() for one in parts], SHARES)
    assert_close(found.predict(NEW).log_prob(y).exp(), density)
    assert_close(found.predict(NEW).mean, averaged([one.predict(NEW).mean for one in parts], SHARES))


def test_functions_and_draws_have_the_moments_of_the_mixture() -> None:
    found, beliefs = mixture(shares=SHARES, prior=2.0), [one.functions(NEW, joint=True) for one in each(prior=2.0)]
    mean = averaged([belief.mean for belief in beliefs], SHARES)
    gaps = [(belief.mean - mean).flatten() for belief in beliefs]
    second = [b.cov.reshape(15, 15) + torch.outer(gap, gap) for b, gap in zip(beliefs, gaps, strict=True)]
    cov, belief = averaged(second, SHARES), found.functions(NEW)
    assert_close(belief.mean, mean)
    assert_close(found.functions(NEW, joint=True).cov.reshape(15, 15), cov)
    assert_close(belief.variance.flatten(), cov.diagonal())
    for b in range(5):
        rows = slice(b * CLASSES, (b + 1) * CLASSES)
        assert_close(belief.cov[b], cov[rows, rows])
    draws = found.function_samples(NEW, 4000, torch.Generator().manual_seed(0))
    assert_within(draws, mean)
    assert_within((draws - mean).square(), belief.variance)


def test_every_network_learns_its_own_prior_and_noise() -> None:
    """Without a prior each network gets the mixture over precisions that ``fit`` gives one network."""
    found, parts = mixture("regression"), each("regression")
    precisions = {float(one.prior.values) for one in parts}
    assert len(precisions) == 3
    mean = averaged([one.predict(NEW).mean for one in parts], None)
    second = [one.predict(NEW).std.square() + (one.predict(NEW).mean - mean).square() for one in parts]
    assert_close(found.predict(NEW).std, averaged(second, None).sqrt())
    assert found.trace is not None
    assert found.trace.tuner == "Budget for each network"
    assert found.trace.scores
    for name, score in found.trace.scores.items():
        of_each = name.removesuffix(", mean of the networks")  # the mixture is not scored
        assert of_each != name
        assert score == pytest.approx(sum(one.trace.scores[of_each] for one in parts) / 3)
    assert {float(base.problem.prior.values) for base in found.posterior.mixture.bases} >= precisions


def test_validation_data_calibrate_every_network() -> None:
    held_out = (X[:6] + 0.3, LABELS[:6])
    found, parts = mixture(validation=held_out), each(validation=held_out)
    assert_close(found.predict(NEW).probs, averaged([one.predict(NEW).probs for one in parts], None))


def test_many_classes_are_predicted_from_drawn_functions() -> None:
    torch.manual_seed(0)
    wide = [nn.Sequential(nn.Linear(4, 2), nn.Tanh(), nn.Linear(2, 300)).double().eval() for _ in range(2)]
    method = lw.baselines.MixtureOfLaplace(wide[1:], lw.Diagonal(draws=1, curvature="fisher_mc"))
    found = fit(wide[0], method, "classification", prior=1e4)  # little spread
    probs = found.predict(NEW).probs
    assert torch.equal(probs, found.predict(NEW).probs)
    softmax = torch.stack([one(NEW).detach().softmax(-1) for one in wide])
    assert_near(probs, softmax.mean(0), 0.02 * float(softmax.max()))
    assert float((softmax[0] - softmax.mean(0)).abs().max()) > 0.1 * float(softmax.max())  # one network is not enough


def test_no_network_is_changed_and_a_changed_one_is_noticed() -> None:
    first, second = net(0), net(1)
    method = lw.baselines.MixtureOfLaplace([second])
    run = lambda: fit(first, method, "classification", prior=1.0)
    found = problems.unchanged(first, lambda: problems.unchanged(second, run))
    problems.unchanged(second, lambda: found.functions(NEW, joint=True).cov)
    assert_close(found.to("cpu").predict(NEW).probs, found.predict(NEW).probs)
    with torch.no_grad():
        second[0].weight += 1
    for call in (found.predict, found.functions, lambda x: found.function_samples(x, 2)):
        with pytest.raises(lw.errors.ModelError, match=r"'0\.weight' has changed since the fit"):
            call(NEW)


def test_networks_that_do_not_fit_together() -> None:
    other, noisy = nn.Linear(4, CLASSES + 2).double(), copy.deepcopy(dropping(True))
    for error, message, settings in (
        (lw.errors.UnsupportedError, r"has one network; expected others: models=", {}),
        (lw.errors.UnsupportedError, "shares has 3 numbers and there are 2", {"models": [net(1)], "shares": SHARES}),
        (lw.errors.ModelError, r"network 1 has outputs of the shape \(5,\); expected \(3,\)", {"models": [other]}),
        (lw.errors.ModelError, "is in training mode", {"models": [noisy]}),
    ):
        with pytest.raises(error, match=message):
            fit(net(0), lw.baselines.MixtureOfLaplace(**settings), "classification", prior=1.0)


def test_what_a_mixture_of_networks_does_not_have(tmp_path: Path) -> None:
    found = mixture(prior=1.0)
    for call in (found.log_evidence, found.effective_parameters, lambda: found.weight_samples(2)):
        with pytest.raises(lw.errors.UnsupportedError, match="MixtureOfLaplace has no"):
            call()
    with pytest.raises(lw.errors.UnsupportedError, match="a file does not hold networks; save those and fit again"):
        found.save(tmp_path / "it")
    said = "A mixture of the posteriors of 3 networks; the prior and noise shown are those of the first."
    assert said in found.summary()


@pytest.mark.parametrize(("method", "validated"), [("MixtureOfLaplace", True), ("Ensemble", False)])
def test_several_networks_have_no_jacobian(method: str, validated: bool) -> None:
    first, *others = nets()
    options: dict[str, Any] = {"validation": [(NEW, LABELS[:5])]} if validated else {"prior": 2.0}
    posterior = fit(first, getattr(lw.baselines, method)(others), "classification", **options)
    for name in ("jacobian", "ggn"):
        with pytest.raises(lw.errors.UnsupportedError, match=rf"several networks.*one network for {name}\(\)"):
            getattr(posterior, name)(DATA["classification"])
