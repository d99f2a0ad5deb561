"""Grids, cross-validation and temperature: the same as trying every value by hand, from one pass over the data."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lapwing as lw
from lapwing.curvature.full import FullCurvature, FullPrecision
from lapwing.posteriors.weight_space import WeightPosterior
from lapwing.priors.single import GPrior
from lapwing.tuners import held_out
from lapwing.tuners.held_out import PRECISIONS, TEMPERATURES, held_out_scores, nll
from tests import problems
from tests.cases import BY_NAME, Case
from tests.tolerances import assert_close

D = torch.float64
MLP, TOKENS, SINGLE = BY_NAME["mlp"], BY_NAME["token_level"], BY_NAME["squeezed"]
METHODS: dict[str, Any] = {
    "full": lw.Full(), "diagonal": lw.Diagonal(), "kron": lw.Kron(), "ekron": lw.EKron(),
    "low_rank": lw.LowRank(rank=7), "ella": lw.ELLA(num_landmarks=12, rank=7), "valla": lw.VaLLA(7, optimiser="none"),
    "sampled": lw.Sampled(num_samples=5, tolerance=1e-10),
}  # fmt: skip
VALUES = (0.03, 0.1, 0.4, 1.0, 3.0, 20.0, 100.0)
HELD = (2, 4, 1)


def normal_targets(case: Case, size: int, seed: int) -> Tensor:
    return torch.randn(size, *case.outputs, dtype=D, generator=torch.Generator().manual_seed(seed))


def split(case: Case, targets: Callable[[int, int], Tensor]) -> tuple[list[Any], list[Any]]:
    """Training data and held-out data, both in unequal batches."""
    return (
        problems.split(case.batch(6), targets(6, 9), (3, 1, 2)),
        problems.split(case.batch(sum(HELD), seed=21), targets(sum(HELD), 4), HELD),
    )


LIKELIHOODS: dict[str, tuple[Case, Any, Callable[[int, int], Tensor]]] = {
    "regression": (MLP, lw.Gaussian(), lambda n, s: normal_targets(MLP, n, s)),
    "noise for each output": (MLP, lw.Gaussian(per_output=True), lambda n, s: normal_targets(MLP, n, s)),
    "one output": (SINGLE, lw.Gaussian(noise_std=0.5), lambda n, s: normal_targets(SINGLE, n, s)),
    "classification": (MLP, lw.Categorical(), lambda n, s: problems.targets(MLP, n, s)),
    "class weights": (MLP, lw.Categorical(class_weights=(1.0, 0.2, 3.0)), lambda n, s: problems.targets(MLP, n, s)),
    "bridge": (MLP, lw.Categorical(link="bridge"), lambda n, s: problems.targets(MLP, n, s)),
    "binary": (SINGLE, lw.Bernoulli(), lambda n, s: problems.targets(SINGLE, n, s)),
    "several labels": (MLP, lw.Bernoulli(), lambda n, s: torch.randint(0, 2, (n, 3))),
    "tokens": (TOKENS, lw.Categorical(), lambda n, s: problems.targets(TOKENS, n, s)),
    "token regression": (TOKENS, lw.Gaussian(), lambda n, s: normal_targets(TOKENS, n, s)),
    "counts": (MLP, lw.Poisson(), lambda n, s: torch.randint(0, 4, (n, 3))),
}


def setting(name: str = "regression", method: Any = None, prior: Any = 1.0) -> tuple[lw.Fitted, list[Any]]:
    case, likelihood, targets = LIKELIHOODS[name]
    train, held = split(case, targets)
    method = lw.Full() if method is None else method
    return lw.fit(case.build(), train, likelihood, method=method, prior=prior), held


def with_temperature(fitted: lw.Fitted, factor: float) -> lw.Fitted:
    likelihood = fitted.likelihood.with_dispersion(fitted.likelihood.dispersion * factor)
    return lw.Fitted(fitted.posterior.with_problem(fitted.problem.with_likelihood(likelihood)), fitted.fingerprint)


def log_densities(fitted: lw.Fitted, held: list[Any]) -> Tensor:
    """Of every held-out datum, by predictions one at a time."""
    found = []
    for inputs, y in held:
        for b in range(len(y)):
            row = slice(b, b + 1)
            found.append(fitted.predict(problems.rows(inputs, row)).log_prob(y[row]).reshape(-1))
    return torch.cat(found)


def brute_force(fitted: lw.Fitted, held: list[Any], values: Any = VALUES) -> Tensor:
    """The mean negative log density under every precision."""
    return torch.stack([-log_densities(fitted.with_prior(v), held).mean() for v in values])


# The grid.


@pytest.mark.parametrize("method", METHODS)
def test_grid_by_the_evidence_is_brute_force(method: str) -> None:
    fitted, _ = setting(method=METHODS[method])
    found = fitted.tuned(lw.tuners.Grid(precisions=VALUES))
    evidences = torch.stack([fitted.with_prior(v).log_evidence() for v in VALUES])
    assert float(found.prior.values) == VALUES[int(evidences.argmax())]
    assert_close(torch.tensor([step.score for step in found.trace.steps], dtype=D), evidences)
    assert [step.precisions for step in found.trace.steps] == [pytest.approx((v,)) for v in VALUES]
    assert (found.trace.tuner, found.trace.score) == ("Grid", "log evidence")


@pytest.mark.parametrize("method", METHODS)
def test_grid_by_held_out_data_is_brute_force(method: str) -> None:
    fitted, held = setting(method=METHODS[method])
    found = fitted.tuned(lw.tuners.Grid(held, VALUES))
    expected = brute_force(fitted, held)
    assert_close(torch.tensor([step.score for step in found.trace.steps], dtype=D), expected)
    assert float(found.prior.values) == VALUES[int(expected.argmin())]
    assert found.trace.score == "held-out metric"
    new = MLP.batch(3, seed=2)
    same = fitted.with_prior(float(found.prior.values))
    assert_close(found.predict(new).std, same.predict(new).std)


@pytest.mark.parametrize("name", LIKELIHOODS)
def test_grid_for_every_likelihood(name: str) -> None:
    fitted, held = setting(name, lw.Kron())
    found = fitted.tuned(lw.tuners.Grid(held, VALUES))
    expected = brute_force(fitted, held)
    assert_close(torch.tensor([step.score for step in found.trace.steps], dtype=D), expected)
    assert float(found.prior.values) == VALUES[int(expected.argmin())]


def test_the_best_value_depends_on_the_data() -> None:
    """Sure to be a search and not a constant: data from the network itself ask for narrow bars, noise for wide ones."""
    fitted, _ = setting(prior=1.0)
    x = MLP.batch(7, seed=21)
    f = MLP.build()(x).detach()
    narrow = fitted.tuned(lw.tuners.Grid([(x, f)], VALUES)).prior.values
    wide = fitted.tuned(lw.tuners.Grid([(x, f + 4)], VALUES)).prior.values
    assert float(narrow) == VALUES[-1]
    assert float(wide) < 1.0


def test_groups_keep_their_ratios() -> None:
    fitted, held = setting(prior=lw.per_layer(torch.tensor([0.25, 2.0, 16.0], dtype=D)))
    found = fitted.tuned(lw.tuners.Grid(held, VALUES))
    ratios = torch.tensor([1 / 8, 1.0, 8.0], dtype=D)  # about a geometric mean of two
    expected = torch.stack([
        -log_densities(fitted.with_prior(lw.per_layer(v * ratios)), held).mean() for v in VALUES
    ])  # fmt: skip
    assert_close(torch.tensor([step.score for step in found.trace.steps], dtype=D), expected)
    assert_close(found.prior.values, VALUES[int(expected.argmin())] * ratios)


@pytest.mark.parametrize("prior", [lw.priors.g_prior(2.0), lw.isotropic(1.0, 0.4)], ids=["g", "about a mean"])
def test_grid_of_other_priors(prior: Any) -> None:
    fitted, held = setting(method=lw.Kron(), prior=prior)
    again = lw.priors.g_prior if isinstance(prior, GPrior) else lambda v: lw.isotropic(v, 0.4)
    for data, score in ((held, 1), (None, -1)):
        found = fitted.tuned(lw.tuners.Grid(data, VALUES))
        tried = [fitted.with_prior(again(v)) for v in VALUES]
        expected = torch.stack([-log_densities(t, held).mean() if data else t.log_evidence() for t in tried])
        assert_close(torch.tensor([step.score for step in found.trace.steps], dtype=D), expected)
        assert float(found.prior.values) == VALUES[int((score * expected).argmin())]


@pytest.mark.parametrize("weights", [lw.last_layer, lw.subnetwork(torch.arange(0, 83, 5))], ids=["last layer", "some"])
def test_grid_of_some_weights(weights: Any) -> None:
    train, held = split(MLP, LIKELIHOODS["classification"][2])
    fitted = lw.fit(MLP.build(), train, "classification", method=lw.Full(), weights=weights, prior=1.0)
    found = fitted.tuned(lw.tuners.Grid(held, VALUES))
    expected = brute_force(fitted, held)
    assert_close(torch.tensor([step.score for step in found.trace.steps], dtype=D), expected)


def test_grid_of_a_metric_of_ones_own() -> None:
    """Its weighted mean over batches, whatever it is; here the width of an interval where it fails to cover."""
    fitted, held = setting()

    def metric(predictive: Any, y: Tensor) -> float:
        low, high = predictive.interval(0.9)
        return float((high - low + 20 * ((y < low) | (y > high))).mean())

    found = fitted.tuned(lw.tuners.Grid(held, VALUES, metric))
    expected = []
    for value in VALUES:
        tried = fitted.with_prior(value)
        expected.append(sum(len(y) * metric(tried.predict(x), y) for x, y in held) / sum(HELD))
    assert [step.score for step in found.trace.steps] == pytest.approx(expected, rel=1e-10)
    assert float(found.prior.values) == VALUES[expected.index(min(expected))]
    nll = fitted.tuned(lw.tuners.Grid(held, VALUES))
    assert [s.score for s in nll.trace.steps] != pytest.approx(expected, rel=1e-3)


def test_ignored_data_do_not_count() -> None:
    case, likelihood, targets = LIKELIHOODS["tokens"]
    train, held = split(case, targets)
    masked = [(x, y.masked_fill(torch.rand(y.shape, generator=torch.Generator().manual_seed(1)) < 0.4, -100))
              for x, y in held]  # fmt: skip
    masked.append((case.batch(2, seed=3), torch.full((2, 4), -100)))  # a batch that does not count at all
    fitted = lw.fit(case.build(), train, likelihood, method=lw.Kron(), prior=1.0)
    found = fitted.tuned(lw.tuners.Grid(masked, VALUES))
    expected = []
    for value in VALUES:
        tried, total = fitted.with_prior(value), []
        for x, y in masked:
            logs = tried.predict(x).log_probs.gather(-1, y.clamp_min(0)[..., None])[..., 0]
            total.append(logs[y != -100])
        expected.append(-torch.cat(total).mean())
    assert_close(torch.tensor([step.score for step in found.trace.steps], dtype=D), torch.stack(expected))
    with pytest.raises(lw.errors.DataError, match="no held-out datum counts: every target is ignored"):
        fitted.tuned(lw.tuners.Grid(masked[-1:], VALUES))


def test_labels_of_which_some_are_unknown_are_refused() -> None:
    """A wrong score would be silent: the log density takes a label of -1 for a number."""
    x = MLP.batch(6)
    y = torch.tensor([[0, 1, -1]]).expand(6, 3)
    fitted = lw.fit(MLP.build(), [(x, y)], lw.Bernoulli(ignore_index=-1), prior=1.0)
    with pytest.raises(lw.errors.DataError, match="some held-out labels are ignored ones"):
        fitted.tuned(lw.tuners.Grid([(x, y)], VALUES))


# The cost.


class Counted(nn.Module):
    """A network that knows how often it was called, and with how many inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = MLP.build()
        self.calls: list[int] = []
        self.register_forward_hook(lambda module, args, out: self.calls.append(len(args[0])))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


@pytest.mark.parametrize("method", ["full", "kron", "low_rank"])
def test_the_network_runs_once_for_all_values(method: str) -> None:
    train, held = split(MLP, LIKELIHOODS["classification"][2])
    model = Counted().double().eval()
    fitted = lw.fit(model, train, "classification", method=METHODS[method], prior=1.0)
    tuners = [
        lw.tuners.Grid(held, VALUES),
        lw.tuners.Grid(held, VALUES * 5),
        lw.tuners.CrossValidated(held, VALUES, folds=3),
    ]
    for tuner in (*tuners, lw.tuners.Temperature(held, VALUES)):
        model.calls.clear()
        fitted.tuned(tuner)
        assert model.calls == list(HELD)
    model.calls.clear()
    fitted.tuned(lw.tuners.Grid(precisions=VALUES))
    assert model.calls == []


def test_the_data_are_passed_over_once() -> None:
    fitted, held = setting()
    passes: list[int] = []

    class Counting:
        def __iter__(self) -> Any:
            passes.append(1)
            return iter(held)

    source = Counting()
    found = fitted.tuned(lw.tuners.Grid(source, VALUES))  # type: ignore[arg-type]
    opened = len(passes)
    assert opened <= 2  # one is the look whether it can be iterated again
    assert float(found.prior.values) == float(fitted.tuned(lw.tuners.Grid(held, VALUES)).prior.values)


def alive(kind: type) -> int:
    gc.collect()
    return sum(type(each) is kind for each in gc.get_objects())


@pytest.mark.parametrize("make", [lw.tuners.Grid, lw.tuners.CrossValidated, lw.tuners.Temperature])
def test_candidates_that_do_not_fit_at_once_come_in_groups(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two factorisations of 83 weights fit, three do not: seven values take four passes, and score the same."""
    train, held = split(MLP, LIKELIHOODS["classification"][2])
    model = Counted().double().eval()
    fitted = lw.fit(model, train, "classification", method=lw.Full(), prior=1.0)
    expected = fitted.tuned(make(held, VALUES)).trace
    before, seen = alive(FullPrecision), []

    def metric(predictive: Any, y: Tensor) -> Tensor:
        seen.append(alive(FullPrecision) - before)
        return nll(predictive, y)

    monkeypatch.setattr(held_out, "temporary", lambda device: 8 * 83**2 * 5 // 4)
    model.calls.clear()
    found = fitted.tuned(make(held, VALUES, metric))
    assert found.trace.steps == expected.steps
    assert model.calls == list(HELD) * 4
    assert max(seen) == 2


def test_one_candidate_is_tried_whatever_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    fitted, held = setting()
    expected = fitted.tuned(lw.tuners.Grid(held, VALUES)).trace
    monkeypatch.setattr(held_out, "temporary", lambda device: 0)
    assert fitted.tuned(lw.tuners.Grid(held, VALUES)).trace.steps == expected.steps


@pytest.mark.parametrize("method", METHODS)
def test_groups_of_every_method(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fitted, held = setting(method=METHODS[method])
    expected = fitted.tuned(lw.tuners.Temperature(held, VALUES)).trace
    monkeypatch.setattr(held_out, "temporary", lambda device: 0)
    assert fitted.tuned(lw.tuners.Temperature(held, VALUES)).trace.steps == expected.steps


def test_the_evidence_of_a_grid_keeps_no_candidate(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a noise for each output every candidate sums up a curvature of its own."""
    fitted, _ = setting("noise for each output")
    before, seen = alive(FullCurvature), []
    plain = WeightPosterior.log_evidence

    def counted(self: WeightPosterior) -> Tensor:
        found = plain(self)
        seen.append(alive(FullCurvature) - before)
        return found

    monkeypatch.setattr(WeightPosterior, "log_evidence", counted)
    fitted.tuned(lw.tuners.Grid(precisions=VALUES))
    assert max(seen) == 1


def test_groups_need_data_that_come_again(monkeypatch: pytest.MonkeyPatch) -> None:
    fitted, held = setting()
    x, y = torch.cat([x for x, _ in held]), torch.cat([y for _, y in held])
    loader = DataLoader(TensorDataset(x, y), batch_size=3, shuffle=True, generator=torch.Generator().manual_seed(0))
    one = fitted.tuned(lw.tuners.Grid(loader, VALUES)).trace
    fitted.tuned(lw.tuners.CrossValidated(loader, VALUES, folds=3))
    monkeypatch.setattr(held_out, "temporary", lambda device: 0)
    found = fitted.tuned(lw.tuners.Grid(loader, VALUES)).trace  # one fold does not mind the order
    assert [step.score for step in found.steps] == pytest.approx([step.score for step in one.steps], rel=1e-10)
    with pytest.raises(lw.errors.DataError, match="a second pass over the held-out data gave other folds"):
        fitted.tuned(lw.tuners.CrossValidated(loader, VALUES, folds=3))


def test_the_model_is_left_as_it_was() -> None:
    train, held = split(MLP, LIKELIHOODS["classification"][2])
    model = MLP.build()
    fitted = lw.fit(model, train, "classification", method=lw.Kron(), prior=1.0)
    for tuner in (lw.tuners.Grid(held), lw.tuners.CrossValidated(held), lw.tuners.Temperature(held)):
        problems.unchanged(model, lambda t=tuner: fitted.tuned(t))
    assert float(fitted.prior.values) == 1.0


def test_as_the_tuner_of_a_fit() -> None:
    train, held = split(MLP, LIKELIHOODS["classification"][2])
    at_once = lw.fit(MLP.build(), train, "classification", method=lw.Kron(), tuner=lw.tuners.Grid(held, VALUES))
    later = lw.fit(MLP.build(), train, "classification", method=lw.Kron(), prior=1.0).tuned(
        lw.tuners.Grid(held, VALUES)
    )
    assert float(at_once.prior.values) == float(later.prior.values)
    assert_close(at_once.log_evidence(), later.log_evidence())


def test_in_float32() -> None:
    fitted, held = setting("classification", lw.Kron())
    train, _ = split(MLP, LIKELIHOODS["classification"][2])
    narrow = lw.fit(MLP.build(torch.float32), [(x.float(), y) for x, y in train], "classification", method=lw.Kron(),
                    prior=1.0)  # fmt: skip
    for make in (lw.tuners.Grid, lw.tuners.Temperature):
        wide = fitted.tuned(make(held, VALUES)).trace
        found = narrow.tuned(make([(x.float(), y) for x, y in held], VALUES)).trace
        assert [s.score for s in found.steps] == pytest.approx([s.score for s in wide.steps], rel=1e-4)


# Folds.


@pytest.mark.parametrize("folds", [2, 3, 5, 7, 11])
@pytest.mark.parametrize("name", ["regression", "classification"])
def test_cross_validation_is_brute_force(name: str, folds: int) -> None:
    """Datum i is in fold i mod folds, across batches; more folds than data leave a fold for each datum."""
    fitted, held = setting(name)
    found = fitted.tuned(lw.tuners.CrossValidated(held, VALUES, folds=folds))
    each = torch.stack([-log_densities(fitted.with_prior(v), held) for v in VALUES], 1)  # (data, values)
    scores = torch.stack([each[k::folds].mean(0) for k in range(min(folds, len(each)))])
    means = scores.mean(0)
    assert_close(torch.tensor([step.score for step in found.trace.steps], dtype=D), means)
    best = int(means.argmin())
    assert float(found.prior.values) == VALUES[best]
    error = float(scores.std(0)[best]) / math.sqrt(len(scores))
    assert found.trace.findings[0] == (
        f"precision {VALUES[best]:.3g} has the best mean, {float(means[best]):.4g} ± {error:.2g} "
        f"over {len(scores)} folds"
    )
    assert (found.trace.tuner, found.trace.score) == ("CrossValidated", "mean held-out metric")


def test_cross_validation_within_one_error() -> None:
    """The largest precision whose mean is no further from the best than the best one's standard error."""
    fitted, held = setting()
    held = [(x, MLP.build()(x).detach() + 2 * y.sign()) for x, y in held]
    plain = fitted.tuned(lw.tuners.CrossValidated(held, VALUES, folds=3))
    wary = fitted.tuned(lw.tuners.CrossValidated(held, VALUES, folds=3, one_error=True))
    each = torch.stack([-log_densities(fitted.with_prior(v), held) for v in VALUES], 1)
    scores = torch.stack([each[k::3].mean(0) for k in range(3)])
    means, errors = scores.mean(0), scores.std(0) / math.sqrt(3)
    best = int(means.argmin())
    allowed = [v for v, m in zip(VALUES, means, strict=True) if m <= means[best] + errors[best]]
    assert float(wary.prior.values) == max(allowed)
    assert float(plain.prior.values) < float(wary.prior.values) < VALUES[-1]
    turned = fitted.tuned(lw.tuners.CrossValidated(held, VALUES[::-1], folds=3, one_error=True))
    assert float(turned.prior.values) == max(allowed)  # in whatever order they are given


def test_cross_validation_of_a_metric_of_ones_own() -> None:
    fitted, held = setting()
    seen: list[int] = []

    def metric(predictive: Any, y: Tensor) -> Tensor:
        seen.append(len(y))
        return (predictive.std - 0.7).abs().mean()

    found = fitted.tuned(lw.tuners.CrossValidated(held, VALUES, metric, folds=2))
    each = torch.stack([
        torch.cat([(fitted.with_prior(v).predict(x).std - 0.7).abs().mean(1) for x, _ in held]) for v in VALUES
    ], 1)  # fmt: skip
    means = torch.stack([each[0::2].mean(0), each[1::2].mean(0)]).mean(0)
    assert_close(torch.tensor([step.score for step in found.trace.steps], dtype=D), means)
    assert float(found.prior.values) == VALUES[int(means.argmin())]
    assert sum(seen) == sum(HELD) * len(VALUES)


def test_scores_of_folds() -> None:
    fitted, held = setting()
    candidates = [fitted.with_prior(v).posterior for v in VALUES[:2]]
    whole = held_out_scores(candidates, held, lambda p, y: -p.log_prob(y).mean())
    parts = held_out_scores(candidates, held, lambda p, y: -p.log_prob(y).mean(), folds=7)
    assert whole.shape == (1, 2)
    assert parts.shape == (7, 2)
    assert_close(parts.mean(0), whole[0])


# Temperature.


@pytest.mark.parametrize("name", [name for name in LIKELIHOODS if name != "counts"])
def test_temperature_is_brute_force(name: str) -> None:
    fitted, held = setting(name, lw.Kron())
    found = fitted.tuned(lw.tuners.Temperature(held, VALUES))
    expected = torch.stack([-log_densities(with_temperature(fitted, t), held).mean() for t in VALUES])
    assert_close(torch.tensor([step.score for step in found.trace.steps], dtype=D), expected)
    best = VALUES[int(expected.argmin())]
    assert_close(found.likelihood.dispersion, fitted.likelihood.dispersion * best)
    assert found.trace.findings[0] == f"temperature {best:.3g}"
    assert torch.equal(found.prior.values, fitted.prior.values)
    if name == "noise for each output":
        assert_close(found.likelihood.noise_variance, fitted.likelihood.noise_variance * best)


@pytest.mark.parametrize("method", METHODS)
def test_temperature_of_every_method(method: str) -> None:
    fitted, held = setting("classification", METHODS[method])
    found = fitted.tuned(lw.tuners.Temperature(held, VALUES))
    expected = torch.stack([-log_densities(with_temperature(fitted, t), held).mean() for t in VALUES])
    assert_close(torch.tensor([step.score for step in found.trace.steps], dtype=D), expected)


def test_temperature_of_a_metric_of_ones_own() -> None:
    fitted, held = setting("classification")
    found = fitted.tuned(lw.tuners.Temperature(held, VALUES, lambda p, y: float((p.entropy - 0.9).abs().mean())))
    expected = []
    for value in VALUES:
        tried = with_temperature(fitted, value)
        gaps = torch.cat([(tried.predict(x).entropy - 0.9).abs() for x, _ in held])
        expected.append(float(gaps.mean()))
    assert [step.score for step in found.trace.steps] == pytest.approx(expected, rel=1e-10)
    assert float(found.likelihood.dispersion) == VALUES[expected.index(min(expected))]


def test_temperatures_are_multiples_of_the_present_one() -> None:
    fitted, held = setting("classification")
    once = fitted.tuned(lw.tuners.Temperature(held, (0.5,)))
    twice = once.tuned(lw.tuners.Temperature(held, (0.5,)))
    assert float(twice.likelihood.dispersion) == 0.25


@pytest.mark.parametrize(
    ("likelihood", "outputs"),
    [(lw.Poisson(), 3), (lw.HeteroscedasticGaussian(), 2)],
    ids=["Poisson", "Heteroscedastic"],
)
def test_no_temperature_to_choose(likelihood: Any, outputs: int) -> None:
    model, x = nn.Linear(4, outputs).double(), MLP.batch(6)
    y = torch.randint(0, 4, (6, outputs if outputs == 3 else 1)).double()
    fitted = lw.fit(model, [(x, y)], likelihood, prior=1.0)
    with pytest.raises(
        lw.errors.UnsupportedError, match=f"{type(likelihood).__name__} has no temperature to choose: .*no disp"
    ):
        fitted.tuned(lw.tuners.Temperature([(x, y)]))
    assert math.isfinite(fitted.tuned(lw.tuners.Grid([(x, y)])).trace.steps[0].score)


# Edges.


@pytest.mark.parametrize("make", [lw.tuners.Grid, lw.tuners.CrossValidated, lw.tuners.Temperature])
def test_a_best_value_at_the_edge_is_told(make: Any) -> None:
    fitted, _ = setting()
    x = MLP.batch(7, seed=21)
    f = MLP.build()(x).detach()
    sure = fitted.tuned(
        make([(x, f + 1e-3)], (1e-2, 1.0, 1e2) if make is not lw.tuners.Temperature else (1e2, 1.0, 1e-2))
    )
    assert sure.trace.findings[-1] == "the best value is at the edge of those tried: try further out"
    assert "edge" in str(sure.trace)


def test_a_best_value_inside_is_not_told() -> None:
    fitted, _ = setting()
    evidences = [float(fitted.with_prior(v).log_evidence()) for v in VALUES]
    best = evidences.index(max(evidences))
    assert 0 < best < len(VALUES) - 1
    assert fitted.tuned(lw.tuners.Grid(precisions=VALUES)).trace.findings == ()
    assert fitted.tuned(lw.tuners.Grid(precisions=VALUES[best:])).trace.findings == (
        "the best value is at the edge of those tried: try further out",
    )
    assert fitted.tuned(lw.tuners.Grid(precisions=VALUES[best : best + 2])).trace.findings == ()  # two are all edge


def test_the_default_values_cover_what_is_needed() -> None:
    assert len(PRECISIONS) == 21
    assert (min(PRECISIONS), max(PRECISIONS)) == pytest.approx((1e-4, 1e6))
    assert (min(TEMPERATURES), max(TEMPERATURES)) == pytest.approx((1e-3, 1e2))
    fitted, held = setting()
    assert float(fitted.tuned(lw.tuners.Grid(held)).prior.values) in PRECISIONS


# Bad input.

HELD_OUT: Any = [(torch.zeros(2, 4, dtype=D), torch.zeros(2, 3, dtype=D))]


@pytest.mark.parametrize(
    "values", [(), [], (0.0,), (-1.0, 1.0), (math.nan,), (math.inf, 1.0), 3.0, "abc", None, ("a",)]
)
def test_values_that_are_none_are_refused(values: Any) -> None:
    with pytest.raises(
        lw.errors.UnsupportedError, match=r"precisions is .*; expected a list of positive, finite numbers"
    ):
        lw.tuners.Grid(HELD_OUT, values)
    with pytest.raises(lw.errors.UnsupportedError, match=r"precisions is .*; expected"):
        lw.tuners.CrossValidated(HELD_OUT, values)
    with pytest.raises(lw.errors.UnsupportedError, match=r"temperatures is .*; expected"):
        lw.tuners.Temperature(HELD_OUT, values)


@pytest.mark.parametrize("folds", [1, 0, -2])
def test_less_than_two_folds_are_refused(folds: int) -> None:
    with pytest.raises(lw.errors.UnsupportedError, match=rf"folds is {folds}; expected at least 2"):
        lw.tuners.CrossValidated(HELD_OUT, folds=folds)


def test_one_datum_makes_no_folds() -> None:
    fitted, held = setting()
    with pytest.raises(lw.errors.DataError, match="the held-out data give 1 fold; expected at least 2 data"):
        fitted.tuned(lw.tuners.CrossValidated([(held[0][0][:1], held[0][1][:1])], VALUES))


@pytest.mark.parametrize(
    "tuner", [lw.tuners.Grid, lw.tuners.CrossValidated, lw.tuners.Temperature, lw.tuners.LinearMode]
)
def test_a_class_in_place_of_an_object_is_refused(tuner: Any) -> None:
    fitted, _ = setting()
    with pytest.raises(lw.errors.UnsupportedError, match=rf"tuner is the class {tuner.__name__}; expected an object"):
        fitted.tuned(tuner)
    with pytest.raises(lw.errors.UnsupportedError, match="expected an object"):
        lw.fit(MLP.build(), problems.batches(MLP), "classification", tuner=tuner)


@pytest.mark.parametrize("make", [lw.tuners.Grid, lw.tuners.CrossValidated, lw.tuners.Temperature])
def test_a_network_without_spread_has_nothing_to_change(make: Any) -> None:
    fitted, held = setting(method=lw.baselines.MapOnly())
    with pytest.raises(
        lw.errors.UnsupportedError, match="PointPosterior has no precision to change; use a method that has"
    ):
        fitted.tuned(make(held))
    with pytest.raises(lw.errors.UnsupportedError, match="PointPosterior has no precision to change"):
        fitted.tuned(lw.tuners.Grid())


@pytest.mark.parametrize("make", [lw.tuners.Grid, lw.tuners.CrossValidated, lw.tuners.Temperature])
def test_held_out_data_that_do_not_fit_are_refused(make: Any) -> None:
    fitted, held = setting()
    x, y = held[1]
    with pytest.raises(lw.errors.DataError, match="4 inputs with 3 targets; expected one target for each"):
        fitted.tuned(make([(x, y[:3])], VALUES))
    with pytest.raises(lw.errors.DataError, match="3 inputs with 4 targets; expected one target for each"):
        fitted.tuned(make([(x[:3], y)], VALUES))
    with pytest.raises(lw.errors.DataError, match=r"targets have the shape \(4, 2\)"):
        fitted.tuned(make([(x, y[:, :2])], VALUES))
    with pytest.raises(lw.errors.DataError, match="NaN"):
        fitted.tuned(make([(x, y * math.nan)], VALUES))
    with pytest.raises(lw.errors.DataError, match="data is empty"):
        fitted.tuned(make([], VALUES))
    with pytest.raises(lw.errors.DataError, match="one-shot iterator"):
        fitted.tuned(make(iter(held), VALUES))


@pytest.mark.parametrize("make", [lw.tuners.Grid, lw.tuners.CrossValidated, lw.tuners.Temperature])
def test_a_metric_that_is_no_number_is_refused(make: Any) -> None:
    fitted, held = setting()
    with pytest.raises(lw.errors.DataError, match=r"the metric gave \(\d,\) numbers; expected one"):
        fitted.tuned(make(held, VALUES, lambda p, y: p.log_prob(y).repeat(2)))
    with pytest.raises(lw.errors.DataError, match="7 of 7 scores are not finite"):
        fitted.tuned(make(held, VALUES, lambda p, y: math.nan))
