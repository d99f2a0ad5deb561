"""Inputs that all samples share beside those with a row for each, told apart also where their rows are as many."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lapwing as lw
from lapwing.data.batches import Data
from lapwing.data.streams import shuffle_batches
from lapwing.methods.hfl import push_of_average
from lapwing.methods.hfl_response import Objective
from lapwing.networks.jacobians import Footprint
from lapwing.networks.network import Network
from lapwing.tuners.base import evidence_bound
from tests import problems
from tests.cases import BY_NAME, Wrapped
from tests.references import dense
from tests.tolerances import assert_close

D = torch.float64
ROWS = 6  # of the context
GIVEN = lw.Gaussian(noise_std=0.3)
CPU = torch.device("cpu")

POOLS: dict[str, Callable[[Any, Tensor, Tensor], Tensor]] = {
    "sum": lambda m, h, c: h + m.c(c).sum(0),
    "mean": lambda m, h, c: h + m.c(c).mean(0),
    "attention": lambda m, h, c: h + torch.softmax(h @ m.c(c).mT, -1) @ m.c(c),
    "every pair": lambda m, h, c: (h[:, None] + m.c(c)[None]).tanh().mean(1),
    "first rows": lambda m, h, c: h + m.c(c[:2]).sum(0),
    "closed gate": lambda m, h, c: h + m.gate * m.c(c).sum(0),
    "no weights": lambda m, h, c: h + c.sum(),
    "tokens": lambda m, h, c: h + m.e(c).mean(0),
    "in a loop": lambda m, h, c: h + m.cell(c[None])[0].sum(1),  # no batching rule
}
PARTS: dict[str, Callable[[], dict[str, Any]]] = {
    "closed gate": lambda: {"c": nn.Linear(3, 4), "gate": nn.Parameter(torch.zeros(1))},
    "no weights": dict,
    "tokens": lambda: {"e": nn.Embedding(9, 4)},
    "in a loop": lambda: {"cell": nn.GRU(3, 4, batch_first=True)},
}


def pooling(how: str) -> nn.Module:
    torch.manual_seed(0)
    parts = PARTS.get(how, lambda: {"c": nn.Linear(3, 4)})()
    run = lambda m, x, context: m.b(torch.tanh(POOLS[how](m, m.a(x), context)))
    return Wrapped(run, a=nn.Linear(2, 4), b=nn.Linear(4, 2), **parts).double()


def numbers(how: str, count: int = 16) -> tuple[Tensor, Tensor, Tensor]:
    """x, y and the context."""
    torch.manual_seed(1)
    x, y = torch.randn(count, 2, dtype=D), torch.randn(count, 2, dtype=D)
    return x, y, torch.randint(0, 9, (ROWS,)) if how == "tokens" else 0.3 * torch.randn(ROWS, 3, dtype=D)


def reference(model: nn.Module, x: Tensor, context: Tensor) -> Tensor:
    """The Jacobian with the context as a part of the model."""
    return dense.jacobian(Wrapped(lambda m, x: m.net(x, context), net=model), x, len(x))


@pytest.mark.parametrize("how", POOLS)
def test_jacobians_of_a_batch_with_as_many_rows_as_the_context(how: str) -> None:
    model, (x, _, context) = pooling(how), numbers(how)
    network = Network.build(model, (x[:4], context))
    for batch in (1, 2, ROWS, ROWS + 1):
        jacobian = network.linearise((x[:batch], context)).jacobians().whole()
        assert_close(jacobian, reference(model, x[:batch], context))


@pytest.mark.parametrize("how", ["sum", "tokens", "no weights"])
@pytest.mark.parametrize("form", [lambda x, c: (x, c), lambda x, c: (c, x), lambda x, c: {"context": c, "x": x}])
def test_samples_of_a_batch(how: str, form: Callable[..., Any]) -> None:
    """Whatever the order: x is cut and the context is not."""
    net, (x, _, context) = pooling(how), numbers(how)
    swap = isinstance(form(x, context), tuple) and form(x, context)[0] is context
    model = Wrapped(lambda m, c, x: m.net(x, c), net=net) if swap else net
    network = Network.build(model, form(x[:4], context))
    for batch in (1, 4, ROWS):
        inputs = form(x[:batch], context)
        assert network.count(inputs) == batch
        part = network.take(inputs, slice(0, 1))
        assert_close(network(part), net(x[:1], context))


@pytest.mark.parametrize("how", ["sum", "tokens", "no weights"])
def test_chunks_of_a_batch_with_as_many_rows_as_the_context(how: str) -> None:
    model, (x, _, context) = pooling(how), numbers(how)
    network = Network.build(model, (x[:4], context))
    parts = [t.f for _, t in network.tangents((x[:ROWS], context), most=4)]
    assert [len(part) for part in parts] == [3, 3]
    assert_close(torch.cat(parts), model(x[:ROWS], context))


METHODS: dict[str, Any] = {
    "full": lw.Full(),
    "kernel": lw.KernelSpace(),
    "valla": lw.VaLLA(100),
    "ella": lw.ELLA(100, 100, residual=True),
    "diagonal": lw.Diagonal(),
    "as many points": lw.VaLLA(ROWS, optimiser="none", start="random"),
}


@pytest.mark.parametrize("how", ["sum", "attention", "tokens", "no weights"])
@pytest.mark.parametrize("name", METHODS)
def test_fits_and_predictions(name: str, how: str) -> None:
    """A batch, in the fit or new, that has as many rows as the context is a batch like others."""
    model, (x, y, context) = pooling(how), numbers(how)
    cut = lambda sizes: [((a, context), b) for a, b in problems.split(x, y, sizes)]
    fit = lambda sizes: lw.fit(model, cut(sizes), GIVEN, method=METHODS[name], prior=1.0)
    uneven, other = fit((7, ROWS, 3)), fit((7, 9))
    each = torch.cat([other.functions((x[i : i + 1], context)).variance for i in range(len(x))])
    for batch in (1, ROWS - 1, ROWS, len(x)):
        for posterior in (uneven, other):
            assert_close(posterior.functions((x[:batch], context)).variance, each[:batch], 1e-8)
    assert_close(uneven.log_evidence(), other.log_evidence(), 1e-8)


def test_blocks_of_data_and_functions_of_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both are taken in runs of samples."""
    model, (x, y, context) = pooling("sum"), numbers("sum")
    data = [((a, context), b) for a, b in problems.split(x, y, (7, ROWS, 3))]
    plain, alone = [(a, b) for (a, _), b in data], Wrapped(lambda m, x: m.net(x, context), net=model)
    fit = lambda net, some: lw.fit(net, some, GIVEN, method=lw.Full(), prior=1.0)
    shared, expected = fit(model, data), fit(alone, plain)
    assert_close(evidence_bound(shared, data, 2), evidence_bound(expected, plain, 2))
    monkeypatch.setattr(Footprint, "chunks", lambda self, batch, *_: (slice(i, i + 1) for i in range(batch)))
    total = lambda f: f.square().sum()
    assert_close(shared.variance_of(total, (x[:ROWS], context)), expected.variance_of(total, x[:ROWS]))


def test_weights_for_each_sample() -> None:
    """Of an objective: sample k under its own weights, as many as the context has rows."""
    model, (x, y, context) = pooling("sum"), numbers("sum")
    network = Network.build(model, (x[:4], context))
    prior = lw.isotropic(1.0).bound(network.selection, network.theta())
    objective = Objective.build(network, GIVEN, prior, Data([((x[:4], context), y[:4])], CPU), D)
    d, seeds, inputs = torch.zeros(ROWS, objective.size, dtype=D), torch.ones(ROWS, 2, dtype=D), (x[:ROWS], context)
    assert_close(objective.each_output(d, inputs), model(*inputs))
    assert_close(objective.slopes(d, inputs, seeds), reference(model, x[:ROWS], context).sum(1))


# Batches that do not show which tensors are shared.


@pytest.mark.parametrize("equal", [False, True])
@pytest.mark.parametrize("how", [how for how in POOLS if how != "tokens"])
def test_a_first_batch_with_as_many_rows_as_the_context_is_refused(how: str, equal: bool) -> None:
    """Also where its rows are all the same, so that parts of it have the same mean."""
    model, (x, _, context) = pooling(how), numbers(how)
    context = context[:1].repeat(ROWS, 1) if equal else context
    message = (
        r"inputs\[1\] has as many rows as there are samples, 6, but every sample depends on all.*another batch size"
    )
    with pytest.raises(lw.errors.DataError, match=message):
        problems.unchanged(model, lambda: Network.build(model, (x[:ROWS], context)))


def test_tokens_for_all_samples_are_refused_in_such_a_batch() -> None:
    model, (x, _, context) = pooling("tokens"), numbers("tokens")
    with pytest.raises(
        lw.errors.ModelError, match=r"expected independent samples.*has 6 rows by chance, use another batch"
    ):
        Network.build(model, (x[:ROWS], context))


def test_tokens_behind_a_closed_gate_are_refused_in_such_a_batch() -> None:
    parts = {"a": nn.Linear(2, 2), "e": nn.Embedding(9, 2), "gate": nn.Parameter(torch.zeros(1))}
    model = Wrapped(lambda m, x, c: m.a(x) + m.gate * m.e(c).mean(0), **parts).double()
    x, _, context = numbers("tokens")
    with pytest.raises(
        lw.errors.DataError, match=r"of inputs\[0\], inputs\[1\], each with as many rows .* one is shared"
    ):
        Network.build(model, (x[:ROWS], context))


def test_tokens_that_are_all_the_same_are_refused_when_their_rows_do_not_follow() -> None:
    model, (x, _, context) = pooling("tokens"), numbers("tokens")
    network = Network.build(model, (x[:ROWS], context[:1].repeat(ROWS)))
    with pytest.raises(lw.errors.DataError, match=r"inputs\[1\] has 6 rows for 4 samples and had one for each sample"):
        network.take((x[:4], context), slice(0, 1))


def test_a_context_of_another_kind_than_before_is_refused() -> None:
    """Known to be shared, and given with a row for each sample all the same."""
    torch.manual_seed(0)
    run = lambda m, x, c: m.b(m.a(x) + (m.c(c) if len(c) == len(x) else m.c(c).sum(0)))
    model = Wrapped(run, a=nn.Linear(2, 4), b=nn.Linear(4, 2), c=nn.Linear(3, 4)).double()
    x, _, context = numbers("sum")
    network = Network.build(model, (x[:4], context))
    with pytest.raises(
        lw.errors.ModelError, match="where it is alone, with what all samples share; expected independent"
    ):
        network.linearise((x[:ROWS], context)).jacobians().whole()


# What costs nothing, and what is kept.


@pytest.mark.parametrize("name", ["mlp", "tuple_input", "dict_input"])
def test_inputs_with_a_row_for_each_sample(name: str) -> None:
    """Told by the first batch: later ones run the model no more than once."""
    case = BY_NAME[name]
    network, inputs = Network.build(case.build(), case.batch(4)), case.batch(3)
    runs: list[int] = []
    network.model.register_forward_hook(lambda *_: runs.append(1))
    assert all(network.per_sample(inputs))
    assert network.count(inputs) == 3
    assert not runs
    for rows, tangent in network.tangents(inputs, most=1):
        assert_close(tangent.f, network(inputs)[rows])
    assert len(runs) == 6


@pytest.mark.parametrize("size", [1, 4])
def test_one_row_is_spread_over_all_samples(size: int) -> None:
    """A mask of one row in some batches, with a row for each sample in others."""
    model = Wrapped(lambda m, x, mask: m.a(x * mask), a=nn.Linear(2, 2)).double()
    x, mask = torch.randn(4, 2, dtype=D), torch.rand(4, 2, dtype=D)
    network = Network.build(model, (x[:size], mask[:size]))
    assert_close(network(network.take((x, mask), slice(1, 2))), model(x[1:2], mask[1:2]))
    assert_close(network(network.take((x, mask[:1]), slice(1, 2))), model(x[1:2], mask[:1]))


def test_a_first_batch_of_one_sample_with_the_context_first() -> None:
    """Two contexts are more tensors, and come first: the outputs say that there is one sample."""
    run = lambda m, one, other, x: m.b(torch.tanh(m.a(x) + m.c(one).sum(0) + m.c(other).mean(0)))
    model = Wrapped(run, a=nn.Linear(2, 4), b=nn.Linear(4, 2), c=nn.Linear(3, 4)).double()
    x, _, context = numbers("sum")
    network = Network.build(model, (context, context + 1, x[:1]))
    assert network.count((context, context + 1, x[:ROWS])) == ROWS
    assert network.per_sample((context, context + 1, x[:ROWS])) == (False, False, True)


@pytest.mark.parametrize("sizes", [(1, 1, 1, 13), (1, 15), (7, 9)])
def test_a_context_of_two_rows_and_first_batches_of_one(sizes: tuple[int, ...]) -> None:
    """One sample is taken twice, and then has as many rows as the context."""
    model, (x, y, context) = pooling("sum"), numbers("sum")
    context = context[:2]
    data = [((a, context), b) for a, b in problems.split(x, y, sizes)]
    posterior = lw.fit(model, data, GIVEN, method=lw.Full(), prior=1.0)
    j = reference(model, x, context).flatten(0, 1)
    cov = torch.linalg.inv(torch.eye(j.shape[1], dtype=D) + j.mT @ j / 0.09)
    expected = torch.einsum("bkp,pq,bkq->bk", reference(model, x[:2], context), cov, reference(model, x[:2], context))
    assert_close(posterior.functions((x[:2], context)).variance, expected, 1e-8)


@pytest.mark.parametrize("kept", [True, False])
def test_a_loaded_posterior_still_tells(kept: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that do not say it make no wrong number: what is open is refused until a batch of another size has told."""
    model, (x, y, context) = pooling("sum"), numbers("sum")
    data = [((a, context), b) for a, b in problems.split(x, y, (7, 9))]
    posterior = lw.fit(model, data, GIVEN, method=lw.Full(), prior=1.0)
    expected = posterior.functions((x[:ROWS], context)).variance
    if not kept:
        state = Network.state
        drop = lambda net: replace(state(net), settings={**state(net).settings, "known": {}})
        monkeypatch.setattr(Network, "state", drop)
    posterior.save(tmp_path / "a.lapwing")
    loaded = lw.load(tmp_path / "a.lapwing", model)
    if not kept:
        with pytest.raises(lw.errors.DataError, match="Use another batch size"):
            loaded.functions((x[:ROWS], context))
        loaded.functions((x[:3], context))
    assert_close(loaded.functions((x[:ROWS], context)).variance, expected)


def test_a_prediction_changes_nothing_that_is_saved() -> None:
    """A first batch of one sample shows little; what later batches show is remembered, but is not saved."""
    model, (x, _, context) = pooling("sum"), numbers("sum")
    network = Network.build(model, (x[:1], context))
    before = dict(network.known)
    assert network.count((x[:4], context)) == 4
    assert network.take((x[:4], context), slice(0, 1))[1] is context
    other = replace(network, selection=network.selection)
    assert network.known == other.known == before
    assert network.with_shift(torch.zeros_like(network.theta())).known == before


def test_batches_without_end_remember_what_is_shared() -> None:
    """A batch by itself, because its context differs, has as many rows as that by chance."""
    x, y, context = numbers("sum")
    other = context + 1
    parts = [((x[:4], context), y[:4]), ((x[4:10], other), y[4:10])]
    for batch in islice(shuffle_batches(Data(parts, CPU), 3, torch.Generator().manual_seed(0)), 6):
        assert len(batch.inputs[1]) == ROWS
        assert torch.equal(batch.inputs[1], context) or torch.equal(batch.inputs[1], other)


SEVERAL = (
    lw.Full(),
    lw.Kron(),
    lw.ELLA(6),
    lw.VaLLA(6, optimiser="none"),
    lw.FMGP(5, "features", steps=3),
    lw.HFL(mode="linearised"),
)


@pytest.mark.parametrize("method", SEVERAL, ids=lambda m: type(m).__name__)
def test_two_contexts_of_as_many_rows_are_not_a_majority(method: Any) -> None:
    """What goes with the targets is a sample, and not what most tensors have."""
    run = lambda m, x, one, other: m.b(torch.tanh(m.a(x) + m.c(one).sum(0) + m.c(other).mean(0)))
    model = Wrapped(run, a=nn.Linear(2, 4), b=nn.Linear(4, 2), c=nn.Linear(3, 4)).double()
    x, y, context = numbers("sum")
    data = [((a, context, context + 1), b) for a, b in problems.split(x, y, (7, 9))]
    posterior = lw.fit(model, data, GIVEN, method=method, prior=1.0)
    assert bool((posterior.functions((x[:4], context, context + 1)).variance > 0).all())


def test_an_average_over_inputs_with_two_contexts() -> None:
    """Of the samples, and not of what most tensors have."""
    run = lambda m, x, one, other: m.b(torch.tanh(m.a(x) + m.c(one).sum(0) + m.c(other).mean(0)))
    model = Wrapped(run, a=nn.Linear(2, 4), b=nn.Linear(4, 2), c=nn.Linear(3, 4)).double()
    x, y, context = numbers("sum")
    inputs = (x, context, context + 1)
    network = Network.build(model, inputs)
    prior = lw.isotropic(1.0).bound(network.selection, network.theta())
    objective = Objective.build(network, GIVEN, prior, Data([(inputs, y)], CPU), D)
    zero = torch.zeros(1, len(network.theta()), dtype=D)
    gradient = push_of_average(objective, [inputs], absolute=False)(zero)[0]
    expected = torch.autograd.grad(model(*inputs).sum() / len(x), list(model.parameters()))
    assert_close(gradient, torch.cat([g.reshape(-1) for g in expected]))
