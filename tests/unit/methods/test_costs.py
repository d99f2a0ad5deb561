"""What methods say they take against what they take: multiplications by a counter, bytes of what is stored."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import lapwing as lw
from lapwing.data.batches import Data
from lapwing.methods.base import Cost, Workload, workload_of
from lapwing.problem import Problem
from lapwing.registry import METHODS
from lapwing.runtime.states import State

CPU = torch.device("cpu")
aten = torch.ops.aten
# Products in place, and solves with a triangle, which PyTorch's counter leaves out.
MORE: dict[Any, Callable[..., int]] = {
    aten.addmm_: lambda _, a, b, *rest, **options: 2 * a[0] * a[1] * b[1],
    aten.baddbmm_: lambda _, a, b, *rest, **options: 2 * math.prod(a) * b[2],
    aten.linalg_solve_triangular: lambda a, b, *rest, **options: math.prod(a) * b[-1],
}


class Tokens(nn.Module):
    """An embedding, a layer that all tokens share, and a head on their mean."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.layer, self.head = nn.Embedding(20, 6), nn.Linear(6, 10), nn.Linear(10, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(self.table(x)).tanh().mean(1))


NETWORKS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor], str | None]] = {
    "mlp": (lambda: nn.Sequential(nn.Linear(12, 20), nn.Tanh(), nn.Linear(20, 16), nn.Tanh(), nn.Linear(16, 4)),
            lambda: torch.randn(40, 12), None),
    "convolution": (lambda: nn.Sequential(nn.Conv2d(2, 6, 3), nn.Tanh(), nn.Conv2d(6, 8, 3), nn.Tanh(), nn.Flatten(),
                                          nn.Linear(128, 4)), lambda: torch.randn(24, 2, 8, 8), None),
    "tokens": (Tokens, lambda: torch.randint(0, 20, (24, 5)), None),
    "drawn labels": (lambda: nn.Sequential(nn.Linear(12, 20), nn.Tanh(), nn.Linear(20, 70)),
                     lambda: torch.randn(24, 12), None),
    "drawn functions": (lambda: nn.Sequential(nn.Linear(12, 20), nn.Tanh(), nn.Linear(20, 260)),
                        lambda: torch.randn(24, 12), None),
    "last layer": (lambda: nn.Sequential(nn.Linear(12, 20), nn.Tanh(), nn.Linear(20, 5)),
                   lambda: torch.randn(24, 12), "last_layer"),
}  # fmt: skip
BY_LAYERS = ("diagonal", "kron", "ekron", "map_only")
COUNTED = [(name, method) for name in NETWORKS for method in BY_LAYERS]
COUNTED += [(name, method) for name in ("mlp", "convolution", "last layer")
            for method in ("full", "low_rank", "kernel_space", "ella", "sampled")]  # fmt: skip


@lru_cache
def setting(name: str) -> tuple[Problem, Tensor, Tensor, Workload]:
    torch.manual_seed(0)
    make, draw, weights = NETWORKS[name]
    model, x = make().eval(), draw()
    y = torch.randint(0, model(x[:1]).shape[-1], (len(x),))
    fitted = lw.fit(model, [(x, y)], "classification", method="map_only", prior=1.0, weights=weights)
    problem = fitted.posterior.problem
    return problem, x, y, workload_of(problem.network, x)


def multiplications(call: Callable[[], Any]) -> tuple[float, Any]:
    with FlopCounterMode(display=False, custom_mapping=MORE) as count:
        result = call()
    return count.get_total_flops() / 2, result


def within_two(estimate: float, counted: float) -> bool:
    return 0.5 * counted <= estimate <= 2 * counted


@pytest.mark.parametrize(("name", "method"), COUNTED)
def test_multiplications(name: str, method: str) -> None:
    """The fit, with what its first prediction computes once, and every further prediction."""
    problem, x, y, workload = setting(name)
    cost: Cost = METHODS[method]().cost(workload)
    fit, posterior = multiplications(lambda: METHODS[method]().fit(problem, Data([(x, y)], CPU)))
    first, _ = multiplications(lambda: posterior.predict(x).probs)
    later, _ = multiplications(lambda: posterior.predict(x).probs)
    assert within_two((cost.fit + cost.once).multiplications, fit + first - later)
    assert within_two(len(x) * cost.predict.multiplications, later)


def tensors(state: State) -> Iterator[Tensor]:
    yield from state.tensors.values()
    for part in state.parts.values():
        yield from tensors(part)


@pytest.mark.parametrize(("name", "method"), [*COUNTED, ("mlp", "valla")])
def test_stored_bytes(name: str, method: str) -> None:
    """All but a few numbers for each block, such as the number of its rows.

    A softmax has one column less than outputs, so the kernel has fewer directions than rows.
    """
    problem, x, y, workload = setting(name)
    settings: Any = {"steps": 1} if method == "valla" else {}
    posterior: Any = METHODS[method](**settings).fit(problem, Data([(x, y)], CPU))
    stored, cost = sum(t.nbytes for t in tensors(posterior.state())), METHODS[method](**settings).cost(workload)
    few = 16 * (1 + len(workload.blocks))
    if method == "kernel_space":
        assert 0.7 * cost.stored <= stored <= cost.stored + few
    else:
        assert cost.stored - few <= stored <= cost.stored + few


def test_rows_of_wide_layers_are_stored_in_the_dtype_of_the_network() -> None:
    """600 inputs and 40 rows of them: the factor is kept as rows, 40 x 601 numbers of four bytes."""
    torch.manual_seed(0)
    x, y = torch.randn(40, 600), torch.randint(0, 3, (40,))
    fitted = lw.fit(nn.Linear(600, 3), [(x, y)], "classification", method="kron", prior=1.0)
    stored = sum(t.nbytes for t in tensors(fitted.posterior.state()))
    cost = lw.Kron().cost(workload_of(fitted.network, x))
    assert abs(cost.stored - stored) <= 32
    assert cost.stored == 4 * 40 * 601 + 8 * 3**2 + 4 * 1803


def test_work_adds_up() -> None:
    from lapwing.methods.base import CUBE, Work

    work = 2 * Work(1, 2, 3) + Work(products=1)
    assert work == Work(2, 5, 6)
    assert work.total == 2 + 5 + 6 * CUBE
    assert work.multiplications == 7
