"""The rules that choose single weights against dense references in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lapwing as lw
from lapwing import subnetworks
from lapwing.baselines import SWAG
from tests import problems
from tests.references import dense

D = torch.float64
ROWS, INPUTS, CLASSES, SIZE = 14, 3, 4, 5 * 4 + 4 * 6
X = torch.randn(ROWS, INPUTS, dtype=D, generator=torch.Generator().manual_seed(1))
Y = torch.randint(0, CLASSES, (ROWS,), generator=torch.Generator().manual_seed(2))
DATA = problems.split(X, Y, (9, 5))


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(INPUTS, 5), nn.Tanh(), nn.Linear(5, CLASSES)).double()


def ggn(model: nn.Module) -> Tensor:
    j = dense.jacobian(model, X, ROWS)
    return torch.einsum("bcp,bcd,bdq->pq", j, dense.softmax_hessian(model(X).detach()), j)


def top(scores: Tensor, n: int) -> list[int]:
    return sorted(scores.topk(n).indices.tolist())


def indices(selection: Any) -> list[int]:
    listed: list[int] = selection.index.tolist()
    assert listed == sorted(set(listed)), "they rise, and none repeats"
    return listed


@pytest.mark.parametrize("n", [1, 7, SIZE])
def test_largest_variance(n: int) -> None:
    model = net()
    expected = 1 / (ggn(model).diagonal() + 0.3)
    for prior in (None, 0.3):
        assert indices(subnetworks.by_variance(model, DATA, "classification", n, prior=prior)) == top(expected, n)


def test_the_prior_decides_with_the_curvature() -> None:
    model, each = net(), torch.rand(SIZE, dtype=D) * 5 + 0.1
    chosen = subnetworks.by_variance(model, DATA, "classification", 9, prior=lw.priors.diagonal(each))
    variances = 1 / (ggn(model).diagonal() + each)
    assert indices(chosen) == top(variances, 9)
    assert indices(chosen) != top(1 / ggn(model).diagonal(), 9)


def test_the_noise_decides_where_the_prior_differs() -> None:
    """The noise of a regression is the mean squared residual."""
    model, y = net(), torch.randn(ROWS, CLASSES, dtype=D)
    prior = lw.per_layer({"0": 7.0, "2": 0.5})
    added = torch.tensor([7.0] * 20 + [0.5] * 24, dtype=D)
    noise = (model(X) - y).square().mean().detach()
    diagonal = dense.jacobian(model, X, ROWS).square().sum((0, 1))
    chosen = subnetworks.by_variance(model, [(X, y)], "regression", 11, prior=prior)
    assert indices(chosen) == top(1 / (diagonal / noise + added), 11)


def test_largest_gradient() -> None:
    model = net()
    expected = dense.jacobian(model, X, ROWS).square().mean(0).sum(0)
    assert indices(subnetworks.by_gradient(model, DATA, "classification", 8)) == top(expected, 8)


def test_largest_magnitude() -> None:
    model = net()
    flat = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    assert indices(subnetworks.by_magnitude(model, 10)) == top(flat.abs(), 10)


def test_largest_swag_variance() -> None:
    """The variances are those that the baseline collects."""
    model, settings = net(), SWAG(5, 3, learning_rate=0.02, batch_size=4)
    fitted = lw.fit(model, DATA, "classification", method=settings, prior=None)
    variance = fitted.posterior.variance
    chosen = subnetworks.by_swag(model, DATA, "classification", 6, swag=settings)
    assert indices(chosen) == top(variance, 6)
    inside = subnetworks.by_swag(model, DATA, "classification", 6, swag=settings, within=lw.named("^2"))
    assert indices(inside) == [20 + i for i in top(variance[20:], 6)]  # all weights move, these are candidates


def test_random_sets_are_equally_likely_and_follow_the_generator() -> None:
    model = nn.Linear(3, 1)
    generator = torch.Generator().manual_seed(3)
    sets = [tuple(indices(subnetworks.random(model, 2, generator=generator))) for _ in range(600)]
    counts = torch.tensor([sets.count(s) for s in set(sets)], dtype=D)
    assert len(counts) == 6
    assert float((counts - 100).abs().max()) < 5 * (600 * 5 / 36) ** 0.5  # five standard deviations
    assert indices(subnetworks.random(model, 2)) == indices(subnetworks.random(model, 2))


def brute_force(precision: Tensor, gram: Tensor, candidates: list[int], n: int) -> list[int]:
    """Add the weight after which the sum of all predictive variances is largest."""
    chosen: list[int] = []
    for _ in range(n):
        rest = [i for i in candidates if i not in chosen]
        values = []
        for i in rest:
            part = torch.tensor([*chosen, i])
            values.append(torch.linalg.solve(precision[part][:, part], gram[part][:, part]).trace())
        chosen.append(rest[int(torch.stack(values).argmax())])
    return sorted(chosen)


@pytest.mark.parametrize("n", [1, 6, 20])
def test_greedy_equals_brute_force(n: int) -> None:
    model = net()
    j = dense.jacobian(model, X, ROWS).flatten(0, 1)
    precision = ggn(model) + 0.4 * torch.eye(SIZE, dtype=D)
    chosen = subnetworks.greedy(model, DATA, "classification", n, prior=0.4)
    assert indices(chosen) == brute_force(precision, j.T @ j, list(range(SIZE)), n)


def test_greedy_of_a_pool() -> None:
    """The pool has the weights with the largest variances alone."""
    model = net()
    j = dense.jacobian(model, X, ROWS).flatten(0, 1)
    gram, precision = j.T @ j, ggn(model) + 0.4 * torch.eye(SIZE, dtype=D)
    pool = top(gram.diagonal() / precision.diagonal(), 14)
    chosen = subnetworks.greedy(model, DATA, "classification", 12, prior=0.4, pool=14)
    assert indices(chosen) == brute_force(precision, gram, pool, 12)
    assert indices(chosen) != brute_force(precision, gram, list(range(SIZE)), 12)


def test_greedy_learns_noise_and_precision() -> None:
    model, y = net(), torch.randn(ROWS, CLASSES, dtype=D)
    tuned = lw.fit(model, [(X, y)], "regression", method=lw.Diagonal(), tuner=lw.tuners.MaximiseEvidence())
    prior, noise = float(tuned.prior.values), float(tuned.likelihood.noise_variance)
    j = dense.jacobian(model, X, ROWS).flatten(0, 1)
    precision = j.T @ j / noise + prior * torch.eye(SIZE, dtype=D)
    chosen = subnetworks.greedy(model, [(X, y)], "regression", 4)
    assert indices(chosen) == brute_force(precision, j.T @ j, list(range(SIZE)), 4)


def test_greedy_takes_the_curvature_under_the_noise() -> None:
    model, y = net(), torch.randn(ROWS, CLASSES, dtype=D)
    j = dense.jacobian(model, X, ROWS).flatten(0, 1)
    expected, without = (
        brute_force(j.T @ j / noise + 10 * torch.eye(SIZE, dtype=D), j.T @ j, list(range(SIZE)), 12)
        for noise in (0.3**2, 1.0)
    )
    assert indices(subnetworks.greedy(model, [(X, y)], lw.Gaussian(noise_std=0.3), 12, prior=10.0)) == expected
    assert expected != without


def test_a_smaller_choice_is_a_part_of_a_larger_one() -> None:
    model = net()
    small, large = (subnetworks.greedy(model, DATA, "classification", n, prior=1.0) for n in (4, 9))
    assert set(indices(small)) < set(indices(large))


RULES: dict[str, Callable[..., Any]] = {
    "variance": lambda model, n, **k: subnetworks.by_variance(model, DATA, "classification", n, **k),
    "gradient": lambda model, n, **k: subnetworks.by_gradient(model, DATA, "classification", n, **k),
    "greedy": lambda model, n, **k: subnetworks.greedy(model, DATA, "classification", n, **k),
    "swag": lambda model, n, **k: subnetworks.by_swag(
        model, DATA, "classification", n, swag=SWAG(2, 2, learning_rate=1e-3, batch_size=4), **k
    ),
    "magnitude": subnetworks.by_magnitude,
    "random": subnetworks.random,
}


@pytest.fixture(params=RULES)
def rule(request: pytest.FixtureRequest) -> Callable[..., Any]:
    return RULES[request.param]


def test_candidates_and_shares(rule: Callable[..., Any]) -> None:
    model = net()
    assert len(rule(model, 0.25).index) == 11
    assert indices(rule(model, 1.0)) == list(range(SIZE))
    assert len(rule(model, 1e-9).index) == 1
    assert set(indices(rule(model, 0.5, within=lw.named("bias")))) < {*range(15, 20), *range(40, 44)}
    one = lw.subnetwork(torch.tensor([41, 3, 17]))
    assert indices(rule(model, 3, within=one)) == [3, 17, 41]
    assert set(indices(rule(model, 2, within=one))) < {3, 17, 41}


def test_wrong_numbers_of_weights_are_refused(rule: Callable[..., Any]) -> None:
    for n in (0, -3, 1.5, 0.0, -0.1, float("nan"), True, "five", None):
        with pytest.raises(lw.errors.UnsupportedError, match=r"^n is .*expected a number of weights of at least 1, or"):
            rule(net(), n)


def test_refused(rule: Callable[..., Any]) -> None:
    model = net()
    with pytest.raises(lw.errors.UnsupportedError, match="n is 45; expected at most 44, the number of candidates"):
        rule(model, SIZE + 1)
    with pytest.raises(lw.errors.UnsupportedError, match="n is 10; expected at most 9"):
        rule(model, 10, within=lw.named("bias"))
    with pytest.raises(lw.errors.ModelError, match="no parameter name matches 'nothing'"):
        rule(model, 2, within=lw.named("nothing"))
    with pytest.raises(lw.errors.UnsupportedError, match="weights is 'first_layer'; expected one of"):
        rule(model, 2, within="first_layer")
    model[0].weight.requires_grad_(False)
    with pytest.raises(lw.errors.ModelError, match=r"the candidate '0.weight' does not require a gradient"):
        rule(model, 2, within=lw.named("weight"))


def test_the_last_layer_is_found_with_data_alone() -> None:
    model = net()
    assert min(indices(subnetworks.by_gradient(model, DATA, "classification", 9, within=lw.last_layer))) >= 20
    for rule in (subnetworks.by_magnitude, subnetworks.random):
        with pytest.raises(lw.errors.UnsupportedError, match=r"found by a pass over inputs; expected lw.named"):
            rule(model, 3, within=lw.last_layer)


def test_other_arguments_are_checked() -> None:
    model = net()
    with pytest.raises(lw.errors.UnsupportedError, match="pool is 4; expected at least the 5 weights"):
        subnetworks.greedy(model, DATA, "classification", 5, pool=4)
    with pytest.raises(lw.errors.UnsupportedError, match="pool is 0; expected an integer of at least 1"):
        subnetworks.greedy(model, DATA, "classification", 5, pool=0)
    with pytest.raises(lw.errors.UnsupportedError, match=r"swag is 3; expected lw.baselines.SWAG"):
        subnetworks.by_swag(model, DATA, "classification", 5, swag=3)
    with pytest.raises(lw.errors.UnsupportedError, match="generator is 3"):
        subnetworks.random(model, 5, generator=3)
    with lw.memory.limited(2**10), pytest.raises(lw.errors.UnsupportedError, match="a pool of 300 weights takes"):
        subnetworks.greedy(nn.Linear(99, 3), [(torch.randn(4, 99), torch.arange(4) % 3)], "classification", 5)
    model[0].weight.data[0, 0] = torch.nan
    with pytest.raises(lw.errors.DataError, match="scores of the weights: 1 of 44 entries are NaN"):
        subnetworks.by_magnitude(model, 5)


def test_equal_scores_go_to_the_first() -> None:
    model = net()
    for p in model.parameters():
        p.data.fill_(0.5)
    assert indices(subnetworks.by_magnitude(model, 7)) == list(range(7))
    dead = nn.Sequential(nn.Linear(INPUTS, 5), nn.ReLU(), nn.Linear(5, CLASSES)).double()
    dead[0].bias.data.fill_(-99.0)  # no gradient in the first layer, nor in the weights of the second
    assert indices(subnetworks.by_gradient(dead, DATA, "classification", 9)) == [*range(5), 40, 41, 42, 43]


def test_the_model_is_left_as_it_was(rule: Callable[..., Any]) -> None:
    model = net()
    problems.unchanged(model, lambda: rule(model, 5))


def test_single_precision_and_progress(capsys: pytest.CaptureFixture[str]) -> None:
    model = net().float()
    assert len(subnetworks.greedy(model, [(X.float(), Y)], "classification", 5, progress=True).index) == 5
    assert "greedy choice" in capsys.readouterr().err
    assert len(subnetworks.by_variance(model, [(X.float(), Y)], "classification", 5, progress=False).index) == 5


@pytest.mark.parametrize("wrap", [nn.DataParallel, lambda model: torch.compile(model, backend="eager")])
def test_wrapped_models_have_the_same_selections(wrap: Any) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).eval()
    x = torch.randn(12, 3, generator=torch.Generator().manual_seed(1))
    data = [(x, x[:, :2])]
    for rule in (lw.subnetworks.by_variance, lw.subnetworks.by_gradient, lw.subnetworks.greedy):
        assert torch.equal(rule(wrap(model), data, "regression", 7).index, rule(model, data, "regression", 7).index)
    by_magnitude = lw.subnetworks.by_magnitude
    inside = lw.named("weight")
    assert torch.equal(by_magnitude(wrap(model), 7, within=inside).index, by_magnitude(model, 7, within=inside).index)


def test_too_many_weights_are_refused_before_anything_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lw.baselines.SWAG, "collect", lambda *_: pytest.fail("it trained"))
    monkeypatch.setattr(lw.Diagonal, "fit", lambda *_: pytest.fail("it fitted"))
    model, x = nn.Linear(3, 2).eval(), torch.randn(9, 3)
    for rule in (lw.subnetworks.by_variance, lw.subnetworks.by_swag, lw.subnetworks.by_gradient):
        with pytest.raises(lw.errors.UnsupportedError, match="n is 3; expected at most 2"):
            rule(model, [(x, x[:, :2])], "regression", 3, within=lw.named("bias"))
