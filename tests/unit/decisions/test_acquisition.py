"""The next labels: the greedy choice against all subsets, by covariance and by functions, and what is refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import lapwing as lw
from lapwing.decisions.acquisition import (
    _by_covariance,
    _by_functions,
    feature_blocks,
    greedy_information,
    matrix_blocks,
    root_of,
)
from lapwing.networks.jacobians import Footprint
from tests.tolerances import assert_close
from tests.unit.decisions.problems import D, classes, classifier, generator


def greedy(matrix: Tensor, size: int, n: int) -> list[int]:
    """The definition: add the block with the largest determinant, computed anew for every candidate."""
    chosen: list[int] = []
    rows = lambda blocks: torch.cat([torch.arange(b * size, (b + 1) * size) for b in blocks])
    for _ in range(n):

        def gain(block: int) -> float:
            part = rows([*chosen, block])
            return float(torch.logdet(torch.eye(len(part), dtype=D) + matrix[part][:, part]))

        chosen.append(max((b for b in range(len(matrix) // size) if b not in chosen), key=gain))
    return chosen


@pytest.mark.parametrize("size", [1, 3])
def test_the_choice_is_that_of_the_definition(size: int) -> None:
    features = torch.randn(7 * size, 5, dtype=D, generator=generator(1))
    matrix = features @ features.mT
    exact, drawn = matrix_blocks(matrix.reshape(7, size, 7, size)), feature_blocks(features.reshape(7, size, 5))
    assert_close(drawn[0], exact[0])
    assert_close(drawn[1](4), exact[1](4))
    for blocks in (exact, drawn):
        assert greedy_information(*blocks, 5).tolist() == greedy(matrix, size, 5)


def test_classes_are_chosen_by_their_fisher_information() -> None:
    posterior, (x, _) = classifier(), classes(12, generator(2))
    p = posterior.network.model(x).softmax(1)
    fisher = torch.diag_embed(p) - p.unsqueeze(2) * p.unsqueeze(1)
    root = root_of(posterior, posterior.functions(x).mean)
    assert_close(root @ root.mT, fisher.detach())
    joint = posterior.functions(x, joint=True).cov
    matrix = torch.einsum("bck,bcad,adl->bkal", root, joint, root).reshape(24, 24)
    assert posterior.acquire(x, 4).tolist() == greedy(matrix, 2, 4)


def test_numbers_are_chosen_by_covariance_over_noise() -> None:
    x = torch.randn(11, 2, dtype=D, generator=generator(3))
    model = nn.Linear(2, 1).double()
    posterior = lw.fit(model, [(x[:5], x[:5, :1])], lw.Gaussian(noise_std=0.3), method=lw.Full(), prior=1.0)
    matrix = posterior.functions(x, joint=True).cov.reshape(11, 11) / 0.09
    assert posterior.acquire(x, 5).tolist() == greedy(matrix, 1, 5)


def test_noise_of_each_output_is_its_own() -> None:
    x = torch.randn(30, 2, dtype=D, generator=generator(4))
    y = x * torch.tensor([1.0, 9.0], dtype=D) + torch.randn(30, 2, dtype=D, generator=generator(5))
    posterior = lw.fit(nn.Linear(2, 2).double(), [(x, y)], lw.Gaussian(per_output=True), method=lw.Full(), prior=1.0)
    noise = posterior.likelihood.noise_variance
    assert noise is not None
    root = root_of(posterior, posterior.functions(x).mean)
    assert_close(root[7] @ root[7].mT, torch.diag(1 / noise.double()))


def test_a_near_copy_is_not_chosen_twice_in_a_batch() -> None:
    x = torch.tensor([[3.0, 0.0], [3.01, 0.0], [0.0, 2.0], [0.1, 0.1]], dtype=D)
    model = nn.Linear(2, 1).double()
    posterior = lw.fit(model, [(x[3:], x[3:, :1])], lw.Gaussian(noise_std=0.1), method=lw.Full(), prior=1.0)
    assert posterior.acquire(x, 2, by="bald").tolist() == [1, 0]
    assert posterior.acquire(x, 2, by="variance").tolist() == [1, 0]
    assert posterior.acquire(x, 2).tolist() == [1, 2]


def test_functions_choose_like_the_covariance() -> None:
    """The best of 6 inputs by the covariance is among the first by 4000 functions; their gains differ by percents."""
    posterior, (x, _) = classifier(), classes(6, generator(6))
    assert posterior.acquire(x, 1, samples=4000).tolist() == posterior.acquire(x, 1, samples=0).tolist()
    assert sorted(posterior.acquire(x, 6, samples=50).tolist()) == list(range(6))
    exact, drawn = _by_covariance(posterior, x)[0], _by_functions(posterior, x, 4000)[0]
    ratios = drawn.diagonal(dim1=1, dim2=2) / exact.diagonal(dim1=1, dim2=2)
    assert float((ratios - 1).abs().max()) < 5 * (2 / 3999) ** 0.5


def test_bald_and_variance_are_the_largest() -> None:
    posterior, (x, y) = classifier(), classes(40, generator(7))
    information = posterior.predict(x).mutual_information
    assert posterior.acquire(x, 6, by="bald").tolist() == information.argsort(descending=True)[:6].tolist()
    variance = posterior.functions(x).variance.sum(1)
    loader = [(x[:15], y[:15]), (x[15:], y[15:])]
    assert posterior.acquire(loader, 6, by="variance").tolist() == variance.argsort(descending=True)[:6].tolist()


def test_a_loader_has_the_numbers_of_its_rows() -> None:
    posterior, (x, y) = classifier(), classes(40, generator(8))
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), 7)
    assert posterior.acquire(loader, 5).tolist() == posterior.acquire(x, 5).tolist()
    few = posterior.acquire(loader, 5, candidates=6)
    assert few.tolist() == posterior.acquire(x, 5, candidates=6).tolist()
    weight = root_of(posterior, posterior.functions(x).mean).square().sum(2)
    alone = (posterior.functions(x).variance * weight).sum(1).argsort(descending=True)[:6]
    assert set(few.tolist()) <= set(alone.tolist())


def test_candidates_of_a_batch_compete_with_those_before(monkeypatch: pytest.MonkeyPatch) -> None:
    posterior, (x, _) = classifier(), classes(40, generator(8))
    expected = [posterior.acquire(x, 5, candidates=count).tolist() for count in (6, 40)]
    monkeypatch.setattr(Footprint, "batch_size_for", lambda *_: 7)  # so that batches are not joined
    found = [posterior.acquire(list(x.split(7)), 5, candidates=count).tolist() for count in (6, 40)]
    assert found == expected


def test_a_pair_is_one_batch_with_targets() -> None:
    posterior, (x, y) = classifier(), classes(20, generator(11))
    for by in ("batch", "bald"):
        assert posterior.acquire((x, y), 3, by=by).tolist() == posterior.acquire(x, 3, by=by).tolist()


def test_loaders_that_shuffle_are_refused() -> None:
    """Numbers of rows would be those of one pass."""
    data = torch.utils.data.TensorDataset(*classes(20, generator(12)))
    part = lw.samples.Part(data, None, shuffle=True)
    shuffled = torch.utils.data.DataLoader(data, 7, shuffle=True)
    whole = torch.utils.data.DataLoader(data, batch_sampler=torch.utils.data.BatchSampler(shuffled.sampler, 7, False))
    for loader in (shuffled, whole, torch.utils.data.DataLoader(data, 7, sampler=part)):
        with pytest.raises(lw.LapwingError, match=r"the pool is a loader that shuffles.*shuffle=False"):
            classifier().acquire(loader, 3)


def test_refusals() -> None:
    x, _ = classes(3, generator(10))
    with pytest.raises(lw.LapwingError, match="samples is 1; expected an integer of at least 2, or zero, or None"):
        classifier().acquire(x, 2, samples=1)
    with pytest.raises(lw.LapwingError, match="the pool has 3 inputs; expected at least n=4"):
        classifier().acquire(x, 4)
    with pytest.raises(lw.LapwingError, match="the pool has 3 inputs; expected at least n=4"):
        classifier().acquire(x, 4, by="bald")
    with pytest.raises(lw.LapwingError, match="by is 'best'; expected one of batch, bald, variance"):
        classifier().acquire(x, 1, by="best")
    with pytest.raises(lw.LapwingError, match="n is 0; expected an integer of at least 1"):
        classifier().acquire(x, 0)
