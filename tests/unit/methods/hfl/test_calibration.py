"""The factor on the scores of "pretrained", fitted on held-out data."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import lapwing as lw
from tests.minima import held_out, new, pretrained, small
from tests.tolerances import assert_close

D = torch.float64


@pytest.mark.parametrize("variant", ["mean", "absolute", "random"])
def test_calibration_maximises_the_held_out_likelihood(variant: str) -> None:
    """Over the factor on the variances: no point of a fine grid is better."""
    energy = small()
    held = held_out(energy)
    plain = pretrained(energy, variant=variant, pushes=8)
    scaled = pretrained(energy, variant=variant, pushes=8, calibration=held)
    x, y = torch.cat([a for a, _ in held]), torch.cat([b for _, b in held])
    belief = plain.functions(x)

    def likelihood(scale: float) -> float:
        spread = (scale * belief.variance + energy.phi).sqrt()
        return float(torch.distributions.Normal(belief.mean, spread).log_prob(y).sum())

    best = scaled.posterior.scale
    grid = torch.logspace(-2, 3, 501, dtype=D).tolist()
    near = (best * torch.linspace(0.9, 1.1, 21, dtype=D)).tolist()
    assert all(likelihood(best) >= likelihood(scale) - 1e-9 for scale in (*grid, *near))
    assert abs(best - 1) > 0.05
    assert_close(scaled.functions(x).variance, best * belief.variance)


def test_calibration_of_classes() -> None:
    energy = small("categorical", 3)
    gen = torch.Generator().manual_seed(9)
    x = 1.5 * torch.randn(60, 2, dtype=D, generator=gen)
    y = energy.model(x).argmax(1)
    y[:12] = torch.randint(0, 3, (12,), generator=gen)  # some that nothing foretells
    plain = pretrained(energy, variant="absolute")
    scaled = pretrained(energy, variant="absolute", calibration=[(x, y)])
    assert 0.01 < scaled.posterior.scale < 100
    score = lambda factor: float(
        lw.Fitted(replace(plain.posterior, scale=factor), plain.fingerprint).predict(x).log_prob(y).sum()
    )
    best = score(scaled.posterior.scale)
    assert all(best >= score(scaled.posterior.scale * factor) - 1e-6 for factor in (0.5, 0.9, 0.98, 1.02, 1.1, 2.0))


def test_calibration_data_that_want_no_variance_are_told(tmp_path: Path) -> None:
    """Targets that are the outputs: any variance at all makes them less likely."""
    energy = small()
    held = held_out(energy, noise=0.0)
    posterior = pretrained(energy, calibration=held)
    (finding,) = posterior.posterior.findings
    edge = f"calibration reached the edge of the scale search at {posterior.posterior.scale:.2g}; the data ask for "
    assert finding.startswith(edge + "variances of zero: the network is calibrated, or too uncertain")
    assert posterior.posterior.scale == pytest.approx(math.exp(-12), rel=0.7)
    posterior.save(tmp_path / "it")
    assert lw.load(tmp_path / "it", energy.model).posterior.findings == (finding,)
    assert pretrained(energy, calibration=held_out(energy)).posterior.findings == ()


def test_calibration_classes_that_are_all_right_want_no_variance() -> None:
    energy = small("categorical", 3)
    x = new(energy, 40)
    (finding,) = pretrained(energy, calibration=[(x, energy.model(x).argmax(1))]).posterior.findings
    assert "the data ask for variances of zero" in finding


def test_calibration_data_that_want_ever_more_are_told() -> None:
    """Targets further away than the largest scale reaches."""
    energy = small()
    (x, _), _ = held_out(energy)
    posterior = pretrained(energy, variant="absolute", calibration=[(x, energy.model(x).detach() + 1e9)])
    (finding,) = posterior.posterior.findings
    assert finding.startswith(
        "calibration reached the edge of the scale search at 8e+08; the data ask for variances be"
    )


@pytest.mark.parametrize("dtype", [D, torch.float32])
def test_calibration_of_a_network_that_gives_its_noise(dtype: torch.dtype) -> None:
    """Larger scales than the data want overflow."""
    energy = small("gaussian", 2)
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 4)).to(dtype)
    x, y = energy.x.to(dtype), energy.y.to(dtype)
    method = lw.HFL(mode="pretrained", variant="random", pushes=8, calibration=[(x, y)], drift=math.inf)
    found = lw.fit(model, [(x, y)], lw.HeteroscedasticGaussian(), method=method, prior=100.0)
    posterior = found.posterior
    score = lambda scale: float(
        lw.Fitted(replace(posterior, scale=scale), found.fingerprint).predict(x).log_prob(y).sum()
    )
    assert 1e-4 < posterior.scale < 1e3
    assert all(score(posterior.scale) >= score(posterior.scale * factor) - 1e-3 for factor in (0.5, 0.9, 1.1, 2.0))


def test_calibration_data_without_scores_are_refused() -> None:
    """Where all are below zero: no scale is better than another."""
    energy = small("gaussian", 3)
    evaluation, x = new(energy, 9, seed=8), new(energy, 200)
    scores = pretrained(energy, evaluation=evaluation).posterior.scores(x)[1][0]
    below = (scores < 0).all(1)
    assert bool(below.any())
    held = [(x[below], energy.model(x[below]).detach())]
    with pytest.raises(lw.errors.DataError, match=r"the scores are zero at all calibration inputs.*variant='absolute'"):
        pretrained(energy, evaluation=evaluation, calibration=held)
