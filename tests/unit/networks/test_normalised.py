"""Weights whose scale a network ignores: found where there are any, and nowhere else."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lapwing as lw
from lapwing.networks import normalised
from lapwing.networks.graph import read_graph
from lapwing.networks.network import Network
from lapwing.networks.normalised import ScaleFree, group_names, scale_free_groups
from lapwing.networks.rules import batch_norm_eps
from tests import problems
from tests.cases import BY_NAME, CASES, Wrapped
from tests.references import dense
from tests.tolerances import tolerance

D = torch.float64
DTYPES = [torch.float64, torch.float32]


def chain(*modules: nn.Module) -> nn.Module:
    return nn.Sequential(*modules)


def shaken(model: nn.Module) -> nn.Module:
    """Norm scales of one, biases of nought and fresh statistics would hide mistakes."""
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.data += 0.3 * torch.randn_like(parameter)
    for name, buffer in model.named_buffers():
        if "running" in name:
            buffer.data += torch.rand_like(buffer)
    return model.eval()


class PreActivation(nn.Module):
    """A residual network with the norm before the activation: only what is between two norms is free."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm1, self.one = nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 5)
        self.norm2, self.two, self.norm3, self.head = nn.LayerNorm(5), nn.Linear(5, 6), nn.LayerNorm(6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = x + self.two(F.relu(self.norm2(self.one(F.relu(self.norm1(x))))))
        return self.head(self.norm3(x))


def functional_batchnorm() -> nn.Module:
    model = Wrapped(
        lambda m, x: m.head(F.relu(F.batch_norm(m.first(x), m.centre, m.spread, m.scale, m.shift, eps=1e-4))),
        first=nn.Linear(4, 6), scale=nn.Parameter(torch.rand(6) + 0.5), shift=nn.Parameter(torch.randn(6)),
        head=nn.Linear(6, 3),
    )  # fmt: skip
    model.register_buffer("centre", torch.randn(6))
    model.register_buffer("spread", torch.rand(6) + 0.5)
    return model


def by_hand(eps: float) -> nn.Module:
    """A root-mean-square norm written out, as many language models have it."""

    def run(m: Any, x: Tensor) -> Tensor:
        h = m.first(x)
        return m.head(torch.tanh(h * torch.rsqrt(h.square().mean(-1, keepdim=True) + m.variance_epsilon)))

    model = Wrapped(run, first=nn.Linear(4, 6), head=nn.Linear(6, 3))
    model.variance_epsilon = eps
    return model


def transformer(norm_first: bool, normed: bool) -> nn.Module:
    def run(m: Any, x: Tensor) -> Tensor:
        h = m.embed(x)
        return m.head(m.layer(m.norm(h) if normed else h).mean(1))

    return Wrapped(
        run, embed=nn.Linear(5, 8), norm=nn.LayerNorm(8), head=nn.Linear(8, 3),
        layer=nn.TransformerEncoderLayer(8, 2, 12, batch_first=True, dropout=0.0, norm_first=norm_first),
    )  # fmt: skip


def normed_queries() -> nn.Module:
    def run(m: Any, x: Tensor) -> Tensor:
        q, k = m.norm_q(m.q(x)), m.norm_k(m.k(x))
        return m.head(F.scaled_dot_product_attention(q, k, m.v(x)).mean(1))

    return Wrapped(
        run, q=nn.Linear(5, 8), k=nn.Linear(5, 8), v=nn.Linear(5, 8), norm_q=nn.LayerNorm(8), norm_k=nn.RMSNorm(8),
        head=nn.Linear(8, 3),
    )  # fmt: skip


def old_weight_norm() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return chain(nn.utils.weight_norm(nn.Linear(4, 6)), nn.Tanh(), nn.Linear(6, 3))


PIXELS, VECTOR, TOKENS = (2, 7, 8), (4,), (4, 5)
new_weight_norm = nn.utils.parametrizations.weight_norm
BOTH = ("weight", "bias")


def parts(**groups: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    """Names of groups, with those of their parameters; a layer's number is written m0, m1, ..."""
    named = {name.removeprefix("m"): names for name, names in groups.items()}
    return {name: tuple(f"{name}.{each}" for each in names) for name, names in named.items()}


# name: model, shape of an input, groups, whether statistics of a BatchNorm follow
FOUND: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], dict[str, tuple[str, ...]], bool]] = {
    "layer norm": (
        lambda: chain(nn.Linear(4, 6), nn.LayerNorm(6), nn.Tanh(), nn.Linear(6, 5), nn.LayerNorm(5), nn.ReLU(),
                      nn.Linear(5, 3)), VECTOR, parts(m0=BOTH, m3=BOTH), False),
    "layer norm after the activation": (
        lambda: chain(nn.Linear(4, 6), nn.ReLU(), nn.LayerNorm(6), nn.Linear(6, 3)), VECTOR, parts(m0=BOTH), False),
    "layer norm after a leaky activation": (
        lambda: chain(nn.Linear(4, 6), nn.LeakyReLU(), nn.Dropout(0.5), nn.LayerNorm(6), nn.Linear(6, 3)),
        VECTOR, parts(m0=BOTH), False),
    "group norm": (
        lambda: chain(nn.Conv2d(2, 6, 3), nn.GroupNorm(2, 6), nn.Tanh(), nn.Conv2d(6, 4, 3), nn.GroupNorm(2, 4),
                      nn.ReLU(), nn.Flatten(), nn.Linear(48, 3)), PIXELS, parts(m0=BOTH, m3=BOTH), False),
    "RMS norm": (
        lambda: chain(nn.Linear(4, 6), nn.RMSNorm(6), nn.Tanh(), nn.Linear(6, 3)), VECTOR, parts(m0=BOTH), False),
    "instance norm": (
        lambda: chain(nn.Conv2d(2, 6, 3), nn.InstanceNorm2d(6, affine=True), nn.Tanh(), nn.Flatten(),
                      nn.Linear(180, 3)), PIXELS, parts(m0=BOTH), False),
    "batch norm": (
        lambda: chain(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 5), nn.BatchNorm1d(5),
                      nn.Linear(5, 3)), VECTOR, parts(m0=BOTH, m3=BOTH), True),
    "batch norm of pictures": (
        lambda: chain(nn.Conv2d(2, 6, 3, groups=2, bias=False), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(),
                      nn.Linear(180, 3)), PIXELS, parts(m0=("weight",)), True),
    "batch norm as a function": (functional_batchnorm, VECTOR, parts(first=BOTH), True),
    "a norm by hand": (lambda: by_hand(1e-5), VECTOR, parts(first=BOTH), False),
    "weight norm": (
        lambda: chain(new_weight_norm(nn.Linear(4, 6)), nn.Tanh(), nn.Linear(6, 3)),
        VECTOR, {"0.parametrizations.weight.original1": ("0.parametrizations.weight.original1",)}, False),
    "the old weight norm": (old_weight_norm, VECTOR, {"0.weight_v": ("0.weight_v",)}, False),
    "a cosine head": (
        lambda: Wrapped(lambda m, x: 5 * F.normalize(m.first(x), dim=1) @ F.normalize(m.proxies, dim=1).T,
                        first=nn.Linear(4, 6), proxies=nn.Parameter(torch.randn(3, 6))),
        VECTOR, {"proxies": ("proxies",), **parts(first=BOTH)}, False),
    "residual, norm first": (PreActivation, VECTOR, parts(one=BOTH), False),
    "residual, batch norm": (BY_NAME["resnet_batchnorm"].model, (2, 6, 8),
                             parts(stem=("weight",), one=("weight",), two=("weight",)), True),
    "transformer, norm after": (lambda: transformer(False, True), TOKENS, parts(embed=BOTH), False),
    "transformer, norm before": (lambda: transformer(True, True), TOKENS, parts(embed=BOTH), False),
    "attention with normed queries": (normed_queries, TOKENS, parts(q=BOTH, k=BOTH), False),
}  # fmt: skip


def dead() -> nn.Module:
    model = chain(nn.Linear(4, 6), nn.ReLU(), nn.LayerNorm(6), nn.Linear(6, 3))
    model[0].bias.data.fill_(-100.0)
    return model


def cut_off() -> nn.Module:
    model = chain(nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 3))
    model[2].weight.data.zero_()
    return model


def noughts() -> nn.Module:
    model = chain(nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 3))
    model[0].weight.data.zero_()
    model[0].bias.data.zero_()
    return model


def saturated(scale: float) -> nn.Module:
    model = chain(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    model[0].weight.data *= scale
    model[0].bias.data *= scale
    return model


NONE: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "tanh": (lambda: chain(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)), VECTOR),
    "relu": (lambda: chain(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3)), VECTOR),
    "norm after a bend": (lambda: chain(nn.Linear(4, 6), nn.Tanh(), nn.LayerNorm(6), nn.Linear(6, 3)), VECTOR),
    "batch norm after a bend": (
        lambda: chain(nn.Linear(4, 6), nn.Tanh(), nn.BatchNorm1d(6), nn.Linear(6, 3)), VECTOR),
    "saturated": (lambda: saturated(1e4), VECTOR),
    "dead": (dead, VECTOR),
    "cut off": (cut_off, VECTOR),
    "noughts": (noughts, VECTOR),
    "large eps": (lambda: chain(nn.Linear(4, 6), nn.LayerNorm(6, eps=1.0), nn.Tanh(), nn.Linear(6, 3)), VECTOR),
    "large eps by hand": (lambda: by_hand(1.0), VECTOR),
    "norm of the inputs": (lambda: chain(nn.LayerNorm(4), nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)), VECTOR),
    "two layers into one norm": (
        lambda: Wrapped(lambda m, x: m.head(m.norm(m.one(x) + m.two(x))), one=nn.Linear(4, 6), two=nn.Linear(4, 6),
                        norm=nn.BatchNorm1d(6), head=nn.Linear(6, 3)), VECTOR),
    "transformer, norm after": (lambda: transformer(False, False), TOKENS),
    "transformer, norm before": (lambda: transformer(True, False), TOKENS),
    "norm at the end": (lambda: chain(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3), nn.BatchNorm1d(3, eps=1.0)), VECTOR),
}  # fmt: skip
DELICATE = ("dead", "cut off", "noughts")  # where biases must stay as they are


def example(make: Callable[[], nn.Module], shape: tuple[int, ...], dtype: torch.dtype, shake: bool = True) -> Any:
    torch.manual_seed(3)
    model = make()
    model = (shaken(model) if shake else model.eval()).to(dtype)
    return model, torch.randn(7, *shape, dtype=D).to(dtype)


def ignored_scales(model: nn.Module, x: Tensor) -> tuple[ScaleFree, ...]:
    return scale_free_groups(Network.build(model, x), x)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", list(FOUND))
def test_groups_that_are_there(name: str, dtype: torch.dtype) -> None:
    make, shape, groups, statistics = FOUND[name]
    model, x = example(make, shape, dtype)
    seen = problems.unchanged(model, lambda: ignored_scales(model, x))
    assert {group.name: group.parameters for group in seen} == groups
    assert {group.statistics for group in seen} == {statistics}
    assert all(group.change <= group.tolerance <= 1e-2 for group in seen)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", list(NONE))
def test_groups_that_are_not_there(name: str, dtype: torch.dtype) -> None:
    model, x = example(*NONE[name], dtype, shake=name not in DELICATE)
    assert problems.unchanged(model, lambda: ignored_scales(model, x)) == ()


@pytest.mark.parametrize("name", list(FOUND))
def test_the_scale_really_is_ignored(name: str) -> None:
    """Any factor but the one that was tried, on other inputs: by hand, on a copy of the model."""
    make, shape, groups, statistics = FOUND[name]
    model, _ = example(make, shape, D)
    x = torch.randn(5, *shape, dtype=D)
    with torch.no_grad():
        before = model(x)
        for factor in (0.3, 7.0):
            for names in groups.values():
                copy, _ = example(make, shape, D)
                tensors = dict(copy.named_parameters())
                for each in names:
                    tensors[each].mul_(factor)
                if statistics:
                    rescale_statistics(copy, names[0].rpartition(".")[0], factor)
                assert float((copy(x) - before).abs().max()) <= 1e-2 * float(before.abs().max())
                tensors[names[0]].view(-1)[0] *= -5  # another direction is another function
                assert float((copy(x) - before).abs().max()) > 1e-6 * float(before.abs().max())


def rescale_statistics(model: nn.Module, layer: str, factor: float) -> None:
    """Of the norm after a layer."""
    after = {"0": "1.running_", "3": "4.running_", "stem": "norm.running_", "one": "norm1.running_",
             "two": "norm2.running_"}.get(layer, "")  # fmt: skip
    if layer == "0" and "2.running_mean" in dict(model.named_buffers()):
        after = "2.running_"
    buffers = dict(model.named_buffers())
    mean, variance = (after + "mean", after + "var") if after else ("centre", "spread")
    buffers[mean].mul_(factor)
    buffers[variance].mul_(factor**2)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_named_networks(case: Any) -> None:
    expected = {
        "resnet_batchnorm": {"stem", "one", "two"}, "conv_zoo": {"2"}, "norms": {"0", "3"},
        "weight_norm": {"0.parametrizations.weight.original1"},
    }  # fmt: skip
    model, x = case.build(), case.batch(6)
    seen = problems.unchanged(model, lambda: scale_free_groups(Network.build(model, x), x))
    assert {group.name for group in seen} == expected.get(case.name, set())


def test_the_tolerance_follows_from_eps() -> None:
    """Small changes are put down to eps; with eps of nought nothing but rounding is."""
    changes = []
    for eps in (1e-3, 1e-5, 1e-7, 0.0):
        model, x = example(
            lambda eps=eps: chain(nn.Linear(4, 6), nn.LayerNorm(6, eps=eps), nn.Tanh(), nn.Linear(6, 3)), VECTOR, D
        )
        (group,) = ignored_scales(model, x)
        changes.append(group.change)
        if eps:
            assert 1e-2 * eps < group.change < 10 * eps
        else:
            assert group.tolerance <= 1e3 * torch.finfo(D).eps
            assert group.change <= tolerance(D)
    assert changes == sorted(changes, reverse=True)


def test_weights_that_are_not_uncertain_are_in_no_group() -> None:
    make, shape, _, _ = FOUND["layer norm"]
    model, x = example(make, shape, D)
    network = Network.build(model, x, lw.named(r"[13456]\."))
    assert [group.name for group in scale_free_groups(network, x)] == ["3"]
    model[3].weight.requires_grad_(False)  # the bias alone has no scale of its own
    assert [group.name for group in ignored_scales(model, x)] == ["0"]


def test_members() -> None:
    make, shape, _, _ = FOUND["layer norm"]
    model, x = example(make, shape, D)
    network = Network.build(model, x)
    expected = dict.fromkeys(network.selection.names, "rest") | {"0.weight": "0", "0.bias": "0", "3.weight": "3",
                                                                "3.bias": "3"}  # fmt: skip
    assert group_names(network, scale_free_groups(network, x)) == expected
    assert group_names(network, ()) == dict.fromkeys(network.selection.names, "rest")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_check_shows_them(dtype: torch.dtype) -> None:
    model, x = example(*FOUND["batch norm"][:2], dtype)
    report = problems.unchanged(model, lambda: lw.check(model, x))
    assert [group.name for group in report.scale_free] == ["0", "3"]
    text = report.details()
    assert "weights whose scale the network ignores (see per_normalised_group):" in text
    assert "  0: scale ignored, with the running statistics after it (0.weight + 0.bias)\n" in text
    plain, x = example(*FOUND["weight norm"][:2], dtype)
    assert "scale ignored (0.parametrizations.weight.original1)" in lw.check(plain, x).details()
    none, x = example(*NONE["tanh"], dtype)
    report = lw.check(none, x)
    assert report.scale_free == ()
    assert "scale" not in str(report)


@pytest.mark.parametrize(
    ("name", "nothing"),
    [("layer norm", True), ("group norm", True), ("RMS norm", True), ("weight norm", True), ("batch norm", False),
     ("batch norm of pictures", False)],
)  # fmt: skip
def test_the_jacobian_along_a_group(name: str, nothing: bool) -> None:
    """J'' w̃'' is nought for a norm of the sample, and not for a batch norm in eval mode: there the statistics are
    constants, so that the function does change with the scale. The tangent model therefore never goes without f - J w̃.
    """
    make, shape, groups, _ = FOUND[name]
    model, x = example(make, shape, D)
    for module in model.modules():
        if hasattr(module, "eps"):
            module.eps = 0.0 if nothing else module.eps
    where, start = {}, 0
    for each, parameter in model.named_parameters():
        where[each] = slice(start, start + parameter.numel())
        start += parameter.numel()
    jac = dense.jacobian(model, x, len(x))
    theta = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    for names in groups.values():
        pieces = [jac[..., where[n]] @ theta[where[n]] for n in names]
        along = float(torch.stack(pieces).sum(0).abs().max())
        size = float(torch.stack([jac[..., where[n]].norm() * theta[where[n]].norm() for n in names]).max())
        assert size > 0.1
        assert along <= 1e-12 * size if nothing else along > 1e-2 * size


@pytest.mark.parametrize("name", ["_saved_eps", "_saved_epsilon"])
def test_eps_of_a_batch_norm_under_either_name(name: str) -> None:
    """cuDNN's node has ``_saved_epsilon`` alone."""
    assert batch_norm_eps(SimpleNamespace(**{name: 0.25})) == 0.25


def test_groups_behind_a_batch_norm_of_cudnn(monkeypatch: pytest.MonkeyPatch) -> None:
    """With nodes as cuDNN has them, the same groups as with PyTorch's own."""
    model = chain(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3)).eval()
    x = torch.randn(9, 4, dtype=torch.float64)
    expected = ignored_scales(model.double(), x)

    class Cudnn:
        def __init__(self, node: Any) -> None:
            self._node, self._saved_epsilon = node, node._saved_eps

        def __getattr__(self, name: str) -> Any:
            if name == "_saved_eps":
                raise AttributeError(name)
            return getattr(self._node, name)

    def disguised(raw: Tensor) -> Any:
        nodes = [Cudnn(n) if "BatchNorm" in n.name() else n for n in read_graph(raw).nodes]
        return SimpleNamespace(nodes=nodes)

    monkeypatch.setattr(normalised, "read_graph", disguised)
    network = Network.build(model, x)
    assert scale_free_groups(network, x) == expected
    assert any(group.statistics for group in expected)
