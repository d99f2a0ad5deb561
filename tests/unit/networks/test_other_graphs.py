"""Models whose graph changes from batch to batch, and models that keep what they computed from their weights."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lapwing as lw
from lapwing import errors
from lapwing.networks.network import Network
from lapwing.networks.ops import Operation, Slope, entries, register, row_wise
from tests.cases import Wrapped
from tests.references import dense
from tests.tolerances import SOLVED, assert_close

D = torch.float64


def parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape))


def by_rows(model: nn.Module, x: Tensor) -> Tensor:
    """The Jacobian (B, C, P) of the outputs of a whole batch, one backward pass for each number."""
    f = dense.output(model, x)
    options = {"retain_graph": True, "allow_unused": True, "materialize_grads": True}
    each = [torch.autograd.grad(value, list(model.parameters()), **options) for value in f.reshape(-1)]
    return torch.stack([torch.cat([g.reshape(-1) for g in grads]) for grads in each]).reshape(*f.shape, -1)


def convolution(s: Any, x: Tensor) -> Tensor:
    product = lambda: (s.c.weight.flatten(1) @ F.unfold(x, 3) + s.c.bias[:, None]).unflatten(2, (2, 2))
    return s.h(torch.tanh(s.c(x) if len(x) > 2 else product()).mean((2, 3)))


def norm(s: Any, x: Tensor) -> Tensor:
    h = s.l(x)
    if len(x) > 2:
        return s.h(torch.tanh(s.n(h)))
    h = (h - h.mean(-1, keepdim=True)) / (h.var(-1, unbiased=False, keepdim=True) + s.n.eps).sqrt()
    return s.h(torch.tanh(h * s.n.weight + s.n.bias))


def experts(s: Any, x: Tensor) -> Tensor:
    """Hard routing: an expert without a sample is not run."""
    chosen, out = (x[:, 0] > 0.3).long() + (x[:, 0] > 0.9).long(), x.new_zeros(len(x), 2)
    for number, expert in enumerate(s.e):
        rows = (chosen == number).nonzero()[:, 0]
        if len(rows):
            out = out.index_add(0, rows, expert(x[rows]))
    return out


def lora(s: Any, x: Tensor) -> Tensor:
    if len(x) > 2:
        return s.h(torch.tanh(s.l(x) + x @ s.a.T @ s.b.T))
    return s.h(torch.tanh(F.linear(x, s.l.weight + s.b @ s.a, s.l.bias)))  # merged


def lengths(s: Any, x: Tensor) -> Tensor:
    h = F.linear(x, s.w) if x.shape[1] < 4 else torch.einsum("btd,od->bto", x, s.w * 1.0)
    return torch.tanh(h).mean(1) @ s.h


Case = tuple[Callable[[], nn.Module], Callable[[int], Tensor]]
CASES: dict[str, Case] = {
    "one sample": (
        lambda: Wrapped(
            lambda s, x: (s.w @ x[0] + s.b)[None] if len(x) == 1 else F.linear(x, s.w, s.b),
            w=parameter(3, 4), b=parameter(3),
        ), lambda n: torch.randn(n, 4),
    ),
    "bias apart": (
        lambda: Wrapped(
            lambda s, x: F.linear(x, s.w, s.b) if len(x) > 2 else 2 * (x @ s.w.T) + 3 * s.b - x @ s.w.T,
            w=parameter(3, 4), b=parameter(3),
        ), lambda n: torch.randn(n, 4),
    ),
    "other orientation": (
        lambda: Wrapped(
            lambda s, x: x @ s.w if len(x) > 2 else F.linear(x, s.w.T.contiguous()), w=parameter(4, 3)
        ), lambda n: torch.randn(n, 4),
    ),
    "lookup": (
        lambda: Wrapped(
            lambda s, t: torch.tanh(F.one_hot(t, 7).to(s.h) @ s.e.weight if len(t) > 2 else s.e(t)).mean(1) @ s.h,
            e=nn.Embedding(7, 5), h=parameter(5, 2),
        ), lambda n: torch.randint(0, 7, (n, 3)),
    ),
    "convolution": (
        lambda: Wrapped(convolution, c=nn.Conv2d(2, 4, 3), h=nn.Linear(4, 3)), lambda n: torch.randn(n, 2, 4, 4),
    ),
    "norm": (
        lambda: Wrapped(norm, l=nn.Linear(4, 5), n=nn.LayerNorm(5), h=nn.Linear(5, 2)), lambda n: torch.randn(n, 4),
    ),
    "experts": (
        lambda: Wrapped(
            experts,
            e=nn.ModuleList(nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)) for _ in range(3)),
        ), lambda n: torch.randn(n, 4) - 2.0 * (n > 5),
    ),
    "merged": (
        lambda: Wrapped(lora, l=nn.Linear(4, 5), a=parameter(2, 4), b=parameter(5, 2), h=nn.Linear(5, 2)),
        lambda n: torch.randn(n, 4),
    ),
}  # fmt: skip
METHODS = [lw.Full(), lw.Diagonal(), lw.KernelSpace(), lw.Kron()]


@pytest.mark.parametrize("method", METHODS, ids=lambda m: type(m).__name__)
@pytest.mark.parametrize("name", CASES)
def test_every_batch_gets_the_jacobian_of_its_own_graph(name: str, method: Any) -> None:
    torch.manual_seed(1)
    model, make = CASES[name][0]().to(D), CASES[name][1]
    cast = lambda x: x.to(D) if x.is_floating_point() else x
    inputs = [cast(make(n)) for n in (6, 1, 2, 5)]
    jac = by_rows(model, inputs[0])
    data = [(inputs[0], torch.randn(jac.shape[:2], dtype=D))]
    posterior = lw.fit(model, data, lw.Gaussian(0.5), method=method, prior=1.0)
    lam = torch.einsum("bcp,bcq->pq", jac, jac) / 0.25 + torch.eye(jac.shape[-1], dtype=D)
    for x in inputs:
        j = by_rows(model, x)
        if isinstance(method, lw.Kron):
            solved = posterior.posterior.precision.solve(j.flatten(0, 1)).reshape(j.shape)
        else:
            solved = torch.linalg.solve(lam.diag().diag() if isinstance(method, lw.Diagonal) else lam, j.mT).mT
        assert_close(posterior.functions(x).cov, j @ solved.mT, SOLVED)


def test_kronecker_factors_of_two_operations_are_refused_and_full_takes_both() -> None:
    torch.manual_seed(0)
    model = Wrapped(lengths, w=parameter(5, 4), h=parameter(5, 2)).to(D)
    data = [(torch.randn(6, t, 4, dtype=D), torch.randn(6, 2, dtype=D)) for t in (3, 7)]
    with pytest.raises(errors.ModelError, match=r"'w' in another way.*Full\(\)"):
        lw.fit(model, data, lw.Gaussian(0.5), prior=1.0)
    jac = torch.cat([by_rows(model, x) for x, _ in data])
    lam = torch.einsum("bcp,bcq->pq", jac, jac) / 0.25 + torch.eye(jac.shape[-1], dtype=D)
    posterior = lw.fit(model, data, lw.Gaussian(0.5), method=lw.Full(), prior=1.0)
    cov = torch.cat([posterior.functions(x).cov for x, _ in data])
    assert_close(cov, jac @ torch.linalg.solve(lam, jac.mT), SOLVED)


def test_a_wrong_rule_is_refused_and_names_the_parameter() -> None:
    """The comparison with autograd does not depend on the cause: here an entry of the table has half of the slope."""
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)).to(D)
    x, right = torch.randn(5, 4, dtype=D), entries()["TanhBackward0"]
    wrong = Slope(lambda node: 0.5 * (1 - node._saved_result.square()))
    network = Network.build(model, x)
    register(Operation("TanhBackward0", rows=row_wise, gradient=wrong))
    try:
        with pytest.raises(errors.ModelError, match=r"Jacobian of '0\.weight'.*differs from autograd's by 0\.5 of"):
            network.linearise(x).jacobians()
    finally:
        register(right)
    network.linearise(x).jacobians()


class Kept(nn.Module):
    """A network that computes a weight from another once and keeps it."""

    def __init__(self, way: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.l, self.h = nn.Linear(3, 4), nn.Linear(4, 2)
        self.way, self.c, self.d, box = way, None, dict[str, Tensor](), dict[str, Tensor]()
        self.closure = lambda w: box.setdefault("w", 2 * w)

    def forward(self, x: Tensor) -> Tensor:
        if self.way == "closure":
            w = self.closure(self.l.weight)
        elif self.way == "dictionary":
            w = self.d.setdefault("w", 2 * self.l.weight)
        else:
            if self.c is None:
                self.c = 2 * (self.l.weight.detach() if self.way == "detached" else self.l.weight)
            w = self.c
        return self.h(torch.tanh(F.linear(x, w, self.l.bias)))


X = torch.randn(20, 3, generator=torch.Generator().manual_seed(0))
DATA = [(X, torch.arange(20) % 2)]


@pytest.mark.parametrize("way", ["attribute", "dictionary"])
def test_a_weight_that_a_run_keeps_is_computed_in_every_run(way: str) -> None:
    model = Kept(way)
    always = Wrapped(lambda s, x: s.h(torch.tanh(F.linear(x, 2 * s.l.weight, s.l.bias))), l=model.l, h=model.h)
    fits = [lw.fit(each, DATA, "classification", method=lw.Full(), prior=1.0) for each in (model, always)]
    for _ in range(2):
        assert_close(fits[0].functions(X).cov, fits[1].functions(X).cov, SOLVED)
    v = torch.ones(1, fits[0].network.selection.size)
    assert_close(fits[0].network.jvp(X, v), fits[1].network.jvp(X, v))
    assert_close(fits[0].network.at(v[0], X), fits[1].network.at(v[0], X))
    assert model.c is None
    assert not model.d


@pytest.mark.parametrize(
    ("way", "before"),
    [
        ("attribute", torch.no_grad), ("attribute", torch.enable_grad), ("dictionary", torch.no_grad),
        ("closure", None), ("closure", torch.enable_grad), ("detached", None), ("detached", torch.no_grad),
    ],
)  # fmt: skip
def test_a_weight_that_was_kept_before_the_fit_is_refused(way: str, before: Any) -> None:
    model = Kept(way)
    if before is not None:
        with before():
            model(X)
    with pytest.raises(errors.ModelError, match=r"keeps a value that it computed from 'l\.weight'.*every forward"):
        lw.fit(model, DATA, "classification", method=lw.Full(), prior=1.0)


def test_constants_and_masks_beside_the_parameters_are_no_fault() -> None:
    class Constant(nn.Linear):
        scale, last, mask = torch.ones(3), None, None  # type: ignore[assignment]

        def forward(self, x: Tensor) -> Tensor:
            self.last = super().forward(x * self.scale)
            if self.mask is None:
                self.mask = torch.ones(2)
            return self.last * self.mask

    model, plain = Constant(3, 2), nn.Linear(3, 2)
    model.scale, model.first = torch.ones(3), torch.randn(5)
    plain.load_state_dict(model.state_dict())
    model(X)
    fits = [lw.fit(each, DATA, "classification", method=lw.Full(), prior=1.0) for each in (model, plain)]
    assert_close(fits[0].functions(X).cov, fits[1].functions(X).cov, SOLVED)


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def exported(dynamic: bool) -> nn.Module:
    shapes = ({0: torch.export.Dim("batch")},) if dynamic else None
    return torch.export.export(mlp(), (X,), dynamic_shapes=shapes).module()


@pytest.mark.parametrize("made", [lambda: torch.fx.symbolic_trace(mlp()), lambda: exported(True)], ids=["fx", "export"])
def test_traced_graphs_give_the_numbers_of_the_model(made: Callable[[], nn.Module]) -> None:
    fits = [lw.fit(each, DATA, "classification", prior=1.0) for each in (made(), mlp())]
    assert_close(fits[0].functions(X[:3]).cov, fits[1].functions(X[:3]).cov)
    assert_close(fits[0].network.jvp(X, torch.ones(1, 26)), fits[1].network.jvp(X, torch.ones(1, 26)))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.LSTM(3, 4, batch_first=True), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x[:, None])[0][:, -1])


def made_for_inference() -> nn.Module:
    with torch.inference_mode():
        return mlp()


def spare(value: float) -> nn.Module:
    return Wrapped(lambda s, x: s.l(x), l=nn.Linear(3, 2), u=nn.Parameter(torch.full((3,), value)))


SCRIPTED = pytest.mark.filterwarnings("ignore:.*torch.jit")
UNUSABLE: dict[str, tuple[Callable[[], nn.Module], type[Exception], str]] = {
    "scripted": (lambda: torch.jit.script(mlp()), errors.ModelError, "the model is made by torch.jit.*load_state_dict"),
    "scripted part": (
        lambda: nn.Sequential(torch.jit.script(nn.Linear(3, 4)), nn.Tanh(), nn.Linear(4, 2)),
        errors.ModelError, r"^0 is made by torch.jit",
    ),
    "scripted LSTM": (lambda: torch.jit.script(Recurrent()), errors.ModelError, "made by torch.jit"),
    "traced": (lambda: torch.jit.trace(mlp(), X), errors.ModelError, "made by torch.jit"),
    "exported": (lambda: exported(False), errors.InputError, "dynamic_shapes"),
    "inference mode": (made_for_inference, errors.ModelError, r"'0\.weight'.*inference_mode.*deepcopy"),
    "lazy": (lambda: nn.Sequential(nn.LazyLinear(2)), errors.ModelError, r"'0\.weight'.*Run the model on a batch"),
    "unused NaN": (lambda: spare(torch.nan), errors.ModelError, "'u'.*NaN or infinite.*requires_grad_"),
}  # fmt: skip


@SCRIPTED
@pytest.mark.parametrize("name", UNUSABLE)
def test_unusable_modules_are_refused_with_the_remedy(name: str) -> None:
    make, error, message = UNUSABLE[name]
    with pytest.raises(error, match=message):
        lw.fit(make(), DATA, "classification", prior=1.0)


def test_the_remedies_work() -> None:
    frozen = spare(torch.nan)
    frozen.u.requires_grad_(False)
    for model in (copy.deepcopy(made_for_inference()), frozen):
        posterior = lw.fit(model, DATA, "classification", prior=1.0)
        assert bool(posterior.functions(X).variance.isfinite().all())
