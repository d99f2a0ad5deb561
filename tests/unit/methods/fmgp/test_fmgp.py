"""Settings and predictions of the fixed-mean process."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lapwing as lw
from lapwing.methods.fmgp import FreeKernel
from lapwing.registry import named
from tests import problems
from tests.cases import BY_NAME, CASES
from tests.tolerances import assert_close, assert_within
from tests.unit.methods.fmgp.tasks import classes, confident, curve, fitted, learned, model
from tests.unit.methods.sine import NOISE

D = torch.float64


MLP = BY_NAME["mlp"]


def test_far_from_the_data_the_variance_is_the_priors() -> None:
    posterior = learned()
    x, _ = curve()
    prior = float(posterior.posterior.kernel.outputs[0, 0])
    far = torch.tensor([[-1e3], [1e3]], dtype=D)
    assert_close(posterior.functions(far).variance, torch.full((2, 1), prior, dtype=D))
    assert float(posterior.functions(x).variance.mean()) < 0.15 * prior
    assert_close(posterior.functions(x).mean, model()(x))


def test_features_grow_without_end() -> None:
    """Linear in what the last layer sees: no bound where that has none."""
    network = nn.Sequential(nn.Linear(1, 4), nn.ReLU(), nn.Linear(4, 1)).double()
    x = torch.linspace(-1, 1, 30, dtype=D)[:, None]
    posterior = lw.fit(network, [(x, x.sin())], "regression", method=lw.FMGP(8, kernel="features", steps=50))
    near, far = (float(posterior.functions(scale * torch.ones(1, 1, dtype=D)).variance) for scale in (1.0, 1e3))
    assert far > 1e3 * near


def test_held_out_regression_is_better_than_the_plain_network() -> None:
    """Which knows of no doubt beyond its data."""
    gen = torch.Generator().manual_seed(5)
    x = 8 * torch.rand(200, 1, dtype=D, generator=gen) - 4
    y = (2 * x).sin() + NOISE * torch.randn(200, 1, dtype=D, generator=gen)
    posterior, plain = learned(), fitted(lw.baselines.MapOnly())
    score = [float(p.predict(x).log_prob(y).mean()) for p in (posterior, plain)]
    assert score[0] > score[1] + 0.5
    inside = (x.abs() < 2)[:, 0]
    near = [float(p.predict(x[inside]).log_prob(y[inside]).mean()) for p in (posterior, plain)]
    assert near[0] > near[1] - 0.05


@pytest.mark.parametrize("kernel", [None, "rbf"])
def test_held_out_classes_are_better_than_the_plain_network(kernel: str | None) -> None:
    x, y = classes(300, 7)
    posterior = lw.fit(confident(), [classes()], "classification", method=lw.FMGP(20, kernel=kernel, steps=120))
    plain = lw.fit(confident(), [classes()], "classification", method=lw.baselines.MapOnly())
    assert posterior.posterior.kernel.kind == (kernel or "features")
    assert float(posterior.predict(x).log_prob(y).mean()) > float(plain.predict(x).log_prob(y).mean())
    assert_close(posterior.functions(x).mean, plain.functions(x).mean)


@pytest.mark.parametrize("likelihood", [lw.Bernoulli(), lw.Poisson()], ids=["labels", "counts"])
def test_other_likelihoods(likelihood: Any) -> None:
    x, _ = classes()
    targets = (x[:, :1] + torch.arange(3) > 0).double()
    posterior = lw.fit(confident(), [(x, targets)], likelihood, method=lw.FMGP(9, steps=40))
    plain = lw.fit(confident(), [(x, targets)], likelihood, method=lw.baselines.MapOnly())
    assert float(posterior.predict(x).log_prob(targets).mean()) > float(plain.predict(x).log_prob(targets).mean())


@pytest.mark.parametrize("likelihood", [lw.Categorical(class_weights=(3.0, 1.0, 1.0)), lw.Categorical(temperature=0.1)])
def test_weights_that_would_have_no_say_are_refused(likelihood: Any) -> None:
    with pytest.raises(lw.errors.UnsupportedError, match=r"of Categorical is .* Use VaLLA\(alpha=0\)"):
        lw.fit(confident(), [classes()], likelihood, method=lw.FMGP(6, steps=3))


def test_the_network_runs_once_over_the_data() -> None:
    """Steps do without it, however many there are."""
    counts = []
    for steps in (3, 50):
        seen, network = [0], model()
        network.register_forward_pre_hook(lambda _, args, seen=seen: seen.__setitem__(0, seen[0] + len(args[0])))
        fitted(lw.FMGP(10, steps=steps), model=network)
        counts.append(seen[0])
    before, network = [0], model()
    network.register_forward_pre_hook(lambda _, args: before.__setitem__(0, before[0] + len(args[0])))
    fitted(lw.baselines.MapOnly(), model=network)  # one pass too
    assert counts[0] == counts[1] == before[0]


def test_joint_beliefs_and_samples(generator: torch.Generator) -> None:
    """Outputs that hang together in a lopsided way: draws have L Lᵀ, which is far from Lᵀ L."""
    x, y = classes()
    plain = lw.fit(confident(), [(x, y)], "classification", method=lw.FMGP(6, steps=5))
    mixing = torch.tensor([[3.0, 0.0, 0.0], [2.5, 0.1, 0.0], [0.0, 0.3, 0.2]], dtype=D)
    kernel = FreeKernel(plain.posterior.kernel.kind, plain.posterior.kernel.log_lengths, mixing)
    posterior = replace(plain.posterior, kernel=kernel, mix=1e-3 * plain.posterior.mix)
    found = lw.Fitted(posterior, plain.fingerprint)
    joint, belief = found.functions(x[:2], joint=True), found.functions(x[:2])
    whole = joint.cov.reshape(6, 6)
    assert_close(torch.stack([whole[:3, :3], whole[3:, 3:]]), belief.cov)
    assert_close(joint.variance, belief.variance)
    root = torch.linalg.cholesky(belief.cov)
    assert float((root.mT @ root - belief.cov).abs().max()) > 0.5 * float(belief.cov.abs().max())
    gap = (found.function_samples(x[:2], 3000, generator) - joint.mean).flatten(1)
    assert_within(gap[:, :, None] * gap[:, None, :], whole)
    apart = belief.sample(3000, generator) - belief.mean
    assert_within(apart[..., :, None] * apart[..., None, :], belief.cov)


@pytest.mark.parametrize("kernel", ["rbf", "features"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_files(kernel: str, dtype: torch.dtype, tmp_path: Path) -> None:
    x, y = (t.to(dtype) if t.is_floating_point() else t for t in classes())
    network = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 3)).to(dtype)
    network.load_state_dict(confident().state_dict())
    posterior = lw.fit(network, [(x, y)], "classification", method=lw.FMGP(9, kernel=kernel, steps=10))
    problems.unchanged(network, lambda: posterior.save(tmp_path / "it"))
    again = lw.load(tmp_path / "it", network)
    assert torch.equal(again.predict(x).probs, posterior.predict(x).probs)
    assert torch.equal(again.functions(x, joint=True).cov, posterior.functions(x, joint=True).cov)
    draws = [p.function_samples(x, 3, torch.Generator().manual_seed(1)) for p in (posterior, again)]
    assert torch.equal(*draws)
    other = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 3)).to(dtype)
    with pytest.raises(lw.errors.FileError, match="belongs to another model"):
        lw.load(tmp_path / "it", other)


def test_float32() -> None:
    data = [tuple(t.float() for t in curve())]
    posterior = fitted(lw.FMGP(10, steps=30), model=model().float(), data=data)
    x = torch.linspace(-3, 3, 9)[:, None]
    assert posterior.functions(x).cov.dtype == torch.float32
    wide = fitted(lw.FMGP(10, steps=30), model=model().float().double(), data=[tuple(t.double() for t in data[0])])
    assert_close(posterior.functions(x).cov, wide.functions(x.double()).cov, 0.35)


def test_the_generator_decides() -> None:
    x = torch.linspace(-3, 3, 9, dtype=D)[:, None]
    fit = lambda seed: fitted(lw.FMGP(6, steps=10, batch_size=7), generator=torch.Generator().manual_seed(seed))
    one, two, other = (fit(seed).functions(x).cov for seed in (1, 1, 2))
    assert torch.equal(one, two)
    assert not torch.equal(one, other)
    plain = [fitted(lw.FMGP(6, steps=10, batch_size=7)).functions(x).cov for _ in range(2)]
    assert torch.equal(*plain)


def test_many_outputs_build_the_covariance_only_when_asked() -> None:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 37)).double()
    x, y = torch.randn(40, 3, dtype=D), torch.randint(0, 37, (40,))
    posterior = lw.fit(network, [(x, y)], "classification", method=lw.FMGP(20, steps=5))
    variance, cov = posterior.functions(x).variance, posterior.functions(x).cov
    assert cov.shape == (40, 37, 37)
    assert_close(variance, cov.diagonal(dim1=1, dim2=2))
    assert not variance.requires_grad


@pytest.mark.parametrize("count", [1, 1000])
def test_few_data_and_many_points(count: int) -> None:
    """No more points than data; one datum is enough."""
    x, y = curve()
    for size in (1, 5):
        posterior = fitted(lw.FMGP(count, steps=5), lw.Gaussian(noise_std=0.3), data=[(x[:size], y[:size])])
        assert len(posterior.posterior.points) == min(count, size)
        assert bool(torch.isfinite(posterior.functions(x).cov).all())


@pytest.mark.parametrize("around", [torch.no_grad, torch.inference_mode])
def test_surroundings_without_gradients(around: Any) -> None:
    x = torch.linspace(-3, 3, 5, dtype=D)[:, None]
    expected, network, data = fitted(lw.FMGP(6, steps=5)).functions(x).cov, model(), [curve()]
    with around():
        cov = fitted(lw.FMGP(6, steps=5), model=network, data=data).functions(x).cov
    assert_close(cov, expected)


ODD = ("conv1d", "sdpa", "tied", "free_parameter", "token_level")  # no features, see the tests of those


@pytest.mark.parametrize("case", [case.name for case in CASES if case.name not in ODD])
def test_the_model_is_left_as_it_was(case: str) -> None:
    chosen = BY_NAME[case]
    network = chosen.build()
    method = lw.FMGP(4, kernel="features", steps=3)

    def run() -> None:
        posterior = lw.fit(network, problems.batches(chosen), problems.likelihood(chosen), method=method)
        posterior.functions(chosen.batch(3, seed=1), joint=True)
        posterior.function_samples(chosen.batch(3, seed=1), 2)
        posterior.predict(chosen.batch(3, seed=1))

    problems.unchanged(network, run)


def test_progress_shows_the_objective(capsys: pytest.CaptureFixture[str]) -> None:
    loud = fitted(lw.FMGP(6, steps=5), progress=True)
    assert "fixed-mean process" in capsys.readouterr().err
    quiet = fitted(lw.FMGP(6, steps=5), progress=False)
    assert capsys.readouterr().err == ""
    assert torch.equal(loud.functions(curve()[0]).cov, quiet.functions(curve()[0]).cov)


def test_the_prior_over_weights_has_no_say() -> None:
    x = curve()[0]
    one, other = (fitted(lw.FMGP(6, steps=5), prior=prior).functions(x).cov for prior in (None, 30.0))
    assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_inducing": 0}, "num_inducing is 0; expected at least 1"),
        ({"num_inducing": True}, "num_inducing is True; expected an integer"),
        ({"steps": 0}, "steps is 0; expected at least 1"),
        ({"steps": 3.5}, "steps is 3.5; expected an integer"),
        ({"batch_size": 2.5}, "batch_size is 2.5; expected an integer"),
        ({"learning_rate": math.inf}, "learning_rate is inf; expected a positive, finite number"),
        ({"batch_size": 0}, "batch_size is 0; expected at least 1"),
        ({"patience": 0}, "patience is 0; expected at least 1"),
        ({"learning_rate": -1.0}, "learning_rate is -1.0; expected a positive, finite number"),
        ({"learning_rate": math.nan}, "learning_rate is nan; expected a positive, finite number"),
        ({"kernel": "matern"}, "kernel is 'matern'; expected one of rbf, features"),
    ],
)
def test_settings_that_do_not_fit(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(lw.errors.UnsupportedError, match=message):
        lw.FMGP(**settings)


def test_tokens_are_refused() -> None:
    case = BY_NAME["token_level"]
    with pytest.raises(lw.errors.UnsupportedError, match=r"FMGP\(\) takes outputs \(B, C\), not tokens \(B, T, C\)"):
        lw.fit(case.build(), problems.batches(case), "classification", method=lw.FMGP())


@pytest.mark.parametrize("name", ["embedding", "tuple_input"])
def test_distances_need_numbers(name: str) -> None:
    case = BY_NAME[name]
    with pytest.raises(
        lw.errors.UnsupportedError, match="needs inputs that are one tensor of real numbers; use kernel='features'"
    ):
        lw.fit(case.build(), problems.batches(case), "classification", method=lw.FMGP(kernel="rbf"))


def test_draws_and_ignored_targets_are_refused() -> None:
    x, y = classes()
    with pytest.raises(lw.errors.UnsupportedError, match="no gradient to learn by"):
        lw.fit(confident(), [(x, y)], lw.Categorical(link="mc"), method=lw.FMGP())
    some = y.clone()
    some[3] = -100
    with pytest.raises(lw.errors.DataError, match="some targets are ignored ones"):
        lw.fit(confident(), [(x, some)], "classification", method=lw.FMGP(steps=3))


def test_it_is_no_laplace_posterior() -> None:
    """No weights, no evidence, no prior over weights: each is refused in words."""
    posterior = fitted(lw.FMGP(6, steps=5))
    x = curve()[0]
    for ask in (
        posterior.log_evidence, posterior.effective_parameters, posterior.tuned,
        lambda: posterior.tuned(lw.tuners.FixedPoint()),
        lambda: posterior.tuned(lw.tuners.Grid([curve()])),
        lambda: posterior.weight_samples(2), lambda: posterior.network_samples(x, 2),
        lambda: posterior.with_prior(2.0),
    ):  # fmt: skip
        with pytest.raises(lw.errors.UnsupportedError, match=r"(FMGP|FunctionPosterior) has no"):
            ask()


def test_the_methods_name() -> None:
    assert named("method", "fmgp") == lw.FMGP()


def test_data_that_ask_for_gradients() -> None:
    x, y = curve()
    method = lw.FMGP(5, steps=20)
    expected = lw.fit(model(), [(x, y)], "regression", method=method).functions(x).std
    free = [(x.clone().requires_grad_(), y.clone().requires_grad_())]
    assert torch.equal(lw.fit(model(), free, "regression", method=method).functions(x).std, expected)
