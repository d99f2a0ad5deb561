"""The greedy choice against one that evaluates the variance of every candidate anew."""

from __future__ import annotations

import torch
from torch import Tensor

from lapwing.linalg.dense import choose_most_explaining
from tests.tolerances import assert_close

D = torch.float64


def explained(precision: Tensor, gram: Tensor, chosen: list[int]) -> float:
    part = torch.tensor(chosen)
    return float(torch.linalg.solve(precision[part][:, part], gram[part][:, part]).diagonal().sum())


def brute_force(precision: Tensor, gram: Tensor, count: int) -> list[int]:
    chosen: list[int] = []
    for _ in range(count):
        rest = [i for i in range(len(gram)) if i not in chosen]
        values = torch.tensor([explained(precision, gram, [*chosen, i]) for i in rest], dtype=D)
        chosen.append(rest[int(values.argmax())])
    return chosen


def matrices(rows: int, size: int, least: float) -> tuple[Tensor, Tensor]:
    """Λ has another weighting of the rows than the variance, as for a softmax."""
    torch.manual_seed(4)
    j = torch.randn(rows, size, dtype=D) * torch.rand(size, dtype=D)
    j[:, 1::3] = j[:, ::3][:, : j[:, 1::3].shape[1]] + 0.1 * j[:, 1::3]  # nearly the same direction
    weights, added = torch.rand(rows, dtype=D), least + torch.rand(size, dtype=D)
    return j.T @ (weights[:, None] * j) + torch.diag(added), j.T @ j


def test_every_choice_is_that_of_brute_force() -> None:
    for rows, size in ((40, 13), (6, 17)):  # more rows than coordinates, and fewer
        precision, gram = matrices(rows, size, 0.01)
        order = choose_most_explaining(precision, gram, size, 0.01)
        assert order.tolist() == brute_force(precision, gram, size)


def test_those_already_chosen_count() -> None:
    """Two coordinates in the same direction: the second explains little, although it is the second largest alone."""
    j = torch.tensor([[3.0, 2.9, 0.0], [0.0, 0.1, 1.0]], dtype=D)
    gram, added = j.T @ j, torch.tensor([1e-3] * 3, dtype=D)
    noise = torch.diag(torch.tensor([1.0, 0.2], dtype=D))
    precision = j.T @ noise @ j + torch.diag(added)
    alone = gram.diagonal() / precision.diagonal()
    order = choose_most_explaining(precision, gram, 2, 1e-3).tolist()
    assert order == brute_force(precision, gram, 2)
    assert sorted(order) != sorted(alone.topk(2).indices.tolist())


def test_equal_gains_go_to_the_first() -> None:
    eye = torch.eye(5, dtype=D)
    assert choose_most_explaining(2 * eye, eye, 4, 1.0).tolist() == [0, 1, 2, 3]


def test_prior_that_rounding_would_hide() -> None:
    """Coordinates that repeat each other leave a Schur complement far below the rounding of its terms."""
    torch.manual_seed(5)
    j = torch.randn(30, 4, dtype=D).repeat(1, 3) * 1e4
    gram = j.T @ j
    precision = gram + 1e-6 * torch.eye(12, dtype=D)
    order = choose_most_explaining(precision, gram, 12, 1e-6)
    assert sorted(order.tolist()) == list(range(12))
    assert len({i % 4 for i in order[:4].tolist()}) == 4
    assert_close(torch.tensor(explained(precision, gram, order[:4].tolist())), torch.tensor(4.0))
