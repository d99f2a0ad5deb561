"""Error bars by pushing, in small."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor

import lapwing as lw
from experiments import response, response_sensitivity
from experiments.minimum import exact_variance
from experiments.options import silent
from experiments.response_task import Problem, ResponseTask, made
from lapwing.demo.result import Result
from lapwing.methods.hfl.hfl import ResponsePosterior

SMALL = ResponseTask(
    tasks=("sinusoid",), data=12, hidden=4, seeds=1, new=12, pushes=4, members=2, epochs=30, steps=(5, 10)
)  # fmt: skip


@cache
def problem() -> Problem:
    return made("sinusoid", SMALL, 0)


def energy(flat: Tensor) -> Tensor:
    found = problem()
    names = [name for name, _ in found.model.named_parameters()]
    shapes = [p.shape for p in found.model.parameters()]
    parts = flat.split([shape.numel() for shape in shapes])
    values = {name: part.reshape(shape) for name, part, shape in zip(names, parts, shapes, strict=True)}
    f = torch.func.functional_call(found.model, values, (found.x,))
    return 0.5 * (f - found.y).square().sum() / SMALL.noise_std**2 + 0.5 * SMALL.precision * flat.square().sum()


def test_the_network_is_at_its_minimum() -> None:
    flat = torch.nn.utils.parameters_to_vector(problem().model.parameters()).detach()
    assert float(torch.func.grad(energy)(flat).norm()) < 1e-5
    assert float(torch.linalg.eigvalsh(torch.func.jacrev(torch.func.grad(energy))(flat))[0]) > 0


def test_no_data_in_the_gap() -> None:
    assert float(problem().x.abs().min()) >= SMALL.gap
    assert float(problem().x.abs().max()) <= SMALL.reach
    assert int((problem().x > 0).sum()) == 6


def test_every_method_is_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the network from above, with every fourth strength."""
    monkeypatch.setattr(
        response, "made", lambda task, settings, seed: {("sinusoid", SMALL, 0): problem()}[task, settings, seed]
    )
    monkeypatch.setattr(response_sensitivity, "STRENGTHS", response_sensitivity.STRENGTHS[::4])
    result = response.run(SMALL)
    scores = {row.name: row.scores for row in result.rows}
    assert scores["HFL, each point"]["gap MPIW"] == pytest.approx(scores["full Hessian"]["gap MPIW"], rel=1e-5)
    assert scores["HFL, linearised"]["gap MPIW"] == pytest.approx(scores["GGN"]["gap MPIW"], rel=1e-6)
    assert scores["noise only"]["MPIW"] == pytest.approx(2 * 1.959964 * SMALL.noise_std)
    assert all(row["MPIW"] >= scores["noise only"]["MPIW"] - 1e-9 for row in scores.values())
    assert len(scores) == 14
    assert len(result.arrays["strengths"]) == len(result.arrays["median/float32"]) == 6
    assert min(result.arrays["median/float64"]) < 1e-6 < min(result.arrays["median/float32"])
    assert Result.from_json(result.to_json()) == result


def test_the_sensitivity_is_a_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the network from above, with every fourth strength."""
    monkeypatch.setattr(response, "made", lambda *given: problem())
    monkeypatch.setattr(response_sensitivity, "STRENGTHS", response_sensitivity.STRENGTHS[::4])
    assert SMALL.units() == ("sinusoid/0", "sensitivity")
    records = {(record.group, record.method): record.scores for record in SMALL.measure("sensitivity", silent)}
    assert list(records)[-2:] == [("fine-tuning", "Adam, 5 steps"), ("fine-tuning", "Adam, 10 steps")]
    assert list(records["fine-tuning", "Adam, 5 steps"]) == ["recovered/data", "recovered/gap", "recovered/outside"]
    for dtype in ("float64", "float32"):
        errors = [scores for (group, _), scores in records.items() if group == f"push, {dtype}"]
        assert len(errors) == 6
        assert all(0 < each["median error"] <= each["largest error"] for each in errors)
    assert records["push, float64", "strength 1.0e-03"]["median error"] < 1e-4


def test_the_exact_variance_is_the_dense_one() -> None:
    posterior = problem().fit(lw.HFL(drift=float("inf"))).posterior
    assert isinstance(posterior, ResponsePosterior)
    x = torch.tensor([[-1.0], [0.1], [2.5]], dtype=torch.float64)
    flat = torch.nn.utils.parameters_to_vector(problem().model.parameters()).detach()
    hessian = torch.func.jacrev(torch.func.grad(energy))(flat)
    eye = torch.eye(3, dtype=torch.float64)
    slopes = torch.stack([posterior.problem.network.vjp(x, eye[k].reshape(1, 3, 1))[0] for k in range(3)])
    exact = (slopes * torch.linalg.solve(hessian, slopes.T).T).sum(1)
    assert torch.allclose(exact_variance(posterior, x), exact, rtol=1e-6)
