"""What holds for VaLLA with every optimiser: inputs of all kinds, dtypes, generators, files, untouched models."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lapwing as lw
from lapwing.methods.inducing.points import AnchoredCurvature
from tests import problems
from tests.cases import BY_NAME
from tests.tolerances import SOLVED, assert_close, assert_within
from tests.unit.methods.sine import GIVEN, D, classes, curve, fitted, model

MLP = BY_NAME["mlp"]


METHODS = {
    "none": lw.VaLLA(5, optimiser="none"), "lbfgs": lw.VaLLA(5, optimiser="lbfgs", steps=3),
    "adam": lw.VaLLA(5, optimiser="adam", steps=3), "predicting": lw.VaLLA(5, alpha=1.0, steps=3),
}  # fmt: skip


@cache
def in_context(method: Any, sizes: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Return the covariance at new inputs and the evidence, from twelve data in batches of these sizes."""
    torch.manual_seed(0)
    network, context = problems.InContext().double(), 0.3 * torch.randn(5, 3, dtype=D)
    x, y = torch.randn(12, 3, dtype=D), torch.randn(12, 1, dtype=D)
    data = [((a, context), b) for a, b in problems.split(x, y, sizes)]
    posterior = lw.fit(network, data, GIVEN, method=method, prior=1.0)
    evidence = posterior.log_evidence() if getattr(method, "alpha", 0.0) == 0 else torch.zeros(())
    return posterior.functions((x[:8] + 0.1, context)).cov, evidence


@pytest.mark.parametrize("sizes", [(12,), (6, 6), (7, 5), (4, 4, 4)])
@pytest.mark.parametrize(
    "method",
    [lw.VaLLA(100), lw.VaLLA(5, candidates=5, optimiser="none"), lw.VaLLA(5, steps=4),
     lw.VaLLA(4, alpha=1.0, steps=5, batch_size=6)],
)  # fmt: skip
def test_a_context_for_all_samples(method: lw.VaLLA, sizes: tuple[int, ...]) -> None:
    """The cut into batches does not matter, and with points at all data the posterior is the exact one."""
    cov, evidence = in_context(method, sizes)
    assert_close(cov, in_context(method, (12,))[0], SOLVED)
    if method.num_inducing == 100:
        assert_close(cov, in_context(lw.Full(), (12,))[0], SOLVED)
        assert_close(evidence, in_context(lw.Full(), (12,))[1], SOLVED)


@pytest.mark.parametrize(("precision", "noise", "allowed"), [(1e-4, 0.01, 1e-2), (1e-2, 0.1, 1e-4), (1.0, 0.2, 1e-6)])
def test_all_data_are_exact_under_a_weak_prior_too(precision: float, noise: float, allowed: float) -> None:
    """A small noise and a weak prior make directions with small kernel eigenvalues matter."""
    x = torch.linspace(-3, 3, 120, dtype=D)[:, None]
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(1, 20), nn.Tanh(), nn.Linear(20, 20), nn.Tanh(), nn.Linear(20, 1)).double()
    fit = lambda m: lw.fit(network, [(x, x.sin())], lw.Gaussian(noise_std=noise), method=m, prior=precision)
    posterior, full, new = fit(lw.VaLLA(120)), fit(lw.Full()), torch.linspace(-5, 5, 21, dtype=D)[:, None]
    ratio = posterior.functions(new).variance / full.functions(new).variance
    assert float((ratio - 1).abs().max()) < allowed
    assert float((posterior.log_evidence() - full.log_evidence()).abs()) < allowed
    some = fit(lw.VaLLA(30, optimiser="none")).log_evidence()
    assert float(some) < float(full.log_evidence()) + allowed


@pytest.mark.parametrize("way", [None, "lbfgs", "adam"])
@pytest.mark.parametrize("name", ["embedding", "tuple_input", "dict_input", "token_level"])
def test_inputs_without_a_gradient_keep_their_points(name: str, way: str | None) -> None:
    """For integers and several tensors the points are rows of the data, as with "none"."""
    case = BY_NAME[name]
    fit = lambda o: lw.fit(case.build(), problems.batches(case), problems.likelihood(case), prior=0.8,
                           method=lw.VaLLA(4, optimiser=o, steps=3))  # fmt: skip
    one, other = fit(way), fit("none")
    x = case.batch(3, seed=1)
    assert_close(one.functions(x).cov, other.functions(x).cov)
    assert_close(one.log_evidence(), other.log_evidence())


@pytest.mark.parametrize("alpha", [0.0, 1.0])
def test_fixed_points_learn_the_prior_too(alpha: float) -> None:
    case = BY_NAME["embedding"]
    posterior = lw.fit(case.build(), problems.batches(case), problems.likelihood(case),
                   method=lw.VaLLA(4, alpha=alpha, optimiser="adam", steps=5))  # fmt: skip
    assert float(posterior.prior.values) != 1.0
    assert not posterior.base.curvature.anchors.inputs.is_floating_point()


def test_a_network_without_rules_keeps_its_points_if_asked() -> None:
    case = BY_NAME["weight_norm"]
    fit = lambda o: lw.fit(
        case.build(), problems.batches(case), "classification", prior=0.8, method=lw.VaLLA(4, optimiser=o)
    )
    for way in ("lbfgs", "adam"):
        with pytest.raises(lw.errors.ModelError, match=r"has no rule .* keep the inputs where they are"):
            fit(way)
    assert bool(torch.isfinite(fit("none").functions(case.batch(3)).cov).all())


@pytest.mark.parametrize("way", ["lbfgs", "adam"])
def test_tokens_that_are_numbers(way: str) -> None:
    """Outputs (B, T, C) with inputs that can move."""

    class Tokens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(2, 5), nn.Linear(5, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(torch.tanh(self.a(x)))

    torch.manual_seed(1)
    network, gen = Tokens().double(), torch.Generator().manual_seed(1)
    x, y = torch.randn(6, 4, 2, dtype=D, generator=gen), torch.randint(0, 3, (6, 4), generator=gen)
    fit = lambda m: lw.fit(network, problems.split(x, y, (2, 4)), "classification", method=m, prior=0.8)
    before, after = (fit(lw.VaLLA(4, optimiser=o, steps=20, learning_rate=0.05)) for o in ("none", way))
    assert before.log_evidence() < after.log_evidence() < fit(lw.Full()).log_evidence()
    assert fit(lw.VaLLA(72)).trace is None  # all outputs of all tokens: nothing to learn
    assert_close(fit(lw.VaLLA(72)).log_evidence(), fit(lw.Full()).log_evidence(), SOLVED)


@pytest.mark.parametrize(
    "method",
    [lw.VaLLA(4, start="random"), lw.VaLLA(4, start="kmeans", optimiser="adam", steps=5, batch_size=7),
     lw.VaLLA(4, alpha=1.0, start="random", steps=5, batch_size=7)],
    ids=["lbfgs", "adam", "predicting"],
)  # fmt: skip
def test_the_generator_decides(method: Any) -> None:
    x = torch.linspace(-3, 3, 5, dtype=D)[:, None]
    method = replace(method, steps=3)
    one, two, other = (
        fitted(method, generator=torch.Generator().manual_seed(seed)).functions(x).cov for seed in (1, 1, 2)
    )
    assert_close(one, two, SOLVED)
    assert not torch.allclose(one, other)
    torch.manual_seed(5)
    plain = fitted(method).functions(x).cov
    torch.manual_seed(6)
    assert_close(fitted(method).functions(x).cov, plain, SOLVED)


@pytest.mark.parametrize("seed", [0, 3])
def test_draws_are_independent_of_data_of_the_same_seed(seed: int) -> None:
    """With the random numbers that made the inputs, all chosen inputs would lie at one end."""
    x = torch.rand(500, 1, dtype=D, generator=torch.Generator().manual_seed(seed))
    given = None if seed == 0 else torch.Generator().manual_seed(seed)
    method = lw.VaLLA(20, start="random", optimiser="none", candidates=20)
    points = fitted(method, data=[(x, x)], generator=given).posterior.curvature.anchors.inputs
    assert float(points.min()) < 0.3
    assert float(points.max()) > 0.7


@pytest.mark.parametrize("way", ["none", "lbfgs", "adam"])
def test_float32(way: str) -> None:
    data = [tuple(t.float() for t in curve())]
    single = fitted(lw.VaLLA(5, optimiser=way, steps=10), model=model().float(), data=data)
    x = torch.linspace(-2, 2, 9)[:, None]
    assert single.functions(x).cov.dtype == torch.float32
    assert single.posterior.curvature.anchors.inputs.dtype == torch.float32
    wide = fitted(lw.VaLLA(5, optimiser=way, steps=10), model=model().float().double(),
                  data=[tuple(t.double() for t in data[0])])  # fmt: skip
    allowed = {"none": 1e-3, "lbfgs": 0.05, "adam": 0.05}[way]  # rounding changes the path of a search
    assert float(single.log_evidence()) == pytest.approx(float(wide.log_evidence()), rel=allowed)
    predicted = fitted(lw.VaLLA(5, alpha=1.0, steps=5), model=model().float(), data=data).predict(x)
    assert predicted.std.dtype == torch.float32
    assert bool(torch.isfinite(predicted.std).all())


@pytest.mark.parametrize(
    "options", [{"steps": 20}, {"optimiser": "adam", "steps": 20}, {"alpha": 1.0, "steps": 20}], ids=str
)
def test_half_precision_gives_the_points_of_single_precision(options: dict[str, Any]) -> None:
    torch.manual_seed(1)
    small = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 1)).half()
    whole = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 1))
    whole.load_state_dict(small.state_dict())
    x, y = torch.randn(40, 3).half(), torch.randn(40, 1).half()
    given: dict[str, Any] = {"likelihood": lw.Gaussian(noise_std=0.5), "prior": 1.0, "method": lw.VaLLA(5, **options)}
    std = lw.fit(small, [(x, y)], **given).functions(x).std
    expected = lw.fit(whole, [(x.float(), y.float())], **given).functions(x.float()).std
    torch.testing.assert_close(std, expected, rtol=0.01, atol=0.01)


@pytest.mark.parametrize("method", METHODS)
def test_joint_beliefs_and_samples(method: str, generator: torch.Generator) -> None:
    """Three correlated outputs: the blocks of the joint covariance, and draws with that covariance."""
    x, y = classes()
    posterior = lw.fit(MLP.build(), [(x, y)], "classification", method=METHODS[method], prior=0.5)
    new = x[:2]
    joint, belief = posterior.functions(new, joint=True), posterior.functions(new)
    whole = joint.cov.reshape(6, 6)
    assert_close(torch.stack([whole[:3, :3], whole[3:, 3:]]), belief.cov)
    assert float(torch.linalg.eigvalsh(whole).min()) > 0
    gap = (posterior.function_samples(new, 3000, generator) - joint.mean).flatten(1)
    assert_within(gap[:, :, None] * gap[:, None, :], whole)
    probs = posterior.predict(new).probs
    assert_close(probs.sum(1), torch.ones(2, dtype=D))


@pytest.mark.parametrize("method", METHODS)
def test_files(method: str, tmp_path: Path) -> None:
    x, y = classes()
    posterior = lw.fit(MLP.build(), [(x, y)], "classification", method=METHODS[method])
    posterior.save(tmp_path / "it")
    again = lw.load(tmp_path / "it", MLP.build())
    assert torch.equal(again.base.curvature.mix, posterior.base.curvature.mix)
    assert torch.equal(again.base.curvature.anchors.inputs, posterior.base.curvature.anchors.inputs)
    assert_close(again.predict(x).probs, posterior.predict(x).probs)
    assert_close(again.functions(x, joint=True).cov, posterior.functions(x, joint=True).cov)
    assert isinstance(again.base.curvature, AnchoredCurvature)
    if method != "predicting":
        assert_close(again.log_evidence(), posterior.log_evidence())
        assert_close(again.with_prior(3.0).functions(x).cov, posterior.with_prior(3.0).functions(x).cov)


# Every network with VaLLA is in tests/conformance/test_every_method.py; here are other ways of learning.
SOME = ["mlp", "cnn", "resnet_batchnorm", "lstm", "embedding", "squeezed", "dict_input"]
PAIRS = [(case, method) for case in SOME for method in ("lbfgs", "adam", "predicting")]


@pytest.mark.parametrize(("case", "method"), PAIRS)
def test_the_model_is_left_as_it_was(case: str, method: str) -> None:
    """Its gradients too: the graph of the bound contains the weights."""
    chosen = BY_NAME[case]
    network = chosen.build()
    prior = None if case == "mlp" else 0.8  # the prior is learned in the same way for all of them

    def run() -> None:
        options: dict[str, Any] = {"method": replace(METHODS[method], steps=2), "prior": prior}
        posterior = lw.fit(network, problems.batches(chosen), problems.likelihood(chosen), **options)
        posterior.functions(chosen.batch(3, seed=1), joint=True)

    problems.unchanged(network, run)


@pytest.mark.parametrize("around", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("method", METHODS)
def test_surroundings_without_gradients(method: str, around: Any) -> None:
    x = torch.linspace(-3, 3, 5, dtype=D)[:, None]
    expected, network, data = fitted(METHODS[method]).functions(x).cov, model(), [curve()]
    with around():
        cov = fitted(METHODS[method], model=network, data=data).functions(x).cov
    assert_close(cov, expected)
