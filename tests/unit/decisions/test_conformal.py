"""Conformal sets and intervals: their definitions, their coverage over draws of data, and what is refused."""

from __future__ import annotations

import math
from functools import cache

import pytest
import torch
from torch import Tensor, nn

import lapwing as lw
from lapwing.decisions.conformal import class_scores, conformal_quantile, conformal_rank, row_shares
from tests.tolerances import assert_close, assert_within
from tests.unit.decisions.problems import D, classes, classifier, generator, numbers, regressor

DRAWS = 200
COUNT, LEVEL = 39, 0.9  # (39 + 1) 0.9 is a whole number, so that the coverage is exactly the level


@pytest.mark.parametrize("score", ["adaptive", "threshold"])
def test_sets_cover_labels_at_the_level(score: str) -> None:
    shares, draws = [], generator(1)
    for seed in range(DRAWS):
        sets = classifier().conformal([classes(COUNT, draws)], LEVEL, score=score, seed=seed)
        shares.append(sets.coverage([classes(60, draws)]).share)
    assert_within(torch.tensor(shares, dtype=D), torch.tensor(LEVEL, dtype=D), 4)


def test_intervals_cover_numbers_at_the_level() -> None:
    """Those of constant width are in the test of groups."""
    shares, draws = [], generator(2)
    for _ in range(DRAWS):
        intervals = regressor().conformal([numbers(COUNT, draws)], LEVEL)
        shares.append(intervals.coverage([numbers(60, draws)]).share)
    assert_within(torch.tensor(shares, dtype=D), torch.tensor(LEVEL, dtype=D), 4)


def noisy(x: Tensor) -> Tensor:
    return (x[:, 0].abs() > 0.8).long()


def test_every_group_is_covered_at_the_level() -> None:
    """With one width for all, the group with little noise is covered too often and the other too rarely."""
    draws, apart = generator(3), []
    for _ in range(DRAWS):
        calibration, test = numbers(180, draws), numbers(150, draws)
        grouped = regressor().conformal([calibration], LEVEL, score="constant", groups=noisy)
        shares = grouped.coverage([test]).by_group
        apart.append([shares[0], shares[1]])
    means, error = torch.tensor(apart, dtype=D).mean(0), torch.tensor(apart, dtype=D).std(0) / DRAWS**0.5
    # At least the level, and at most 1/(n + 1) more, for groups of random size: about 50 at least.
    assert bool((means >= LEVEL - 4 * error).all())
    assert bool((means <= LEVEL + 1 / 50 + 4 * error).all())
    calibration, (x, y) = numbers(2000, draws), numbers(2000, draws)
    low, high = regressor().conformal([calibration], LEVEL, score="constant").predict(x)
    inside = ((low <= y) & (y <= high)).double()[:, 0]
    assert float(inside[noisy(x) == 0].mean()) > 0.95
    assert float(inside[noisy(x) == 1].mean()) < 0.85


def test_scaled_intervals_are_narrower_where_noise_varies() -> None:
    draws, data = generator(4), [numbers(2000, generator(5))]
    calibration = [numbers(500, draws)]
    scaled, constant = (
        regressor().conformal(calibration, LEVEL, score=s).coverage(data) for s in ("scaled", "constant")
    )
    assert scaled.size < 0.9 * constant.size
    assert scaled.error == pytest.approx(math.sqrt(scaled.share * (1 - scaled.share) / 2000))


def test_the_quantile_is_the_rank_of_the_definition() -> None:
    scores = torch.randn(57, 3, dtype=D, generator=generator(6))
    for level in (0.5, 0.9, 0.95):
        rank = math.ceil(round(58 * level, 9))
        assert conformal_rank(57, level) == rank
        expected = torch.stack([torch.kthvalue(column, rank).values for column in scores.unbind(1)])
        assert_close(conformal_quantile(scores, level), expected)
    assert conformal_rank(19, 0.9) == 18  # 20 · 0.9 is 18.000000000000004 if the level is not read as a decimal


def test_adaptive_scores_by_hand() -> None:
    probs = torch.tensor([[0.2, 0.7, 0.1]], dtype=D)
    share = torch.rand(1, 1, dtype=D, generator=generator(7))
    expected = torch.tensor([[0.7, 0.0, 0.9]], dtype=D) + share * probs
    assert_close(class_scores("adaptive", probs, share), expected)
    assert_close(class_scores("threshold", probs, share), 1 - probs)


def test_shares_are_uniform_and_belong_to_the_row() -> None:
    probs = torch.randn(4000, 3, dtype=D, generator=generator(12)).mul(4).softmax(1)
    shares = row_shares(probs, 0)
    ranks = shares.flatten().sort().values - (torch.arange(4000, dtype=D) + 0.5) / 4000
    assert ranks.abs().max() < 1.95 / 4000**0.5  # Kolmogorov's statistic, at a probability of 0.001
    assert torch.equal(row_shares(probs[17:18], 0), shares[17:18])
    assert torch.corrcoef(torch.cat([shares, row_shares(probs, 1)], 1).T)[0, 1].abs() < 4 / 4000**0.5
    sure = torch.stack([torch.linspace(10, 30, 500, dtype=D), torch.zeros(500, dtype=D)], 1).softmax(1)
    assert len(row_shares(sure, 0).unique()) > 250  # probabilities that round to one still differ


def test_sets_do_not_depend_on_the_batch() -> None:
    x, _ = classes(40, generator(13))
    sets = classifier().conformal([classes(COUNT, generator(8))], LEVEL, seed=14)
    one_by_one = torch.cat([sets.predict(row[None]).members for row in x])
    assert (one_by_one == sets.predict(x).members).all(1).double().mean() > 0.9  # but for digits at an edge


def test_sets_and_intervals_by_hand() -> None:
    calibration, (x, _) = classes(COUNT, generator(8)), classes(7, generator(9))
    posterior = classifier()
    sets = posterior.conformal([calibration], LEVEL, score="threshold")
    own = 1 - posterior.predict(calibration[0]).probs.gather(1, calibration[1][:, None])
    limit = own.flatten().sort().values[35]
    assert torch.equal(sets.predict(x).members, 1 - posterior.predict(x).probs <= limit)
    assert sets.predict(x).labels == [row.nonzero().flatten().tolist() for row in sets.predict(x).members]
    assert sets.predict(x).numpy().shape == (7, 3)
    data, (x, _) = numbers(COUNT, generator(10)), numbers(7, generator(11))
    low, high = regressor().conformal([data], LEVEL).predict(x)
    p, new = regressor().predict(data[0]), regressor().predict(x)
    half = (((data[1] - p.mean).abs() / p.std).flatten().sort().values[35]) * new.std
    assert_close(low, new.mean - half)
    assert_close(high, new.mean + half)


def test_a_loader_that_shuffles_gives_the_same_sets() -> None:
    """Targets are read in the same pass as inputs."""
    x, y = classes(COUNT, generator(12))
    shuffled = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), 8, shuffle=True)
    one, other = (classifier().conformal(data, LEVEL, score="threshold") for data in ([(x, y)], shuffled))
    assert_close(one.quantiles[None], other.quantiles[None])


def test_several_outputs_are_each_covered() -> None:
    x = torch.randn(400, 2, dtype=D, generator=generator(13))
    y = torch.cat([x[:, :1], 20 * x[:, 1:]], 1) + torch.randn(400, 2, dtype=D, generator=generator(14))
    model = nn.Linear(2, 2).double()
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[1.0, 0.0], [0.0, 18.0]], dtype=D))
        model.bias.zero_()
    posterior = lw.fit(model, [(x[:50], y[:50])], lw.Gaussian(1.0), method=lw.Full(), prior=1.0)
    low, high = posterior.conformal([(x[50:250], y[50:250])], LEVEL).predict(x[250:])
    share = ((low <= y[250:]) & (y[250:] <= high)).double().mean(0)
    # A beta distribution of the coverage given 200 calibration data, and a binomial one of 150 test data.
    assert bool(((share - LEVEL).abs() <= 4 * (0.09 / 200 + 0.09 / 150) ** 0.5).all())


def test_one_binary_label_has_sets_of_two_classes() -> None:
    x, y = classes(200, generator(15))
    model = nn.Linear(2, 1).double()
    posterior = lw.fit(model, [(x, (y == 0).double())], lw.Bernoulli(), method=lw.Full(), prior=1.0)
    new, labels = classes(200, generator(16))
    assert posterior.conformal([(new, (labels == 0).double())], LEVEL).predict(x[:5]).members.shape == (5, 2)


@cache
def with_unknown() -> lw.Fitted:
    """The classifier with 255 as the mark of unknown labels."""
    likelihood = lw.Categorical(ignore_index=255)
    return lw.fit(classifier().network.model, [classes(40, generator(90))], likelihood, method=lw.Full(), prior=1.0)


def test_ignored_labels_are_left_out_of_calibration_groups_and_coverage() -> None:
    (x, y), (new, labels) = classes(60, generator(17)), classes(50, generator(18))
    y[::7], labels[3:40:5] = 255, 255
    kept, known = y != 255, labels != 255
    whole = with_unknown().conformal([(x, y)], 0.8, groups=noisy(x), score="threshold")
    part = with_unknown().conformal([(x[kept], y[kept])], 0.8, groups=noisy, score="threshold")
    assert whole.count == int(kept.sum())
    for group in (0, 1):
        assert_close(whole.quantiles[group], part.quantiles[group])
    batches = [(new[:20], labels[:20]), (new[20:], labels[20:])]
    inside = part.predict(new).members[known].gather(1, labels[known].unsqueeze(1)).double().flatten()
    expected = {group: float(inside[noisy(new)[known] == group].mean()) for group in (0, 1)}
    for found in (part.coverage(batches), whole.coverage(batches, groups=noisy(new))):
        assert found.by_group == pytest.approx(expected)
        assert (found.share, found.count) == (pytest.approx(float(inside.mean())), int(known.sum()))
    with pytest.raises(lw.LapwingError, match="groups is None; expected the group number of each input"):
        whole.coverage(batches)
    with pytest.raises(lw.LapwingError, match=r"groups have the shape \(49,\), and the data have more rows"):
        whole.coverage(batches, groups=noisy(new)[:-1])
    with pytest.raises(lw.LapwingError, match=r"groups have the shape \(51,\).*expected \(50,\) whole numbers"):
        whole.coverage(batches, groups=torch.cat([noisy(new), noisy(new[:1])]))


def test_group_functions_see_tensors_of_every_batch() -> None:
    """Of a loader that shuffles, inputs and groups are of the same pass."""
    (x, y), (new, _) = numbers(60, generator(19)), numbers(13, generator(20))
    intervals = regressor().conformal([(x, y)], 0.8, groups=noisy)
    expected = intervals.predict(new)
    in_batches = [(new[:5], new[:5, :1]), (new[5:], new[5:, :1])]
    for given in (in_batches, iter(in_batches), new.numpy()):
        for end, other in zip(intervals.predict(given), expected, strict=True):
            assert_close(end, other)
    sets = classifier().conformal([classes(60, generator(21))], 0.8, groups=noisy, score="threshold")
    assert torch.equal(sets.predict([new[:5], new[5:]]).members, sets.predict(new).members)


def test_refusals() -> None:
    data = [classes(8, generator(16))]
    with pytest.raises(lw.LapwingError, match=r"8 calibration data; expected at least 9 for the level 0\.9"):
        classifier().conformal(data, 0.9)
    with pytest.raises(lw.LapwingError, match=r"expected at least 19 for the level 0\.95"):
        classifier().conformal(data, 0.95)
    with pytest.raises(lw.LapwingError, match="score is 'scaled'; expected one of adaptive, threshold"):
        classifier().conformal(data, 0.8, score="scaled")
    with pytest.raises(lw.LapwingError, match=r"level is 1\.5; expected a probability"):
        classifier().conformal(data, 1.5)
    with pytest.raises(lw.LapwingError, match=r"in group 1; expected at least 4 for the level 0.8"):
        classifier().conformal(data, 0.8, groups=torch.tensor([0, 0, 0, 0, 0, 0, 1, 1]))
    with pytest.raises(lw.LapwingError, match=r"groups have the shape \(3,\)"):
        classifier().conformal(data, 0.8, groups=torch.tensor([0, 0, 1]))
    grouped = classifier().conformal(data, 0.5, groups=torch.tensor([0, 0, 0, 0, 1, 1, 1, 1]))
    with pytest.raises(lw.LapwingError, match="groups is None; expected the group number of each input"):
        grouped.predict(data[0][0])
    with pytest.raises(lw.LapwingError, match="group 7, which no calibration datum has; expected one of 0, 1"):
        grouped.predict(data[0][0], groups=torch.full((8,), 7))
    assert grouped.predict(data[0][0], groups=torch.ones(8, dtype=torch.long)).members.shape == (8, 3)
