"""Laws of every tuner that looks for the highest evidence, whichever way it takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import lapwing as lw
from tests import problems
from tests.cases import BY_NAME

D = torch.float64
MLP = BY_NAME["mlp"]
TUNERS: dict[str, Callable[[Any], Any]] = {
    "maximise evidence": lambda _: lw.tuners.MaximiseEvidence(),
    "and the noise": lambda _: lw.tuners.MaximiseEvidence(noise=True),
    "fixed point": lambda _: lw.tuners.FixedPoint(),
    "ascend": lambda _: lw.tuners.Ascend(steps=5),
    "linear mode": lambda data: lw.tuners.LinearMode(data, tolerance=1e-3),
    "bound": lambda data: lw.tuners.MaximiseBound(data, block=2, steps=5),
}
NEED_DATA = ("linear mode", "bound")


@pytest.fixture(params=TUNERS)
def name(request: pytest.FixtureRequest) -> str:
    chosen: str = request.param
    return chosen


def regression(data: Any = None, dtype: torch.dtype = D, **options: Any) -> lw.Fitted:
    data, options = data or problems.number_batches(MLP, dtype), {"method": lw.Full(), "prior": 1.0, **options}
    return lw.fit(MLP.build(dtype), data, lw.Gaussian(noise_std=options.pop("noise_std", None)), **options)


def test_a_given_noise_is_kept(name: str) -> None:
    tuned = regression(noise_std=0.5).tuned(TUNERS[name](problems.number_batches(MLP)))
    assert tuned.likelihood.dispersion.item() == 0.25
    assert float(tuned.prior.values) != 1.0


@pytest.mark.parametrize("around", [torch.no_grad, torch.inference_mode])
def test_gradients_that_are_off_make_no_difference(name: str, around: Callable[[], Any]) -> None:
    posterior = regression()
    expected = posterior.tuned(TUNERS[name](problems.number_batches(MLP))).prior.values
    with around():
        assert torch.equal(posterior.tuned(TUNERS[name](problems.number_batches(MLP))).prior.values, expected)
    assert not expected.requires_grad


def test_the_model_is_left_as_it_was(name: str) -> None:
    posterior = regression()
    problems.unchanged(posterior.network.model, lambda: posterior.tuned(TUNERS[name](problems.number_batches(MLP))))


def test_float32_is_near_float64(name: str) -> None:
    wide, narrow = (
        regression(dtype=dtype).tuned(TUNERS[name](problems.number_batches(MLP, dtype))) for dtype in (D, torch.float32)
    )
    assert float(narrow.prior.values) == pytest.approx(float(wide.prior.values), rel=1e-2)
    assert float(narrow.likelihood.dispersion) == pytest.approx(float(wide.likelihood.dispersion), rel=1e-2)


def test_it_tunes_in_a_fit_as_afterwards(name: str) -> None:
    at_once = regression(prior=None, tuner=TUNERS[name](None))
    later = regression(prior=None, tuner=lambda posterior: posterior).tuned(TUNERS[name](problems.number_batches(MLP)))
    assert float(at_once.prior.values) == pytest.approx(float(later.prior.values), rel=1e-2)
    assert at_once.trace is not None


def test_no_data_are_touched_but_by_those_that_need_them(name: str) -> None:
    passes = []

    class Counting:
        def __iter__(self) -> Any:
            passes.append(1)
            return iter(problems.number_batches(MLP))

    posterior = regression(Counting())
    before = len(passes)
    posterior.tuned(TUNERS[name](problems.number_batches(MLP))).with_prior(3.0)
    assert len(passes) == before >= 1
    if name in NEED_DATA:
        with pytest.raises(lw.errors.UnsupportedError, match="needs the training data"):
            posterior.tuned(TUNERS[name](None))


def test_what_cannot_be_tuned_is_refused(name: str) -> None:
    tuner = TUNERS[name](problems.number_batches(MLP))
    with pytest.raises(lw.errors.UnsupportedError, match=r"has no (evidence to maximise|weights to optimise)"):
        regression(method=lw.baselines.MapOnly()).tuned(tuner)
    with pytest.raises(lw.errors.UnsupportedError, match=f"tuner is the class {type(tuner).__name__}; expected an ob"):
        regression().tuned(type(tuner))
