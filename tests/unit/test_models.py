"""Models as people write them."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lapwing as lw
from lapwing import errors
from tests.cases import Wrapped
from tests.references import dense
from tests.tolerances import SOLVED, assert_close

# Legal but unusual user code: heads without a rule, models that change themselves, mixed precision, odd containers.

METHODS = [lw.Full(), lw.Diagonal(), lw.Kron(), lw.EKron(), lw.LowRank(5)]


def features() -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(12, 3), torch.randn(12, 3), torch.randint(0, 3, (12,))


def head(run: Callable[..., Any], **parts: Any) -> nn.Module:
    return Wrapped(run, l=nn.Linear(3, 4), **parts)


HEADS: dict[str, tuple[Callable[[], nn.Module], tuple[str, ...]]] = {
    "einsum": (
        lambda: head(
            lambda s, x: torch.einsum("bd,do->bo", torch.tanh(s.l(x)), s.w) + s.b,
            w=nn.Parameter(torch.randn(4, 3)), b=nn.Parameter(torch.randn(3)),
        ), ("w", "b"),
    ),
    "weight on the left": (
        lambda: head(lambda s, x: (s.w @ torch.tanh(s.l(x)).T).T, w=nn.Parameter(torch.randn(3, 4))), ("w",),
    ),
    "cosine": (
        lambda: head(
            lambda s, x: F.linear(F.normalize(torch.tanh(s.l(x))), F.normalize(s.w)), w=nn.Parameter(torch.randn(3, 4))
        ), ("w",),
    ),
    "weight norm": (
        lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.utils.parametrizations.weight_norm(nn.Linear(4, 3))),
        ("2.bias", "2.parametrizations.weight.original0", "2.parametrizations.weight.original1"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", HEADS)
def test_the_last_layer_is_the_head_even_without_a_rule_for_it(name: str) -> None:
    x, y, _ = features()
    build, expected = HEADS[name]
    model = build().double()
    x, y = x.double(), y.double()
    posterior = lw.fit(model, [(x, y)], lw.Gaussian(0.5), method=lw.Full(), weights=lw.last_layer, prior=0.7)
    assert posterior.network.selection.names == expected
    jac = dense.jacobian(model, x, 12, list(expected))
    ggn = dense.ggn(jac, torch.eye(3, dtype=torch.float64).expand(12, 3, 3)) / 0.25
    cov = torch.linalg.inv(ggn + 0.7 * torch.eye(len(ggn), dtype=torch.float64))
    torch.testing.assert_close(posterior.functions(x).cov, jac @ cov @ jac.mT)


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.l = nn.Linear(3, 3)
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.l(x)


CHANGING: dict[str, Callable[[], nn.Module]] = {
    "counter": Counting,
    "instance norm": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 3)), nn.InstanceNorm1d(1, track_running_stats=True), nn.Flatten(), nn.Linear(3, 3)
    ).train(),
    "spectral norm": lambda: nn.Sequential(
        nn.Linear(3, 30), nn.utils.parametrizations.spectral_norm(nn.Linear(30, 30)), nn.Linear(30, 3)
    ).train(),
}


@pytest.mark.parametrize("name", CHANGING)
def test_a_model_that_changes_itself_is_refused_and_put_back(name: str) -> None:
    x, _, y = features()
    model = CHANGING[name]()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(errors.ModelError, match="changes its own weights or buffers"):
        lw.fit(model, [(x, y)], "classification")
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize("setting", [{"max_norm": 0.5}, {"scale_grad_by_freq": True}], ids=str)
def test_an_embedding_that_changes_weights_or_gradients_is_refused(setting: dict[str, Any]) -> None:
    table = nn.Embedding(6, 4, **setting)
    before = table.weight.detach().clone()
    model = Wrapped(lambda s, t: s.h(s.e(t).flatten(1)), e=table, h=nn.Linear(8, 3))
    with pytest.raises(errors.ModelError, match=next(iter(setting))):
        lw.fit(model, [(torch.randint(0, 6, (5, 2)), torch.tensor([0, 1, 2, 0, 1]))], "classification")
    assert torch.equal(table.weight, before)


@pytest.mark.parametrize("method", METHODS, ids=lambda m: type(m).__name__)
def test_autocast_inside_the_model(method: Any) -> None:
    x, _, y = features()

    class Narrow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.l, self.h = nn.Linear(3, 4), nn.Linear(4, 3)
            self.narrow = True

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16, enabled=self.narrow):
                return self.h(torch.tanh(self.l(x)))

    torch.manual_seed(3)
    model = Narrow()
    std = lw.fit(model, [(x, y)], "classification", method=method, prior=1.0).functions(x).std
    model.narrow = False
    wide = lw.fit(model, [(x, y)], "classification", method=method, prior=1.0).functions(x).std
    torch.testing.assert_close(std.float(), wide, rtol=0.05, atol=0.02)


@pytest.mark.parametrize("method", METHODS, ids=lambda m: type(m).__name__)
@pytest.mark.parametrize("dtypes", [(torch.bfloat16, torch.float32), (torch.float32, torch.float64)], ids=str)
def test_layers_of_different_dtypes(method: Any, dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    x, _, y = features()
    body, top = dtypes
    model = Wrapped(
        lambda s, x: s.h(torch.tanh(s.l(x.to(body))).to(top)), l=nn.Linear(3, 4).to(body), h=nn.Linear(4, 3).to(top)
    )
    posterior = lw.fit(model, [(x, y)], "classification", method=method, prior=1.0)
    assert bool((posterior.functions(x).variance > 0).all())
    assert posterior.function_samples(x, 2).shape == posterior.network_samples(x, 2).shape == (2, 12, 3)


@pytest.mark.parametrize("table", [nn.EmbeddingBag(6, 4), nn.Embedding(6, 4, sparse=True)], ids=["bag", "sparse"])
def test_low_rank_where_products_have_no_second_derivative(table: nn.Module) -> None:
    model = Wrapped(lambda s, t: s.h(s.e(t).flatten(1)), e=table, h=nn.LazyLinear(3)).double()
    tokens, y = torch.randint(0, 6, (5, 2)), torch.tensor([0, 1, 2, 0, 1])
    model(tokens)
    thin, full = (
        lw.fit(model, [(tokens, y)], "classification", method=method, prior=1.0).functions(tokens).cov
        for method in (lw.LowRank(60), lw.Full())
    )
    torch.testing.assert_close(thin, full)


def test_the_noise_gradient_of_a_rank_beyond_the_curvatures_is_finite() -> None:
    x, y, _ = features()
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    noise = torch.tensor(0.5, requires_grad=True, dtype=torch.float64)
    data = [(x[:3].double(), y[:3].double())]
    thin = lw.fit(model, data, lw.Gaussian(noise), method=lw.LowRank(20), prior=1.0).log_evidence()
    full = lw.fit(model, data, lw.Gaussian(noise), method=lw.Full(), prior=1.0).log_evidence()
    torch.testing.assert_close(torch.autograd.grad(thin, noise), torch.autograd.grad(full, noise))


# Models as they are met in practice: complex weights, language models with labels, padding, experts, graphs.


class Fourier(nn.Module):
    """A layer of a Fourier neural operator, with complex weights or with pairs of real ones."""

    def __init__(self, real: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.modes = nn.Parameter(torch.randn(5, 2) if real else torch.randn(5, dtype=torch.cfloat))
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        modes = self.modes if self.modes.is_complex() else torch.view_as_complex(self.modes)
        return self.head(torch.fft.irfft(torch.fft.rfft(x) * modes, n=8))


def regression(seed: int = 0) -> tuple[Tensor, Tensor]:
    torch.manual_seed(seed)
    return torch.randn(12, 8), torch.randn(12, 2)


@pytest.mark.parametrize("weights", [None, lw.named("modes"), lw.subnetwork(torch.tensor([1, 12]))])
def test_complex_weights_are_refused_by_name(weights: Any) -> None:
    with pytest.raises(errors.ModelError, match=r"'modes' is complex.*view_as_complex"):
        lw.fit(Fourier(real=False), [regression()], "regression", weights=weights, method=lw.Diagonal())


def test_complex_weights_may_be_left_out_and_the_remedy_works() -> None:
    assert (
        lw.fit(Fourier(False), [regression()], "regression", weights=lw.last_layer, prior=1.0).network.selection.size
        == 18
    )
    pairs = lw.fit(Fourier(True), [regression()], lw.Gaussian(0.5), method=lw.Full(), prior=1.0)
    assert pairs.network.selection.size == 28
    kernel = lw.fit(Fourier(True), [regression()], lw.Gaussian(0.5), method=lw.KernelSpace(), prior=1.0)
    x = regression(1)[0]
    assert_close(pairs.functions(x).cov, kernel.functions(x).cov, SOLVED)


class Causal(nn.Module):
    """A language model with the call of Hugging Face's causal ones: output t predicts token t + 1."""

    def __init__(self, shift: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.shift = shift
        self.table, self.head = nn.Embedding(11, 6), nn.Linear(6, 11)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, labels: Tensor | None = None) -> Any:
        logits, loss = self.head(torch.tanh(self.table(input_ids)).cumsum(1)), None
        if labels is not None:
            f, y = (logits[:, :-1], labels[:, 1:]) if self.shift else (logits, labels)
            loss = F.cross_entropy(f.flatten(0, 1), y.flatten())
        return SimpleNamespace(logits=logits, loss=loss)


def tokens() -> Tensor:
    return torch.randint(0, 11, (6, 4), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("pair", [False, True])
def test_labels_that_the_model_shifts_are_refused_with_the_remedy(pair: bool) -> None:
    ids = tokens()
    batch = (ids, ids) if pair else {"input_ids": ids, "labels": ids}
    with pytest.raises(errors.ModelError, match=r"shift=True"):
        lw.fit(Causal(), [batch], "classification")
    with pytest.raises(errors.ModelError, match=r"shift=True"):
        lw.train(Causal(), [batch], "classification")


def test_shifted_labels_equal_those_shifted_by_hand() -> None:
    ids, model = tokens(), Causal()
    by_hand = torch.cat([ids[:, 1:], torch.full((6, 1), -100)], 1)
    shifted = lw.fit(
        model, [{"input_ids": ids, "labels": ids}], lw.Categorical(shift=True), method=lw.Full(), prior=1.0
    )
    plain = lw.fit(model, [(ids, by_hand)], "classification", method=lw.Full(), prior=1.0)
    assert_close(shifted.functions(ids).cov, plain.functions(ids).cov)
    own = 6 * 3 * model(ids, labels=ids).loss.item()
    assert shifted.posterior.statistics.data == 18
    assert shifted.posterior.statistics.loss == pytest.approx(own, rel=1e-5)


def test_labels_that_are_not_shifted_pass_and_need_no_shift() -> None:
    ids = tokens()
    batch = {"input_ids": ids, "labels": ids}
    lw.fit(Causal(shift=False), [batch], "classification", prior=1.0)
    with pytest.raises(errors.ModelError, match="returns the loss"):
        lw.fit(Causal(shift=False), [batch], lw.Categorical(shift=True), prior=1.0)


class Buffered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 2)
        self.register_buffer("order", torch.arange(8))
        self.register_buffer("mask", torch.ones(8, dtype=torch.bool))
        self.register_buffer("big", torch.tensor([2**40]))
        self.register_buffer("phase", torch.ones(3, dtype=torch.cfloat))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x[:, self.order] * self.mask)


@pytest.mark.parametrize("name", ["order", "mask", "big", "phase"])
def test_every_buffer_is_in_the_fingerprint(name: str) -> None:
    model, (x, y) = Buffered(), regression()
    posterior = lw.fit(model, [(x, y)], "regression", prior=1.0)
    posterior.predict(x)
    buffer = model.get_buffer(name)
    if name == "order":
        buffer.copy_(buffer.flip(0))
    elif name == "mask":
        buffer[3] = False
    else:
        buffer[0] += 1 if name == "big" else 1j
    with pytest.raises(errors.ModelError, match=name):
        posterior.predict(x)


def test_as_many_tokens_as_classes_are_not_guessed() -> None:
    torch.manual_seed(0)
    x, y, channels_first = torch.randn(6, 3, 5), torch.randint(0, 5, (6, 5)), nn.Conv1d(3, 5, 1)
    with pytest.raises(errors.ModelError, match=r"may be \(B, T, C\) or \(B, C, T\)"):
        lw.fit(channels_first, [(x, y)], "classification")
    with pytest.raises(errors.UnsupportedError, match="transpose"):
        lw.Categorical(class_dim=1)
    classes_last = nn.Linear(3, 5)
    posterior = lw.fit(classes_last, [(x.mT, y)], lw.Categorical(class_dim=-1), prior=1.0)
    assert posterior.predict(x.mT).probs.shape == (6, 5, 5)


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.encoder, self.head = nn.TransformerEncoder(layer, 2), nn.Linear(8, 3)

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        return self.head(self.encoder(x, src_key_padding_mask=padding).mean(1))


def test_padding_in_later_batches_does_not_change_the_path_of_a_transformer() -> None:
    model = Encoder().eval()
    x, y, none = torch.randn(10, 4, 8), torch.randint(0, 3, (10,)), torch.zeros(10, 4, dtype=torch.bool)
    padded = none.clone()
    padded[:, 3] = True
    posterior = lw.fit(model, [((x, none), y), ((x, padded), y)], "classification", prior=1.0)
    expected = model(x, padded).detach()  # with gradients, PyTorch does not take the fused path
    assert_close(posterior.functions((x, padded)).mean, expected, SOLVED)
    assert torch.backends.mha.get_fastpath_enabled()


class Shard(nn.Parameter):
    """A parameter that looks like a part of a distributed one."""

    device_mesh = None


def test_distributed_weights_are_refused() -> None:
    model, (x, y) = nn.Linear(8, 2), regression()
    model.weight = Shard(model.weight.detach())
    with pytest.raises(errors.ModelError, match="full_tensor"):
        lw.fit(model, [(x, y)], "regression")


class Experts(nn.Module):
    """A mixture of experts: each sample goes to the one that a gate chooses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.gate, self.experts = nn.Linear(8, 3), nn.ModuleList(nn.Linear(8, 2) for _ in range(3))

    def chosen(self, x: Tensor) -> Tensor:
        return self.gate(x).argmax(-1)

    def forward(self, x: Tensor) -> Tensor:
        share, chosen, out = self.gate(x).softmax(-1), self.chosen(x), x.new_zeros(len(x), 2)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero()[:, 0]
            out = out.index_add(0, rows, expert(x[rows]) * share[rows, number : number + 1])
        return out


WILD_MODELS_METHODS = [lw.Full(), lw.Kron(), lw.Kron(sharing="reduce"), lw.EKron(), lw.Diagonal(), lw.KernelSpace()]


@pytest.mark.parametrize(
    "method", WILD_MODELS_METHODS, ids=lambda method: f"{type(method).__name__} {getattr(method, 'sharing', '')}"
)
def test_experts_that_get_no_sample_of_a_batch(method: Any) -> None:
    model, x, y = Experts().double(), torch.randn(24, 8).double(), torch.randn(24, 2).double()
    order = model.chosen(x).argsort()
    counts = model.chosen(x).bincount(minlength=3)
    assert bool((counts > 0).all()), "expected every expert to have some samples"
    sorted_x, sorted_y = x[order], y[order]
    first = counts[0] + 1  # the first batch has one sample of the second expert and none of the third
    batches = [(sorted_x[:first], sorted_y[:first]), (sorted_x[first:], sorted_y[first:])]
    whole = lw.fit(model, [(x, y)], lw.Gaussian(0.5), method=method, prior=1.0)
    parts = lw.fit(model, [(x[:0], y[:0]), *reversed(batches)], lw.Gaussian(0.5), method=method, prior=1.0)
    assert_close(parts.functions(x).cov, whole.functions(x).cov, SOLVED)
    if isinstance(method, lw.Full):
        jac = dense.jacobian(model, x, 24)
        ggn = dense.ggn(jac, torch.eye(2, dtype=torch.float64).expand(24, 2, 2)) / 0.25
        cov = torch.linalg.inv(ggn + torch.eye(len(ggn), dtype=torch.float64))
        assert_close(whole.functions(x).cov, jac @ cov @ jac.mT, SOLVED)
        late = lw.fit(model, batches, lw.Gaussian(0.5), method=method, prior=1.0)  # an expert unused at first
        assert_close(late.functions(x).cov, jac @ cov @ jac.mT, SOLVED)


def sequences(count: int) -> list[Tensor]:
    torch.manual_seed(5)
    return [torch.randn(length, 3).double() for length in torch.randint(1, 6, (count,)).tolist()]


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.body, self.head = kind(3, 4, batch_first=True), nn.Linear(4, 2)  # type: ignore[call-arg]

    def forward(self, x: Any) -> Tensor:
        last = self.body(x)[1]
        return self.head((last[0] if isinstance(last, tuple) else last)[-1])


def against_single_samples(model: nn.Module, packed: Any, more: Any, samples: list[Tensor], method: Any) -> None:
    """Compare a fit to two batches of ragged samples with one to a batch for each sample."""
    y, size = torch.randn(len(samples), 2).double(), len(samples) // 2
    batches = [(packed, y[:size]), (more, y[size:])]
    posterior = lw.fit(model, batches, lw.Gaussian(0.5), method=method, prior=1.0)
    singles = [(x[None], y[i : i + 1]) for i, x in enumerate(samples)]
    expected = lw.fit(model, singles, lw.Gaussian(0.5), method=method, prior=1.0)
    covs = torch.cat([expected.functions(x[None]).cov for x in samples[:size]])
    assert_close(posterior.functions(packed).cov, covs, SOLVED)


@pytest.mark.parametrize("method", WILD_MODELS_METHODS[:2], ids=lambda method: type(method).__name__)
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_packed_sequences(kind: type[nn.RNNBase], method: Any) -> None:
    x, model = sequences(8), Recurrent(kind).double()
    pack = nn.utils.rnn.pack_sequence
    against_single_samples(model, pack(x[:4], False), pack(x[4:], False), x, method)


class Pooled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.stack([part.sum(0) for part in torch.relu(self.body(x)).unbind()]))


@pytest.mark.filterwarnings("ignore:.*nested tensors is in prototype")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
def test_nested_tensors(layout: torch.layout) -> None:
    x, model = sequences(8), Pooled().double()
    nested = [torch.nested.nested_tensor(part, layout=layout) for part in (x[:4], x[4:])]
    against_single_samples(model, *nested, x, lw.Full())


class Convolution(nn.Module):
    """A network on graphs: sums over neighbours; with ``graph`` (nodes,) a pooled output for each graph."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.first, self.second, self.head = nn.Linear(3, 5), nn.Linear(5, 5), nn.Linear(5, 2)

    def forward(self, x: Tensor, edge_index: Tensor, graph: Tensor | None = None) -> Tensor:
        for layer in (self.first, self.second):
            h = layer(x)
            x = torch.tanh(h.index_add(0, edge_index[1], h[edge_index[0]]))
        if graph is not None:
            x = x.new_zeros(int(graph.max()) + 1, 5).index_add(0, graph, x)
        return self.head(x)


class Graphs(lw.samples.SampleSet):
    def __init__(self, graphs: list[tuple[Tensor, Tensor]]) -> None:
        self.graphs = graphs

    def __len__(self) -> int:
        return len(self.graphs)

    def take(self, rows: Tensor) -> Graphs:
        return Graphs([self.graphs[row] for row in rows.tolist()])

    def changed(self, change: Any) -> Graphs:
        return Graphs([(change(x), change(edges)) for x, edges in self.graphs])

    def arguments(self) -> tuple[Tensor, Tensor, Tensor]:
        sizes = torch.tensor([len(x) for x, _ in self.graphs])
        starts = sizes.cumsum(0) - sizes
        edges = [edges + start for (_, edges), start in zip(self.graphs, starts, strict=True)]
        graph = torch.arange(len(self)).repeat_interleave(sizes)
        return torch.cat([x for x, _ in self.graphs]), torch.cat(edges, 1), graph


def random_graph() -> tuple[Tensor, Tensor]:
    nodes = int(torch.randint(2, 6, ()))
    return torch.randn(nodes, 3).double(), torch.randint(0, nodes, (2, 2 * nodes))


def rows_of(f: Tensor, model: nn.Module) -> Tensor:
    """(outputs, P): the gradient of every output."""
    parameters = list(model.parameters())
    grads = (torch.autograd.grad(value, parameters, retain_graph=True) for value in f.reshape(-1))
    return torch.stack([torch.cat([g.reshape(-1) for g in each]) for each in grads])


def test_a_target_for_each_graph() -> None:
    model = Convolution().double()
    graphs, y = [random_graph() for _ in range(9)], torch.randn(9, 2).double()
    items = [{"graphs": graphs[:5], "y": y[:5]}, {"graphs": graphs[5:], "y": y[5:]}]
    loader = lw.samples.unpacked(items, lambda item: (Graphs(item["graphs"]), item["y"]))
    assert len(loader) == 2
    posterior = lw.fit(model, loader, lw.Gaussian(0.5), method=lw.Full(), prior=1.0)
    alone = [model(x, edges, torch.zeros(len(x), dtype=torch.long)) for x, edges in graphs]
    jac = torch.stack([rows_of(f, model) for f in alone])
    ggn = torch.einsum("bcp,bcq->pq", jac, jac) / 0.25
    cov = torch.linalg.inv(ggn + torch.eye(len(ggn), dtype=torch.float64))
    assert_close(posterior.functions(Graphs(graphs)).cov, jac @ cov @ jac.mT, SOLVED)
    assert all(block.has_rule for block in posterior.network.layout)
    assert lw.fit(model, loader, "regression", validation=loader).predict(Graphs(graphs)).std.shape == (9, 2)


def test_a_target_for_each_node_of_one_graph() -> None:
    model, (x, edges) = Convolution().double(), (torch.randn(7, 3).double(), torch.randint(0, 7, (2, 15)))
    y = torch.randint(0, 2, (1, 7))
    y[0, 3] = -100  # a node that is not in the training data
    graph = lw.samples.OneSample((x, edges))
    posterior = lw.fit(model, [(graph, y)], "classification", method=lw.Full(), prior=1.0)
    f = model(x, edges)
    jac, hessian = rows_of(f, model).reshape(7, 2, -1), dense.softmax_hessian(f.detach())
    hessian[3] = 0
    ggn = torch.einsum("bcp,bcd,bdq->pq", jac, hessian, jac)
    cov = torch.linalg.inv(ggn + torch.eye(len(ggn), dtype=torch.float64))
    assert_close(posterior.functions(graph).cov[0], jac @ cov @ jac.mT, SOLVED)
    assert posterior.predict(graph).probs.shape == (1, 7, 2)
    with pytest.raises(errors.ModelError, match=r"lw\.samples\.OneSample"):
        lw.fit(model, [((x, edges), y[0])], "classification")
    with pytest.raises(errors.DataError, match=r"lw\.samples\.unpacked"):
        lw.fit(model, [SimpleNamespace(x=x, edge_index=edges, y=y)], "classification")
