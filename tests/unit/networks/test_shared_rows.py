"""Parameters that every sample gets a copy of: tokens of a class, position embeddings. No second pass is needed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lapwing as lw
from lapwing.networks.network import Network
from tests.cases import Wrapped
from tests.references import dense
from tests.tolerances import assert_close

D = torch.float64
T, WIDTH = 4, 3


def after(m: Any, h: Tensor) -> Tensor:
    """Mix the positions, so that no sample has a gradient of zero anywhere."""
    return m.head(torch.tanh(h + h.mean(1, keepdim=True)).flatten(1))


def with_class_token(m: Any, x: Tensor) -> Tensor:
    h = torch.cat([m.token.expand(len(x), -1, -1), m.embed(x)], 1) + m.position
    return m.last(torch.tanh(h + h.mean(1, keepdim=True))[:, 0])


def positions(shape: Callable[[Tensor], Tensor]) -> Callable[[Any, Tensor], Tensor]:
    return lambda m, x: after(m, m.embed(x) + shape(m.table(torch.arange(T))))


def expanded_positions(m: Any, x: Tensor) -> Tensor:
    return after(m, m.embed(x) + m.table(torch.arange(T)).expand(len(x), -1, -1))


RUNS: dict[str, tuple[Callable[[Any, Tensor], Tensor], str]] = {
    "class token": (with_class_token, "dense"),
    "positions": (positions(lambda h: h), "columns"),
    "positions of one row": (positions(lambda h: h.unsqueeze(0)), "columns"),
    "expanded positions": (expanded_positions, "columns"),
    "positions of several": (lambda m, x: after(m, m.table(torch.tensor([2, 0, 2, 5])) + m.embed(x)), "columns"),
    "with padding": (lambda m, x: after(m, m.padded(torch.tensor([2, 0, 1, 5])) + m.embed(x)), "columns"),
    "taken twice": (lambda m, x: after(m, m.embed(x) * (h := m.table(torch.arange(T))) + h), "opaque"),
    "multiplied": (lambda m, x: after(m, m.embed(x) * m.table(torch.arange(T))), "opaque"),
    "through a layer": (lambda m, x: after(m, m.embed(x) + m.deep(m.table(torch.arange(T)))), "opaque"),
}  # fmt: skip


def built(run: Callable[[Any, Tensor], Tensor]) -> nn.Module:
    torch.manual_seed(0)
    parts = {"embed": nn.Linear(2, WIDTH), "head": nn.Linear(T * WIDTH, 2), "last": nn.Linear(WIDTH, 2),
             "table": nn.Embedding(6, WIDTH), "padded": nn.Embedding(6, WIDTH, padding_idx=2),
             "deep": nn.Linear(WIDTH, WIDTH)}  # fmt: skip
    model = Wrapped(run, **parts)
    model.token, model.position = nn.Parameter(torch.randn(1, 1, WIDTH)), nn.Parameter(torch.randn(1, T + 1, WIDTH))
    return model.double().eval()


@pytest.mark.parametrize("name", RUNS)
def test_their_jacobian_and_how_they_are_kept(name: str) -> None:
    run, kind = RUNS[name]
    model, x = built(run), torch.randn(5, T, 2, dtype=D)
    network = Network.build(model, x)
    kinds = {block.weight: block.kind for block in network.layout if block.why != "not used by the network"}
    kept = {weight: kinds[weight] for weight in ("token", "table.weight", "padded.weight") if weight in kinds}
    assert list(kept.values()) == [kind]
    for inputs in (x, x[:1], x[:T]):
        assert_close(network.linearise(inputs).jacobians().whole(), dense.jacobian(model, inputs, len(inputs)))


def test_a_lookup_of_positions_has_its_counts() -> None:
    """Every sample looks up every position once; the output factor is that of the gradients at the sum."""
    model, x, y = built(RUNS["positions"][0]), torch.randn(5, T, 2, dtype=D), torch.randn(5, 2, dtype=D)
    posterior = lw.fit(model, [(x[:2], y[:2]), (x[2:], y[2:])], lw.Gaussian(noise_std=1.0), prior=1.0)
    pairs = zip(posterior.network.layout, posterior.posterior.curvature.blocks, strict=True)
    table = {block.weight: curvature for block, curvature in pairs}["table.weight"]
    assert table.inp.values.tolist() == [[5.0] * T + [0.0, 0.0]]
    assert table.rows == 5 * T
    bases = torch.eye(2, dtype=D)
    total = torch.zeros(WIDTH, WIDTH, dtype=D)
    for sample in x:
        for seed in bases:
            h = (model.embed(sample[None]) + model.table(torch.arange(T))).detach().requires_grad_()
            (g,) = torch.autograd.grad((after(model, h)[0] * seed).sum(), h)
            total += g[0].T @ g[0]
    assert_close(table.out.dense()[0], total)
