"""Cross-fitting against what it says: the weights of the cells, honest predictions, guarantees, and wrong recipes."""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Callable, Iterator
from datetime import date, timedelta
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from sklearn.model_selection import GroupKFold, KFold, TimeSeriesSplit
from torch import Tensor, nn

import lapwing as lw
from lapwing.crossfit import CrossFit, Pool
from lapwing.errors import DataError, FileError, ModelError, UnsupportedError
from lapwing.folds import Rows, copied_recipe, split_findings, splits_of
from lapwing.sklearn import LapwingClassifier
from tests import problems
from tests.tolerances import SOLVED, assert_close, least_hits

D = torch.float64
N = 120


def inputs(n: int = N, seed: int = 0) -> Tensor:
    return torch.randn(n, 3, dtype=D, generator=torch.Generator().manual_seed(seed))


def labels(x: Tensor, seed: int = 1) -> Tensor:
    noise = torch.randn(len(x), dtype=D, generator=torch.Generator().manual_seed(seed))
    return (x[:, 0] + 0.7 * noise > 0).long() + (x[:, 1] > 1).long()


def numbers(x: Tensor, seed: int = 1) -> Tensor:
    noise = torch.randn(len(x), 1, dtype=D, generator=torch.Generator().manual_seed(seed))
    return x[:, :1].sin() + 0.3 * noise


def trained(x: Tensor, y: Tensor, steps: int = 60) -> nn.Module:
    """A small network, overfitted with the global random numbers."""
    net = nn.Sequential(nn.Linear(3, 40), nn.Tanh(), nn.Linear(40, 1 if y.is_floating_point() else 3)).double()
    loss = nn.functional.mse_loss if y.is_floating_point() else nn.functional.cross_entropy
    problems.descend(net, lambda net: loss(net(x), y), steps, 0.05)
    return net.eval()


def recipe(x: Tensor, y: Tensor, steps: int = 60) -> Callable[[Tensor, int], nn.Module]:
    return lambda rows, seed: trained(x[rows], y[rows], steps)


LIKELIHOODS = {"classification": labels, "regression": numbers}


@cache
def crossed(task: str) -> CrossFit:
    x = inputs()
    y = LIKELIHOODS[task](x)
    return lw.crossfit(recipe(x, y), (x, y), task, folds=4, method=lw.Diagonal())


@pytest.mark.parametrize("task", LIKELIHOODS)
def test_one_fold_of_the_same_network_is_validation_data(task: str) -> None:
    """A sibling that is the network itself says what validation data say."""
    x = inputs()
    y = LIKELIHOODS[task](x)
    net = trained(x[:80], y[:80])
    posterior = lw.fit(net, (x[:80], y[:80]), task, method=lw.Diagonal(), tuner=lw.tuners.MaximiseEvidence()).posterior
    held_out = posterior.problem.network.read_data((x[80:], y[80:]))
    expected = lw.tuners.Integrate((x[80:], y[80:]))(posterior)
    pool = Pool.of(posterior, [(posterior, held_out)])
    mixture = pool.mixture(pool.grid, pool.weights())
    assert_close(mixture.weights, expected.weights)
    assert_close(mixture.belief(x).cov, expected.belief(x).cov)


@pytest.mark.parametrize("task", LIKELIHOODS)
def test_cells_are_weighted_by_what_each_network_has_not_seen(task: str) -> None:
    """log w = log prior + Σ log p(y | x, cell), one cell and one row after another."""
    result = crossed(task)
    x = inputs()
    y = LIKELIHOODS[task](x)
    final = result.posterior.posterior
    folds = [(fold, fold.posterior.posterior) for fold in result.folds]
    assert torch.cat([fold.held_out for fold in result.folds]).sort().values.tolist() == list(range(N))
    totals = []
    for cell in final.cells:
        ratio = final.beliefs[cell.belief].precisions
        relative = None if ratio is None else ratio / final.base.problem.prior.values
        heat = cell.likelihood.dispersion / final.base.problem.likelihood.dispersion
        total = 0.0
        for fold, mixture in folds:
            base = mixture.base
            assert not set(fold.held_out.tolist()) & set(fold.training.tolist())
            if relative is not None:
                base = base.with_problem(base.problem.with_precisions(base.problem.prior.values * relative))
            likelihood = cell.likelihood
            if task == "regression":
                likelihood = likelihood.with_dispersion(mixture.base.problem.likelihood.dispersion * heat)
            rows = fold.held_out
            total += float(likelihood.predict(base.belief(x[rows]).widened(cell.scale)).log_prob(y[rows]).sum())
        totals.append(total)
    prior = torch.zeros(len(totals), dtype=D)
    grid = Pool.of(final.base, [(m.base, f.posterior.network.read_data(f.data)) for f, m in folds]).grid
    for i, cell in enumerate(final.cells):
        same = [
            float(p) for p, each in zip(grid.log_prior, grid.cells, strict=True)
            if each.scale == cell.scale and _same(each, cell)
            and _precisions(grid.beliefs, each) == pytest.approx(_precisions(final.beliefs, cell))
        ]  # fmt: skip
        prior[i] = max(same)
    assert_close((prior + torch.tensor(totals, dtype=D)).softmax(0), final.weights, SOLVED)


def _same(one: Any, other: Any) -> bool:
    a, b = one.likelihood, other.likelihood
    temperatures = (a.link_temperature or 1.0) == pytest.approx(b.link_temperature or 1.0)
    tails = (a.degrees, a.tail_scale) == (b.degrees, b.tail_scale) if hasattr(a, "degrees") else True
    return bool(temperatures and tails and torch.isclose(a.dispersion, b.dispersion))


def _precisions(beliefs: Any, cell: Any) -> float:
    values = beliefs[cell.belief].precisions
    return 0.0 if values is None or not cell.scale else float(values.mean())


@pytest.mark.parametrize("task", LIKELIHOODS)
def test_rows_are_predicted_and_scored_by_networks_that_have_not_seen_them(task: str) -> None:
    result, x = crossed(task), inputs()
    y = LIKELIHOODS[task](x)
    expected = torch.cat([fold.posterior.predict(x[fold.held_out]).log_prob(y[fold.held_out]) for fold in result.folds])
    assert_close(result.out_of_fold.log_prob(y[result.rows]), expected)
    evaluation = result.evaluate(resamples=50)
    assert evaluation["nll"].posterior.value == pytest.approx(-float(expected.mean()), rel=1e-6)
    assert evaluation["nll"].verdict == "better"  # than networks that are overfitted
    shown = result.posterior.trace
    assert shown is not None
    assert shown.scores["mixture"] == pytest.approx(
        -float(expected.mean()), abs=1e-3
    )  # cells with little weight are left out
    assert "4 networks" in result.summary()
    assert "out-of-fold data" in result.summary()


def test_the_posterior_is_saved_alone_and_the_mixture_averages_all(tmp_path: Path) -> None:
    result, x = crossed("classification"), inputs(7, 5)
    result.posterior.save(tmp_path / "net.lapwing")
    again = lw.load(tmp_path / "net.lapwing", result.posterior.network.model)
    assert_close(again.predict(x).probs, result.posterior.predict(x).probs)
    each = [result.posterior, *(fold.posterior for fold in result.folds)]
    mean = torch.stack([posterior.predict(x).probs for posterior in each]).mean(0)
    assert_close(result.mixture.predict(x).probs, mean)


def test_intervals_are_those_of_the_definition() -> None:
    """The ⌊α(n+1)⌋-th smallest of f_k(i)(x) - r_i, and the ⌈(1-α)(n+1)⌉-th smallest of f_k(i)(x) + r_i."""
    result, x, new = crossed("regression"), inputs(), inputs(6, 9)
    y, lows, highs = numbers(x), [], []
    for fold in result.folds:
        for row in fold.held_out.tolist():
            residual = (y[row] - fold.posterior.predict(x[row : row + 1]).mean[0]).abs()
            lows.append(fold.posterior.predict(new).mean - residual)
            highs.append(fold.posterior.predict(new).mean + residual)
    low, high = result.interval(new, 0.8)
    assert_close(low, torch.stack(lows).sort(0).values[math.floor(0.2 * (N + 1) + 1e-9) - 1])
    assert_close(high, torch.stack(highs).sort(0).values[math.ceil(0.8 * (N + 1) - 1e-9) - 1])
    with pytest.raises(DataError, match="expected at least 999 for the level"):
        result.interval(new, 0.999)
    with pytest.raises(UnsupportedError, match="sets need targets that are labels"):
        result.sets(new)


@pytest.mark.parametrize("score", ["adaptive", "threshold"])
def test_sets_and_intervals_hold_new_targets(score: str) -> None:
    """The guarantee is 1 - 2α; 0.8 here."""
    new = inputs(400, 33)
    sets = crossed("classification").sets(new, 0.9, score=score)
    inside = sets.members.gather(1, labels(new, 34)[:, None]).sum()
    assert int(inside) >= least_hits(len(new), 0.8)
    assert float(sets.size.double().mean()) < 2.9
    low, high = crossed("regression").interval(new, 0.9)
    y = numbers(new, 34)
    assert int(((low <= y) & (y <= high)).sum()) >= least_hits(len(new), 0.8)
    with pytest.raises(UnsupportedError, match="intervals need targets that are numbers"):
        crossed("classification").interval(new)


def test_counts_have_intervals_and_a_binary_label_has_sets() -> None:
    """The guarantee is 1 - 2α; 0.6 here."""
    x, new = inputs(), inputs(200, 33)
    counts = lambda x, seed: torch.poisson((1 + x[:, :1]).exp(), torch.Generator().manual_seed(seed))
    binary = lambda x, seed: (labels(x, seed) > 0).double()[:, None]
    losses = {"counts": nn.functional.poisson_nll_loss, "binary": nn.functional.binary_cross_entropy_with_logits}
    for task, targets in (("counts", counts), ("binary", binary)):
        y = targets(x, 1)

        def train_fn(rows: Tensor, seed: int, y: Tensor = y, task: str = task) -> nn.Module:
            net = nn.Linear(3, 1).double()
            problems.descend(net, lambda net: losses[task](net(x[rows]), y[rows]), 40, 0.1)
            return net.eval()

        result = lw.crossfit(train_fn, (x, y), task, folds=3, method=lw.Diagonal())
        truth = targets(new, 34)
        if task == "counts":
            low, high = result.interval(new, 0.8)
            inside = (low <= truth) & (truth <= high)
        else:
            inside = result.sets(new, 0.8).members.gather(1, truth.long())
        assert int(inside.sum()) >= least_hits(len(new), 0.6)


def test_a_sibling_stands_for_validation_data() -> None:
    x = inputs()
    y = labels(x)
    net = trained(x, y)
    posterior = lw.fit(net, (x, y), "classification", method=lw.Diagonal(), validation=lw.sibling(recipe(x, y)))
    trace = posterior.trace
    assert trace is not None
    assert trace.scores["mixture"] < trace.scores["plain network"]
    assert posterior.network.model is net
    for bad in (0.0, 0.7, "x"):
        with pytest.raises(UnsupportedError, match="share is"):
            lw.sibling(recipe(x, y), share=bad)


@pytest.mark.parametrize("task", LIKELIHOODS)
def test_a_sibling_without_a_recipe_is_a_copy_that_fits_its_rows_as_well(task: str) -> None:
    x = inputs()
    y = LIKELIHOODS[task](x)
    net = trained(x, y, 10)
    before = copy.deepcopy(net.state_dict())
    posterior = lw.fit(net, (x, y), task, method=lw.Diagonal(), validation=lw.sibling())
    assert posterior.trace is not None
    assert posterior.trace.tuner == "crossfit"
    assert posterior.network.model is net
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    plain = lw.fit(net, (x, y), task, method=lw.Diagonal(), prior=1.0)
    copied = copied_recipe(plain.posterior, Rows.of((x, y), None, D))(torch.arange(90), 0)
    loss = nn.functional.mse_loss if task == "regression" else nn.functional.cross_entropy
    with torch.no_grad():
        reached, enough = float(loss(copied(x[:90]), y[:90])), float(loss(net(x), y))
    assert reached <= enough
    assert "the copy has the training loss" not in posterior.summary()
    longer = lw.fit(trained(x, y, 300), (x, y), task, method=lw.Diagonal(), validation=lw.sibling())
    assert "the copy has the training loss" in longer.summary()
    assert not torch.allclose(copied[0].weight, net[0].weight)


def test_a_page_shows_predictions_out_of_fold(tmp_path: Path) -> None:
    result = crossed("classification")
    assert torch.equal(result.targets, labels(inputs())[result.rows])
    page = result.report(tmp_path / "page.html", resamples=20)
    shown = page.numbers["evaluation"]
    assert shown["inputs"] == N
    assert shown["scores"]["nll"]["posterior"]["value"] == pytest.approx(
        -float(result.out_of_fold.log_prob(result.targets).mean()), rel=1e-6
    )


def test_recipes_that_cannot_be_repeated_or_change_data_are_noticed() -> None:
    x = inputs(60)
    y = labels(x)
    unseeded = torch.Generator().manual_seed(0)

    def differs(rows: Tensor, seed: int) -> nn.Module:
        net = trained(x[rows], y[rows], 5)
        net[0].weight.data += torch.randn(40, 3, dtype=D, generator=unseeded)
        return net

    settings: dict[str, Any] = {"folds": 2, "method": lw.Diagonal()}
    said = lw.crossfit(differs, (x, y), "classification", **settings).findings
    assert any("another network when it was called again" in finding for finding in said)
    said = lw.crossfit(recipe(x, y, 5), (x, y), "classification", **settings).findings
    assert not any("called again" in finding for finding in said)

    def standardises(rows: Tensor, seed: int) -> nn.Module:
        x.div_(2.0)
        return trained(x[rows], y[rows], 5)

    with pytest.raises(DataError, match="train_fn changed the data"):
        lw.crossfit(standardises, (x, y), "classification", **settings)


def test_seeds_and_processes_fix_the_result() -> None:
    """Whatever was drawn before, in this process or in others; nothing outside is disturbed."""
    x = inputs(60)
    y = labels(x)
    settings: dict[str, Any] = {"folds": 2, "method": lw.Diagonal()}
    torch.manual_seed(3)
    before = torch.get_rng_state()
    one = lw.crossfit(recipe(x, y, 10), (x, y), "classification", **settings)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(4)
    other = lw.crossfit(recipe(x, y, 10), (x, y), "classification", workers=2, **settings)
    assert_close(one.posterior.predict(x).probs, other.posterior.predict(x).probs)


def test_an_interrupted_call_goes_on(tmp_path: Path) -> None:
    x = inputs(60)
    y = labels(x)
    net, calls = trained(x, y, 10), list[int]()

    def fails_once(rows: Tensor, seed: int) -> nn.Module:
        calls.append(seed)
        if calls == [0, 1]:
            raise OSError("the disk is gone")
        return trained(x[rows], y[rows], 10)

    run = lambda train_fn, **more: lw.crossfit(
        train_fn, (x, more.pop("y", y)), "classification", model=net, folds=3, folder=tmp_path / "folds",
        method=lw.Diagonal(), **more,
    )  # fmt: skip
    with pytest.raises(ModelError, match=r"fold 1: train_fn raised OSError: the disk is gone\. The others are kept in"):
        run(fails_once)
    result = run(fails_once)
    assert calls == [0, 1, 2, 1]
    whole = lw.crossfit(recipe(x, y, 10), (x, y), "classification", model=net, folds=3, method=lw.Diagonal())
    assert_close(result.posterior.predict(x).probs, whole.posterior.predict(x).probs)
    with pytest.raises(DataError, match="other data, rows or seed"):
        run(fails_once, y=1 - y.clamp_max(1))
    with pytest.raises(DataError, match="other data, rows or seed"):
        run(fails_once, seed=1)
    first = next((tmp_path / "folds").glob("fold0*"))
    first.write_bytes(first.read_bytes()[:-9])
    with pytest.raises(FileError, match=r"cannot be read: .* Delete it, and call again: fold 0 is trained again"):
        run(fails_once)
    (tmp_path / "file").touch()
    with pytest.raises(FileError, match="which cannot be made"):
        lw.crossfit(fails_once, (x, y), "classification", model=net, folds=3, folder=tmp_path / "file" / "folds")


def test_a_process_that_ends_names_its_fold_and_the_others_are_kept(tmp_path: Path) -> None:
    x = inputs(60)
    y = labels(x)

    def dies(rows: Tensor, seed: int) -> nn.Module:
        if seed == 1:
            os._exit(3)
        return trained(x[rows], y[rows], 3)

    with pytest.raises(ModelError, match=r"fold 1: the process that trained it ended without a result\. The others"):
        lw.crossfit(
            dies, (x, y), "classification", model=trained(x, y, 3), folds=3, folder=tmp_path, workers=2,
            method=lw.Diagonal(),
        )  # fmt: skip
    assert sorted(path.stem for path in tmp_path.iterdir()) == ["fold0", "fold2"]


def test_a_network_of_other_rows_is_refused_before_it_is_kept(tmp_path: Path) -> None:
    """The one of all rows too: a single sibling has no other to be compared with."""
    x = inputs(60)
    y = labels(x)
    net = trained(x, y, 3)
    settings: dict[str, Any] = {"model": net, "folder": tmp_path / "new" / "folds", "method": lw.Diagonal()}
    with pytest.raises(ModelError, match="the same network for all rows and fold 0"):
        lw.crossfit(lambda rows, seed: net, (x, y), "classification", folds=[(range(40), range(40, 60))], **settings)
    grown = trained(x, y, 3)

    def goes_on(rows: Tensor, seed: int) -> nn.Module:
        nn.functional.cross_entropy(grown(x[rows]), y[rows]).backward()
        torch.optim.SGD(grown.parameters(), 0.1).step()
        return grown

    with pytest.raises(ModelError, match="the same network for fold 0 and fold 1"):
        lw.crossfit(goes_on, (x, y), "classification", folds=2, **settings)
    assert [path.stem for path in (tmp_path / "new" / "folds").iterdir()] == ["fold0"]

    def changes(rows: Tensor, seed: int) -> nn.Module:
        net[0].weight.data += 0.1
        return trained(x[rows], y[rows], 3)

    with pytest.raises(ModelError, match="train_fn changed model, the network trained on all rows"):
        lw.crossfit(changes, (x, y), "classification", model=net, folds=2, method=lw.Diagonal())


def wrong_recipes() -> Iterator[tuple[str, Any, type[Exception], str]]:
    x = inputs(40)
    y = labels(x)
    good = trained(x, y, 3)

    def changes_dtype(rows: Tensor, seed: int) -> nn.Module:
        torch.set_default_dtype(D)
        return trained(x[rows], y[rows], 3)

    def changes_threads(rows: Tensor, seed: int) -> nn.Module:
        torch.set_num_threads(torch.get_num_threads() + 1)
        return trained(x[rows], y[rows], 3)

    def changes_products(rows: Tensor, seed: int) -> nn.Module:
        torch.set_float32_matmul_precision("high")
        return trained(x[rows], y[rows], 3)

    def diverges(rows: Tensor, seed: int) -> nn.Module:
        net = trained(x[rows], y[rows], 3)
        for parameter in net.parameters() if len(rows) < len(x) else ():
            parameter.data[:] = torch.nan if len(parameter) == 3 else parameter.data + seed
        return net

    yield "the same object", lambda rows, seed: good, ModelError, "the same network for fold 0 and fold 1"
    yield "the same weights", lambda rows, seed: copy.deepcopy(good), ModelError, "the same network for fold 0 and"
    yield (
        "training mode",
        lambda rows, seed: trained(x, y, 3).train(),
        ModelError,
        "fold 0: train_fn returned a network in",
    )
    yield (
        "no network",
        lambda rows, seed: None,
        ModelError,
        "fold 0: train_fn returned a NoneType; expected the trained",
    )
    yield "not finite", diverges, DataError, "fold 0: outputs of the network: .* entries are NaN"
    yield "threads", changes_threads, UnsupportedError, "fold 0: train_fn changed number of threads of torch"
    yield "products", changes_products, UnsupportedError, "fold 0: train_fn changed precision of float32 products of"
    yield "another dtype", changes_dtype, UnsupportedError, "fold 0: train_fn changed default dtype of torch"
    yield "not a function", good, UnsupportedError, "train_fn is .*; expected a function"


@pytest.mark.parametrize(("name", "train_fn", "error", "message"), list(wrong_recipes()))
def test_wrong_recipes_are_refused(name: str, train_fn: Any, error: type[Exception], message: str) -> None:
    x = inputs(40)
    with pytest.raises(error, match=message):
        lw.crossfit(train_fn, (x, labels(x)), "classification", folds=2)
    assert torch.get_default_dtype() == torch.float32


def test_a_recipe_that_ignores_its_rows_is_noticed() -> None:
    """A quick one is tried with other rows; of a long one, held-out rows are compared with training rows."""
    x = inputs()
    y = labels(x)
    ignores = lambda rows, seed: trained(x, y)
    settings: dict[str, Any] = {"folds": 4, "method": lw.Diagonal()}
    with pytest.raises(ModelError, match="the same network for other rows with the same seed: it ignores rows"):
        lw.crossfit(ignores, (x, y), "classification", **settings)
    result = lw.crossfit(ignores, (x, y), "classification", workers=2, **settings)
    assert any("if train_fn ignores the rows" in finding for finding in result.findings)
    assert "if train_fn ignores the rows" in result.summary()
    honest = lw.crossfit(recipe(x, y), (x, y), "classification", workers=2, **settings)
    assert not any("ignores the rows" in finding for finding in honest.findings)
    easy = inputs(150, 7)
    said = lw.crossfit(recipe(easy, numbers(easy)), (easy, numbers(easy)), "regression", workers=2, **settings)
    assert said.findings == ()  # some rows are as hard for networks that have seen them


def rows_of(x: Tensor, y: Tensor) -> Rows:
    return Rows.of((x, y), None, D)


def test_folds_have_equal_frequencies_and_keep_repeats_and_groups_together() -> None:
    x = inputs(100)
    y = (torch.arange(100) < 20).long()
    for split in splits_of(rows_of(x, y), 5, None, None, 0):
        assert (len(split.held_out), int(y[split.held_out].sum())) == (20, 4)
        assert sorted([*split.training.tolist(), *split.held_out.tolist()]) == list(range(100))
    doubled = torch.cat([x, x])
    for split in splits_of(rows_of(doubled, y.repeat(2)), 5, None, None, 0):
        assert set((split.held_out % 100).tolist()).isdisjoint((split.training % 100).tolist())
        assert len(split.held_out) == 40
    groups = (torch.arange(100) // 7).tolist()
    for split in splits_of(rows_of(x, y), 5, groups, None, 0):
        assert {groups[i] for i in split.held_out}.isdisjoint(groups[i] for i in split.training)
        assert 10 <= len(split.held_out) <= 30


def test_folds_in_time_are_trained_on_the_past() -> None:
    order = torch.randperm(100, generator=torch.Generator().manual_seed(0)) // 2
    splits = splits_of(rows_of(inputs(100), numbers(inputs(100))), 4, None, order, 0)
    assert len(splits) == 4
    for split in splits:
        assert int(order[split.training].max()) < int(order[split.held_out].min())
    days = [date(2026, 1, 1) + timedelta(days=day) for day in order.tolist()]
    for given in days, np.array(days, "datetime64[ns]"), [day.isoformat() for day in days]:
        same = splits_of(rows_of(inputs(100), numbers(inputs(100))), 4, None, given, 0)
        assert all(torch.equal(a.held_out, b.held_out) for a, b in zip(same, splits, strict=True))


def test_folds_may_be_given() -> None:
    rows = rows_of(inputs(6), labels(inputs(6)))

    class Splitter:
        def split(self, x: Any, y: Any, groups: Any) -> Iterator[Any]:
            assert (len(x), len(y), groups) == (6, 6, None)
            yield [0, 1, 2], [3]

    held_out = lambda folds: [split.held_out.tolist() for split in splits_of(rows, folds, None, None, 0)]
    assert held_out([0, 0, 1, 1, 2, 2]) == [[0, 1], [2, 3], [4, 5]]
    assert held_out(torch.tensor([1, 0, 1, 0, 1, 0])) == [[1, 3, 5], [0, 2, 4]]
    assert held_out([([0, 1], [5]), ([5], [1])]) == [[5], [1]]
    assert held_out(Splitter()) == [[3]]
    assert held_out(KFold(3).split(range(6))) == [[0, 1], [2, 3], [4, 5]]
    assert held_out(TimeSeriesSplit(2)) == [[2, 3], [4, 5]]
    grouped = splits_of(rows, GroupKFold(2), ["a", "b", "b", "a", "a", "b"], None, 0)
    assert sorted(split.held_out.tolist() for split in grouped) == [[0, 3, 4], [1, 2, 5]]


WRONG_FOLDS: list[tuple[Any, str]] = [
    (1, "folds is 1 for 6 rows"), (7, "folds is 7 for 6 rows"), (2.5, "folds is 2.5; expected a number of folds"),
    (True, "folds is True"), ([], "a fold number for each of 6"), ([0, 1], "a fold number for each of 6"),
    ([([0, 1], [1])], "held-out rows among its training rows"), ([([0], [9])], "fold 0 has the held-out row 9"),
    (list("aabbcc"), "expected a fold number for each of 6"), ([([True, False], [1])], "expected .train, test. pairs"),
    ([([0], [1], [2])], "an entry of 3 parts"), ([([0.5], [1])], "expected .train, test. pairs of row numbers"),
    ([([0], [])], "fold 0 has no held-out rows"), ([([0], [1]), ([2], [1])], "row 1 is held out in several folds"),
]  # fmt: skip


@pytest.mark.parametrize(("folds", "message"), WRONG_FOLDS)
def test_wrong_folds_are_refused(folds: Any, message: str) -> None:
    with pytest.raises((DataError, UnsupportedError), match=message):
        splits_of(rows_of(inputs(6), labels(inputs(6))), folds, None, None, 0)


def test_folds_that_break_groups_or_time_are_refused() -> None:
    rows, parted = rows_of(inputs(6), labels(inputs(6))), [0, 0, 0, 1, 1, 1]
    assert len(splits_of(rows, parted, list("aaabbb"), None, 0)) == 2
    assert len(splits_of(rows, TimeSeriesSplit(2), None, range(6), 0)) == 2
    with pytest.raises(DataError, match="group b is on both sides of fold 0; expected the rows of a group in one part"):
        splits_of(rows, parted, list("aabbcc"), None, 0)
    with pytest.raises(DataError, match="group a is on both sides of fold 0"):
        splits_of(rows, 2, list("ababab"), range(6), 0)
    with pytest.raises(DataError, match="fold 0 has training rows that are later than its held-out rows"):
        splits_of(rows, parted, None, range(6), 0)
    with pytest.raises(DataError, match="order has 2 missing values; expected a time for each row"):
        splits_of(rows, 2, None, [0.0, math.nan, 1.0, None, 2.0, 3.0], 0)
    with pytest.raises(DataError, match="order cannot be sorted"):
        splits_of(rows, 2, None, [0, 1, 2, "a", 4, 5], 0)


def test_other_wrong_calls() -> None:
    x = inputs(20)
    y = labels(x)
    fn = recipe(x, y, 1)
    with pytest.raises(DataError, match="groups has 3 entries for 20 rows"):
        lw.crossfit(fn, (x, y), "classification", groups=[1, 2, 3])
    with pytest.raises(DataError, match="2 groups for 5 folds"):
        lw.crossfit(fn, (x, y), "classification", groups=[0, 1] * 10)
    with pytest.raises(DataError, match=r"data is a list of \d+; expected rows that can be taken by number"):
        lw.crossfit(fn, [(x, y)], "classification")
    with pytest.raises(UnsupportedError, match="folder needs model"):
        lw.crossfit(fn, (x, y), "classification", folder="folds")
    with pytest.raises(UnsupportedError, match="combines networks"):
        lw.crossfit(fn, (x, y), "classification", method=lw.baselines.MixtureOfLaplace([trained(x, y, 1)]))


def test_what_is_strange_about_folds_is_said() -> None:
    x = inputs(150)
    y = labels(x)
    near = torch.cat([x, x + 1e-3 * inputs(150, 3)])
    remark = lambda x, y, folds, **more: " ".join(
        split_findings(rows_of(x, y), splits_of(rows_of(x, y), folds, more.get("groups"), None, 0))
    )
    assert "near-copy" in remark(near, y.repeat(2), 5)
    assert remark(near, y.repeat(2), 5, groups=list(range(150)) * 2) == ""
    assert remark(x, y, 5) == ""
    walk = x.cumsum(0)
    assert "Give order=... or groups=..." in remark(walk, numbers(x), 5)
    assert remark(walk[torch.randperm(150, generator=torch.Generator().manual_seed(0))], numbers(x), 5) == ""
    for innocent in (
        x[x[:, 0].argsort()],
        torch.linspace(0, 1, 150)[:, None],
        torch.cartesian_prod(x[:15, 0], x[:10, 1]),
    ):
        assert "order=" not in remark(innocent, numbers(x), 5)
    in_time = splits_of(rows_of(walk, numbers(x)), 5, None, range(150), 0)
    assert not any("order=" in finding for finding in split_findings(rows_of(walk, numbers(x)), in_time))
    assert "100 the result varies" in remark(x[:60], y[:60], 3)
    assert "folds have 10 to 140 rows" in remark(x, y, [0] * 10 + [1] * 140)
    assert "class 1 has no row in the training rows" in remark(x, (torch.arange(150) < 5).long(), [0] * 50 + [1] * 100)
    assert "the frequency of class 0, 1 differs" in remark(x, (torch.arange(150) < 60).long(), [0] * 75 + [1] * 75)


def test_a_class_that_a_network_has_never_seen_is_not_scored() -> None:
    x = inputs(60)
    y = (x[:, 0] > 0).long()
    y[:3] = 2
    numbers = [0] * 30 + [1] * 30
    result = lw.crossfit(recipe(x, y, 10), (x, y), "classification", folds=numbers, method=lw.Diagonal())
    assert result.folds[0].held_out.tolist() == list(range(3, 30))
    assert any("class 2 has no row" in finding for finding in result.findings)


def test_a_dataset_is_read_by_rows() -> None:
    x = inputs(60)
    y = labels(x)
    data = torch.utils.data.TensorDataset(x, y)
    settings: dict[str, Any] = {"folds": 2, "method": lw.Diagonal(), "model": trained(x, y, 10)}
    one = lw.crossfit(recipe(x, y, 10), data, "classification", **settings)
    frame = pa.table({name: column.numpy() for name, column in zip("abc", x.T.contiguous(), strict=True)})
    for pair in (x.numpy(), y.numpy()), (frame, pa.array(y.numpy())):
        other = lw.crossfit(recipe(x, y, 10), pair, "classification", **settings)
        assert_close(one.posterior.predict(x).probs, other.posterior.predict(x).probs)


def test_recipes_of_the_library_and_of_estimators() -> None:
    x = inputs(60)
    y = (x[:, 0] > 0).long()
    net = nn.Linear(3, 2).double()
    make = lambda seed: LapwingClassifier((4,), max_iter=2, random_state=seed)
    recipes: list[Any] = [
        lambda rows, seed: lw.train(net, (x[rows], y[rows]), "classification", recipe=lw.recipes.fixed(epochs=2)).model,
        lambda rows, seed: make(seed).fit(x[rows], y[rows]).posterior_.network.model,
    ]
    for train_fn in recipes:
        result = lw.crossfit(train_fn, (x, y), "classification", folds=2, method=lw.Diagonal())
        assert result.out_of_fold.probs.shape == (60, 2)


@pytest.mark.parametrize("task", LIKELIHOODS)
def test_without_validation_data_the_summary_names_the_sibling_and_its_cost(task: str) -> None:
    x = inputs(60)
    y = LIKELIHOODS[task](x)
    said = lw.fit(trained(x, y, 10), (x, y), task, method=lw.Diagonal()).summary()
    assert "validation=lw.sibling(train_fn) trains a second network" in said
    assert "for 0.8 of the cost of the first training, and a fit" in said
    assert "lw.sibling" not in crossed(task).summary()


def test_predictions_out_of_fold_are_drawn() -> None:
    assert lw.plots.reliability(crossed("classification").evaluate(resamples=20)).get_xlabel() == "confidence"
    result = crossed("regression")
    assert lw.plots.intervals(result.out_of_fold, result.targets).lines
