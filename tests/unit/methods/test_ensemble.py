"""Several networks trained apart: plain means and covariances of what each of them says."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lapwing as lw
from lapwing.methods.members import reinitialise
from tests import problems
from tests.cases import BY_NAME, Wrapped
from tests.tolerances import assert_close

D = torch.float64
X = torch.randn(9, 4, dtype=D, generator=torch.Generator().manual_seed(1))
Y = torch.randn(9, 3, dtype=D, generator=torch.Generator().manual_seed(2))
C = torch.randint(0, 3, (9,), generator=torch.Generator().manual_seed(3))
NEW = torch.randn(5, 4, dtype=D, generator=torch.Generator().manual_seed(4))


def net(seed: int, outputs: int = 3) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, outputs)).double()


def several(count: int) -> list[nn.Module]:
    return [net(seed) for seed in range(count)]


def fitted(models: list[nn.Module], likelihood: Any = "regression", y: Tensor = Y) -> lw.Fitted:
    return lw.fit(
        models[0], [(X[:4], y[:4]), (X[4:], y[4:])], likelihood, method=lw.baselines.Ensemble(models=models[1:])
    )


@pytest.mark.parametrize("count", [2, 4])
def test_mean_and_covariance_of_the_members(count: int) -> None:
    models = several(count)
    posterior = fitted(models)
    each = torch.stack([model(NEW) for model in models]).detach()
    mean = sum(each) / count
    belief = posterior.functions(NEW)
    assert_close(belief.mean, mean)
    for b in range(5):
        total = torch.zeros(3, 3, dtype=D)
        for f in each:
            total += torch.outer(f[b] - mean[b], f[b] - mean[b])
        assert_close(belief.cov[b], total / (count - 1))
        assert_close(belief.variance[b], total.diagonal() / (count - 1))
    joint = posterior.functions(NEW, joint=True)
    flat = (each - mean).reshape(count, 15)
    assert joint.cov.shape == (5, 3, 5, 3)
    assert_close(joint.cov.reshape(15, 15), flat.T @ flat / (count - 1))


def test_functions_are_the_members() -> None:
    models = several(3)
    posterior = fitted(models)
    draws = posterior.function_samples(NEW, 3)
    for draw, model in zip(draws, models, strict=True):
        assert_close(draw, model(NEW).detach())
    assert_close(posterior.function_samples(NEW, 2), draws[:2])
    assert_close(posterior.function_samples(NEW[2:3], 3), draws[:, 2:3])  # the same function wherever it is looked at
    with pytest.raises(lw.errors.UnsupportedError, match="4 samples were asked for and there are 3 members"):
        posterior.function_samples(NEW, 4)


def test_the_noise_is_the_residual_of_the_mean() -> None:
    models = several(4)
    posterior = fitted(models)
    mean = torch.stack([model(X) for model in models]).mean(0)
    assert_close(posterior.likelihood.dispersion, (mean - Y).square().mean().detach())
    alone = (models[0](X) - Y).square().mean().detach()
    assert float((alone / posterior.likelihood.dispersion - 1).abs()) > 0.01
    given = fitted(models, lw.Gaussian(noise_std=0.3))
    assert float(given.likelihood.dispersion) == pytest.approx(0.09)


def test_predictions_of_a_regression() -> None:
    models = several(3)
    posterior = fitted(models, lw.Gaussian(noise_std=0.3))
    predicted = posterior.predict(NEW)
    each = torch.stack([model(NEW) for model in models]).detach()
    assert_close(predicted.mean, each.mean(0))
    assert_close(predicted.std, (each.var(0) + 0.09).sqrt())


def test_predictions_of_classes() -> None:
    models = several(3)
    posterior = fitted(models, "classification", C)
    belief = posterior.functions(NEW)
    probs = posterior.predict(NEW).probs
    assert_close(probs.sum(1), torch.ones(5, dtype=D))
    assert_close(probs, lw.Categorical().predict(belief).probs)
    assert float((probs - models[0](NEW).detach().softmax(1)).abs().max()) > 1e-3


def trained(model: nn.Module, seed: int) -> nn.Module:
    """A few steps, on a sample of the data that the seed draws."""
    rows = torch.randint(0, 9, (9,), generator=torch.Generator().manual_seed(seed))
    optimiser = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(3):
        optimiser.zero_grad()
        (model(X[rows]) - Y[rows]).square().mean().backward()
        optimiser.step()
    return model.eval()


def test_members_are_trained_from_new_weights() -> None:
    calls: list[tuple[int, Tensor]] = []

    def train(model: nn.Module, seed: int) -> nn.Module:
        calls.append((seed, model[0].weight.detach().clone()))
        return trained(model, seed)

    first = net(0)
    random = torch.get_rng_state()
    method = lw.baselines.Ensemble(train=train, members=4)
    fit = lambda gen=None: lw.fit(first, [(X, Y)], "regression", method=method, generator=gen)
    found = problems.unchanged(first, fit)
    assert torch.equal(torch.get_rng_state(), random)
    assert [seed for seed, _ in calls] == [1, 2, 3]
    starts = [weight for _, weight in calls]
    assert all(not torch.equal(a, b) for a, b in ((starts[0], starts[1]), (starts[0], first[0].weight)))
    draws = found.function_samples(NEW, 4)
    assert_close(draws[0], first(NEW).detach())
    again = fit()
    assert torch.equal(again.functions(NEW).cov, found.functions(NEW).cov)
    expected = trained(reinitialise(first, 2), 2)(NEW).detach()
    assert_close(draws[2], expected)


def test_seeds_of_the_members_follow_the_generator() -> None:
    seeds: list[int] = []

    def train(model: nn.Module, seed: int) -> nn.Module:
        seeds.append(seed)
        return model

    method = lw.baselines.Ensemble(train=train, members=3)
    lw.fit(net(0), [(X, Y)], "regression", method=method, generator=torch.Generator().manual_seed(40))
    assert seeds == [41, 42]


def test_given_models_count_as_members() -> None:
    method = lw.baselines.Ensemble(models=several(3)[1:], train=trained, members=5)
    posterior = lw.fit(net(0), [(X, Y)], "regression", method=method)
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


def test_attention_is_reset_by_its_own_method() -> None:
    model = BY_NAME["attention"].build()
    assert not torch.equal(reinitialise(model, 1).attend.in_proj_weight, model.attend.in_proj_weight)


def test_tokens_and_other_inputs() -> None:
    for name in ("token_level", "dict_input", "lstm"):
        case = BY_NAME[name]
        models = [case.build(), *(reinitialise(case.build(), seed) for seed in (1, 2))]
        posterior = lw.fit(
            models[0], problems.batches(case), problems.likelihood(case), method=lw.baselines.Ensemble(models[1:])
        )
        belief = posterior.functions(case.batch(2, seed=1))
        assert belief.mean.shape == (2, *case.outputs)
        assert belief.cov.shape == (2, *case.outputs, case.outputs[-1])
        assert float(belief.variance.min()) > 0


# What is refused


def refused(error: type, message: str, method: Any, model: nn.Module | None = None) -> None:
    model = net(0) if model is None else model

    def run() -> None:
        with pytest.raises(error, match=message):
            lw.fit(model, [(X, Y)], "regression", method=method)

    problems.unchanged(model, run)


def test_one_network_is_not_an_ensemble() -> None:
    message = r"has one network; expected others: models=\[\.\.\.\], or train=\.\.\. to make them"
    for method in (lw.baselines.Ensemble(), "ensemble"):
        refused(lw.errors.UnsupportedError, message, method)


def test_members_with_other_outputs() -> None:
    message = r"member 2 gives outputs of the shape \(9, 2\); expected \(9, 3\), that of the first"
    refused(lw.errors.ModelError, message, lw.baselines.Ensemble(models=[net(1), net(2, outputs=2)]))


def test_members_in_training_mode() -> None:
    dropping = nn.Sequential(nn.Linear(4, 5), nn.Dropout(0.5), nn.Linear(5, 3)).double().train()
    message = r"1 \(Dropout\) is in training mode; expected evaluation mode"
    refused(lw.errors.ModelError, message, lw.baselines.Ensemble(models=[dropping]))
    model = copy.deepcopy(dropping).eval()
    refused(lw.errors.ModelError, message, lw.baselines.Ensemble(train=lambda m, seed: m.train()), model)


def test_members_that_are_not_networks_are_refused() -> None:
    refused(
        lw.errors.ModelError,
        "a member is a NoneType; expected a trained torch.nn.Module",
        lw.baselines.Ensemble(train=_nothing),
    )
    with pytest.raises(lw.errors.ModelError, match=r"models is \['net'\]; expected a list of trained torch.nn.Module"):
        lw.baselines.Ensemble(models=["net"])


def _nothing(model: nn.Module, seed: int) -> Any:
    """Trains and forgets to return."""


def test_layers_that_cannot_be_renewed() -> None:
    model = Wrapped(lambda m, x: m.lin(x) * m.scale, lin=nn.Linear(4, 3), scale=nn.Parameter(torch.ones(3))).double()
    message = r"Wrapped: no reset_parameters\(\) to draw new weights with\. Train networks by lw\.train"
    refused(lw.errors.UnsupportedError, message, lw.baselines.Ensemble(train=trained), model)


def test_outputs_that_are_not_finite() -> None:
    broken = net(1)
    broken[2].bias.data[0] = float("nan")
    refused(
        lw.errors.DataError,
        "outputs of a member: 9 of 27 entries are NaN or infinite",
        lw.baselines.Ensemble(models=[broken]),
    )


def test_an_ensemble_is_not_saved(tmp_path: Path) -> None:
    with pytest.raises(
        lw.errors.UnsupportedError, match="an ensemble is its networks, which a file does not hold; save those"
    ):
        fitted(several(2)).save(tmp_path / "it")
    assert not (tmp_path / "it").exists()


def test_a_prior_means_nothing_here() -> None:
    with pytest.raises(lw.errors.UnsupportedError, match="no prior over weights to change"):
        fitted(several(2)).with_prior(1.0)
