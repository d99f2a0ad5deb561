"""The named networks as inference problems: data in unequal batches, targets, and their dense references."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

import lapwing as lw
from tests.cases import Case
from tests.references import dense

SIZES = (3, 1, 2)
TOTAL = sum(SIZES)


def likelihood(case: Case) -> Any:
    return lw.Categorical() if case.outputs[-1] > 1 else lw.Bernoulli()


def targets(case: Case, size: int, seed: int = 9) -> Tensor:
    """Class numbers (B,) or (B, T); labels for a single output."""
    gen = torch.Generator().manual_seed(seed)
    classes = max(case.outputs[-1], 2)
    return torch.randint(0, classes, (size, *case.outputs[:-1]), generator=gen)


def rows(tree: Any, part: Any) -> Any:
    """Some samples of a batch."""
    if isinstance(tree, Tensor):
        return tree[part]
    if isinstance(tree, Mapping):
        return {key: rows(value, part) for key, value in tree.items()}
    return tuple(rows(value, part) for value in tree)


def split(inputs: Any, y: Tensor, sizes: tuple[int, ...]) -> list[tuple[Any, Tensor]]:
    ends = torch.tensor((0, *sizes)).cumsum(0).tolist()
    return [(rows(inputs, slice(a, b)), y[a:b]) for a, b in pairwise(ends)]


def batches(case: Case, sizes: tuple[int, ...] = SIZES, dtype: torch.dtype = torch.float64) -> list[Any]:
    total = sum(sizes)
    return split(case.batch(total, dtype), targets(case, total), sizes)


def numbers(case: Case, size: int = TOTAL, seed: int = 3) -> Tensor:
    """Targets of a regression that do not depend on the inputs, (B, C) or (B, T, C)."""
    return torch.randn(size, *case.outputs, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def number_batches(case: Case, dtype: torch.dtype = torch.float64) -> list[Any]:
    return split(case.batch(TOTAL, dtype), numbers(case).to(dtype), SIZES)


def fit(
    case: Case, method: Any, model: nn.Module | None = None, dtype: torch.dtype = torch.float64, **options: Any
) -> lw.Fitted:
    """A fit to the batches of a named network."""
    given = case.build(dtype) if model is None else model
    return lw.fit(given, batches(case, dtype=dtype), likelihood(case), method=method, **options)


def output_hessian(case: Case, f: Tensor) -> Tensor:
    """(N, C, C) with every token a datum."""
    f = f.reshape(-1, f.shape[-1])
    return dense.softmax_hessian(f) if case.outputs[-1] > 1 else dense.sigmoid_hessian(f)


def dense_ggn(case: Case, model: nn.Module, size: int = TOTAL) -> tuple[Tensor, Tensor]:
    """(Jacobian of every datum (N, C, P), GGN (P, P)) by brute force."""
    inputs = case.batch(size)
    jac = dense.by_datum(dense.jacobian(model, inputs, size), case.outputs[-1])
    with torch.no_grad():
        f = torch.cat([dense.output(model, dense.one(inputs, b)) for b in range(size)])
    return jac, dense.ggn(jac, output_hessian(case, f))


def descend(model: nn.Module, loss: Callable[[nn.Module], Tensor], steps: int, rate: float, **options: Any) -> None:
    """Take steps of Adam on a loss of the network."""
    optimiser = torch.optim.Adam(model.parameters(), rate, **options)
    with torch.enable_grad():
        for _ in range(steps):
            optimiser.zero_grad()
            loss(model).backward()
            optimiser.step()
    model.zero_grad(set_to_none=True)


def state(model: nn.Module) -> dict[str, Any]:
    """Everything about a model that a call must leave as it was."""
    snapshot: dict[str, Any] = {}
    for name, t in [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]:
        snapshot["value " + name] = t.detach().clone()
        snapshot["same tensor " + name] = id(t)
        snapshot["version " + name] = t._version
        snapshot["storage " + name] = t.data_ptr()
        snapshot["flags " + name] = (t.requires_grad, t.grad is None, t.is_leaf, t.dtype)
    for name, module in model.named_modules():
        snapshot["mode " + name] = module.training
        snapshot["keys " + name] = sorted(module.__dict__)
        for kind in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks",
                     "_state_dict_hooks", "_load_state_dict_pre_hooks"):  # fmt: skip
            snapshot[f"{kind} {name}"] = list(getattr(module, kind))
    return snapshot


def assert_unchanged(before: Mapping[str, Any], model: nn.Module) -> None:
    after = state(model)
    assert before.keys() == after.keys()
    for key, value in before.items():
        same = torch.equal(value, after[key]) if isinstance(value, Tensor) else value == after[key]
        assert same, f"{key}: {value} became {after[key]}"


def unchanged(model: nn.Module, run: Callable[[], Any]) -> Any:
    """The result of a call that must leave the model bit for bit as it was."""
    before = state(model)
    try:
        return run()
    finally:
        assert_unchanged(before, model)


class InContext(nn.Module):
    """x (B, 3) with one set (K, 3) for all samples of a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 6), nn.Linear(6, 1)

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        output: Tensor = self.b(torch.tanh(self.a(x + context.sum(0))))
        return output
