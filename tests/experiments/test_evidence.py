"""Experiments on evidence, inducing points and the response of fine-tuning."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib.image import imread
from torch import Tensor, nn

import lapwing as lw
from experiments import (
    inducing,
    inducing_targets,
    maps_classification,
    objectives,
    response,
    response_sensitivity,
)
from experiments.em import LARGEST, SampleScales, made_task, sampled, tangent_data
from experiments.engine.contract import Record
from experiments.engine.machine import Machine
from experiments.engine.settings import plain
from experiments.engine.store import Stored, Unit
from experiments.inducing_published import Published, Schedule, learned_as_published, trained_as_published
from experiments.inducing_task import RECIPE, Task, divergence
from experiments.maps_classification import Classes
from experiments.maps_methods import RECIPE as MAPS_RECIPE
from experiments.maps_methods import Choices, Maps
from experiments.maps_regression import Between, Predictions
from experiments.minimum import exact_variance
from experiments.objectives import Objectives, compared, equal_errors, tangent_matrix
from experiments.options import silent
from experiments.resnets import augmented
from experiments.response_task import Problem, ResponseTask, made
from experiments.stacked import Stack, StackedTraining, loss_slope, trained_stack
from lapwing.demo.result import Result
from lapwing.demo.training import TrainingSettings, mlp
from lapwing.methods.hfl import ResponsePosterior
from lapwing.methods.inducing_points import Anchors
from lapwing.priors import prior_kernel
from tests.tolerances import SOLVED, assert_close

# EM from samples of a small ResNet, against the exact posterior.

SETTINGS = SampleScales(
    widths=(2, 3), train=60, held_out=30, test=40, tangent=20, epochs=2, batch=7, samples=5, steps=3,
    precisions=(100.0, 10.0, 1.0),
)  # fmt: skip


@cache
def records(unit: str) -> tuple[Record, ...]:
    return tuple(SETTINGS.measure(unit, silent))


def steps(method: str) -> list[Record]:
    return [record for record in records("em") if record.method == method]


def test_gamma_is_that_of_the_exact_posterior() -> None:
    """Within five standard errors of one over all samples, √(2/γ) of it or less each."""
    first = steps("5 samples")[0]
    exact = lw.fit(
        made_task(SETTINGS).model, tangent_data(SETTINGS), "classification", method="full", prior=SETTINGS.start
    )
    gamma = exact.effective_parameters().total
    assert first.scores["precision"] == SETTINGS.start
    assert abs(first.scores["γ"] - gamma) < 5 * (2 * gamma / 5) ** 0.5


def test_steps_follow_each_other() -> None:
    many, single = steps("5 samples"), steps("one sample")
    assert len(single) == 5 * len(many)
    for number, (one, after) in enumerate(pairwise(many)):
        least = one.scores["precision"] / LARGEST
        assert after.scores["precision"] == pytest.approx(max(least, one.scores["next precision"]))
        alone = [record for record in single if record.group == f"step {number}"]
        assert [record.repeat for record in alone] == list(range(5))
        assert sum(r.scores["γ"] for r in alone) / 5 == pytest.approx(one.scores["γ"], rel=1e-6)
        ratio = alone[2].scores["γ"] / one.scores["γ"]
        assert alone[2].scores["next precision"] == pytest.approx(ratio * one.scores["next precision"])


def test_the_first_step_is_that_of_the_tuner() -> None:
    """SampleEM at the tangent model's own optimum, from the same samples."""
    tuner = lw.tuners.SampleEM(data=tangent_data(SETTINGS), max_steps=1, solver_tolerance=1e-6)
    updated = tuner(sampled(SETTINGS))
    assert steps("5 samples")[0].scores["next precision"] == pytest.approx(
        float(updated.problem.prior.values), rel=0.02
    )


def test_every_result_is_scored() -> None:
    units = SETTINGS.units()
    assert units == ("plain", "em", "validation")
    scored = [record for unit in units for record in records(unit) if record.group == "test"]
    assert [record.method for record in scored] == [
        "plain", "temperature", "EM, 5 samples", "EM, γ from one sample", "validation, 5 samples",
    ]  # fmt: skip
    for record in scored:
        assert record.scores["NLL"] > 0
        assert 0 <= record.scores["ECE"] <= 1
        assert 0 <= record.scores["accuracy"] <= 1
    held_out = {r.scores["precision"]: r.scores["NLL"] for r in records("validation") if r.group == "held out"}
    assert scored[-1].scores["precision"] == pytest.approx(min(held_out, key=lambda key: held_out[key]))


def test_augmented_images_are_shifted() -> None:
    """A single bright pixel in the middle stays, at most four pixels away in each direction."""
    x = torch.zeros(50, 3, 16, 16)
    x[:, :, 8, 8] = 1
    moved = augmented(x, torch.Generator().manual_seed(0))
    assert moved.shape == x.shape
    assert torch.equal(moved.sum((1, 2, 3)), x.sum((1, 2, 3)))
    places = moved[:, 0].flatten(1).argmax(1)
    rows, columns = places // 16, places % 16
    assert int(rows.min()) >= 4
    assert int(rows.max()) <= 12
    assert len(columns.unique()) > 5


# Errors of two objectives for samples, on few digits.

OBJECTIVES_SETTINGS = Objectives(
    data=24, epochs=20, precisions=(300.0, 3.0), batches=(2, 6, 24), rounds=(2, 6), samples=3, seeds=2
)


@cache
def objectives_records(unit: str) -> tuple[Record, ...]:
    return tuple(OBJECTIVES_SETTINGS.measure(unit, silent))


def error(unit: str, method: str) -> float:
    (record,) = (record for record in objectives_records(unit) if record.method == method)
    return record.scores["error, %"]


def test_noise_in_the_regulariser_leaves_a_smaller_error_under_a_strong_prior() -> None:
    for batch in (2, 6):
        assert error("0/300", f"L', batch {batch}, 144 steps") < 0.5 * error("0/300", f"L, batch {batch}, 144 steps")


def test_with_all_data_in_a_batch_both_objectives_are_the_same() -> None:
    for steps in (48, 144):
        one, other = (error("0/300", f"{name}, batch 24, {steps} steps") for name in ("L", "L'"))
        assert one == pytest.approx(other, rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("rows", [9, 200])
def test_the_solution_is_exact(rows: int) -> None:
    """With fewer rows than weights, and with more."""
    matrix = torch.randn(rows, 31, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    system = objectives._system(matrix, 4, 0.7, seed=2)
    solved = objectives._Solved.of(matrix, system)
    left = solved.z @ (matrix.T @ matrix + 0.7 * torch.eye(31))
    assert_close(left, 0.7**0.5 * system.zeta + system.eps @ matrix, SOLVED)
    assert solved.error(solved.z) == 0
    assert solved.error(2 * solved.z) == pytest.approx(1)


def test_the_matrix_is_that_of_the_tangent_model() -> None:
    matrix = tangent_matrix(OBJECTIVES_SETTINGS, 0)
    assert matrix.shape == (24 * 9, 1898)
    assert torch.equal(matrix, tangent_matrix(OBJECTIVES_SETTINGS, 0))
    assert not torch.equal(matrix, tangent_matrix(OBJECTIVES_SETTINGS, 1))


def test_equal_errors_are_found_in_both_directions() -> None:
    steep, flat = [0.8, 0.4, 0.2], [0.2, 0.1, 0.05]
    assert equal_errors((1, 4, 16), steep, flat) == pytest.approx(16)
    assert equal_errors((1, 4, 16), flat, steep) == pytest.approx(1 / 16)
    assert equal_errors((1, 4, 16), steep, steep) == pytest.approx(1)
    assert equal_errors((1, 4, 16), steep, [0.1, 0.05, 0.02]) is None


def test_batches_and_errors_are_compared() -> None:
    """Errors that fall with one over the root of the batch, and are twice as large on L."""
    errors = {"classic": 0.8, "reduced": 0.4}
    runs = {(name, b, r): error / (b**0.5 * r) for name, error in errors.items() for b in (1, 4, 16) for r in (1, 3)}
    assert compared(runs) == pytest.approx({"factor of batches": 4, "ratio of errors": 2})
    (last,) = (record for record in objectives_records("0/300") if record.method == "L over L'")
    assert last.scores["ratio of errors"] > 1.5


def test_the_picture(tmp_path: Path) -> None:
    units = {key: Unit(objectives_records(key), 1.0, None, Machine.here(), "", "") for key in ("0/300", "0/3")}
    Objectives.picture(Stored("objectives", "quick", {}, 0, units), tmp_path / "picture.png")
    assert imread(tmp_path / "picture.png").std() > 0.01


# Error bars by pushing, in small.

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


# Inducing points against the exact posterior, on few points made here.

QUICK = replace(RECIPE, hidden=(10,), max_steps=200, learning_rate=1e-2)


def written(folder: Path) -> None:
    """60 points in two heaps."""
    rng = np.random.default_rng(2)
    x = np.concatenate([rng.uniform(-3, -1, 30), rng.uniform(1, 3, 30)])
    np.savez(folder / "toy1d.npz", valla=np.stack([x, np.sin(2 * x) + 0.1 * rng.normal(size=60)], 1))


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> inducing.Inducing:
    folder = tmp_path_factory.mktemp("toy")
    written(folder)
    return inducing.Inducing(
        folder, QUICK, points=4, margin=2.0, grid=40, draws=3, published=(5, 10), published_drawn=5, sizes=(2, 4),
        starts=2, networks=1, steps=5, seed=1,
    )  # fmt: skip


STEPS = 4  # of VaLLA, which does not need to converge here


def limit_steps(patch: pytest.MonkeyPatch, most: int) -> None:
    """Let VaLLA learn in so many steps at most."""
    full = lw.VaLLA
    patch.setattr(
        lw, "VaLLA", lambda *given, steps=None, **options: full(*given, steps=min(steps or most, most), **options)
    )


@pytest.fixture(scope="module")
def result(settings: inducing.Inducing) -> Result:
    with pytest.MonkeyPatch.context() as patch:
        limit_steps(patch, STEPS)
        return inducing.run(settings)


@pytest.fixture(scope="module")
def task(settings: inducing.Inducing) -> Task:
    x, y = inducing.read_toy(settings.data_dir)
    model = trained_as_published(x, y, QUICK, 1)
    return Task.of(model, x, y, settings.margin, settings.grid)


def scores(result: Result) -> dict[str, dict[str, float]]:
    return {f"{row.group}/{row.name}": row.scores for row in result.rows}


def test_the_divergence_is_that_of_normals() -> None:
    exact, found = torch.tensor([0.5, 2.0]), torch.tensor([1.0, 0.3])
    normals = [torch.distributions.Normal(torch.zeros(2), v.sqrt()) for v in (exact, found)]
    expected = float(torch.distributions.kl_divergence(*normals).sum())
    assert divergence(exact, found) == pytest.approx(expected, rel=1e-6)
    assert divergence(exact, exact) == 0


def test_the_published_form_at_its_optimum_is_the_closed_form(task: Task) -> None:
    """With L Lᵀ = K⁻¹ K_ZX K_XZ K⁻¹ / σ² variance and bound are those of VaLLA at the same points."""
    fitted, _ = task.fit(lw.VaLLA(4, optimiser="none"), seed=0)
    points: Anchors = fitted.posterior.curvature.anchors
    data = Anchors(task.full.network, task.x, torch.zeros(len(task.x), dtype=torch.long))
    cross = torch.cat([points.against(part, task.full.prior) for part in data])
    told = torch.linalg.solve(points.kernel(task.full.prior), cross.mT)
    factor = torch.linalg.cholesky(told @ told.mT / task.noise)
    state = Published(task, points.inputs.detach().requires_grad_(), factor).state(0.0)
    assert torch.allclose(state.variance, task.variance(fitted), rtol=1e-6)
    assert state.gap == pytest.approx(task.evidence - float(fitted.log_evidence()), rel=1e-6)
    worse = Published(task, points.inputs.detach().requires_grad_(), 1.3 * factor).state(0.0)
    assert worse.gap > state.gap > 0


def test_learning_as_published_raises_the_bound_and_leaves_the_network_alone(
    task: Task, settings: inducing.Inducing
) -> None:
    schedule = Schedule(settings.points, settings.recipe.batch_size, (1, 250), seed=1)
    states = learned_as_published(task, schedule, silent)
    assert states[250].gap < 0.9 * states[1].gap
    assert states[250].seconds > states[1].seconds
    assert not states[1].points.equal(states[250].points)
    assert all(p.grad is None for p in task.full.network.model.parameters())


def test_rows_are_bounds_and_learning_never_lowers_them(result: Result) -> None:
    found = scores(result)
    for name, row in found.items():
        if "VaLLA" in name and "alpha" not in name:
            assert row["evidence gap"] > -1e-6
        assert row["KL"] >= 0
        assert all(math.isfinite(value) for value in row.values())
    for start in inducing.STARTS:
        gaps = {name: found[f"VaLLA(4)/{start}, {name}"]["evidence gap"] for name in inducing.OPTIMISERS}
        assert gaps["lbfgs"] <= gaps["none"] + 1e-9
    assert "evidence gap" not in found["VaLLA(4)/alpha=1"]
    assert "evidence gap" not in found["FMGP(4)/rbf kernel"]
    assert found["ELLA/60 landmarks, residual"]["KL"] < found["ELLA/4 landmarks"]["KL"]
    assert Result.from_json(result.to_json()) == result


def test_draws_are_averaged(result: Result, task: Task, settings: inducing.Inducing) -> None:
    row = scores(result)["ELLA/4 landmarks"]
    assert row["KL min"] < row["KL"] < row["KL max"]
    each = [inducing.Comparison(task).scored(lw.ELLA(4, 4), seed)["KL"] for seed in (1, 2, 3)]
    assert row["KL"] == pytest.approx(sum(each) / 3, rel=1e-6)


def test_arrays_hold_the_bands_and_every_draw(result: Result) -> None:
    stds = [key for key in result.arrays if key.endswith("/std")]
    assert [name.split("/")[0] for name in stds] == [
        "exact", "Nyström, 4 landmarks", "VaLLA as published, 5 iterations", "VaLLA(4)",
    ]  # fmt: skip
    assert all(len(result.arrays[key]) == 40 for key in stds)
    drawn = result.arrays["Nyström, 4 landmarks/points"]
    assert len(drawn) == 4
    assert set(drawn) <= set(result.arrays["x"])
    for score in ("KL", "NLL"):
        for size in (2, 4):
            assert len(result.arrays[f"{score} learned/random/{size}"]) == 2
    assert max(result.arrays["KL learned/greedy/4"]) < min(result.arrays["KL learned/greedy/2"])
    assert result.arrays["NLL exact"] == [scores(result)["Full/exact"]["NLL"]]


def test_records_hold_every_draw(result: Result, settings: inducing.Inducing, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inducing, "run", lambda *given: result)
    records = list(settings.measure("toy", silent))
    assert len(records) == len(result.rows) + 2 * 7 * 2  # sizes, rows of each, draws
    draws = [each for each in records if (each.group, each.method) == ("4 points", "random, learned")]
    assert [each.repeat for each in draws] == [0, 1]
    assert [each.scores["NLL"] for each in draws] == pytest.approx(result.arrays["NLL learned/random/4"])
    exact = records[0].scores
    assert all(exact[name] > 0 for name in ("γ", "γ held out", "precision", "noise std"))


def test_the_nll_is_of_rows_that_neither_network_nor_posterior_has_seen(
    result: Result, settings: inducing.Inducing
) -> None:
    """Targets that move where they are held out change the NLL, and nothing that is fitted."""
    x, y = inducing.read_toy(settings.data_dir)
    moved = y.clone()
    moved[:: settings.held_out_every] += 0.5
    one, other = (inducing.HeldOut.of(x, targets, settings) for targets in (y, moved))
    assert torch.equal(one.task.grid, x[::5])
    assert (len(one.task.x), len(one.targets)) == (48, 12)
    assert torch.equal(one.task.exact, other.task.exact)
    predicted = torch.distributions.Normal(
        one.task.full.network.model(x[::5]).detach().squeeze(1), (one.task.exact + one.task.noise).sqrt()
    )
    for found, targets in ((one, y), (other, moved)):
        expected = -float(predicted.log_prob(targets[::5].squeeze(1)).mean())
        assert found.nll(found.task.full) == pytest.approx(expected)
        assert found.nll_of(found.task.exact) == pytest.approx(expected)
    assert one.nll(one.task.full) == pytest.approx(scores(result)["Full/exact"]["NLL"])


def test_every_method_has_an_nll_and_a_point_at_every_row_that_of_the_exact_posterior(
    result: Result, settings: inducing.Inducing
) -> None:
    found = scores(result)
    assert all(("NLL" in row) is not name.startswith("other networks") for name, row in found.items())
    held = inducing.HeldOut.of(*inducing.read_toy(settings.data_dir), settings)
    exact = found["Full/exact"]["NLL"]
    assert held.nll(held.task.fit(lw.VaLLA(48), seed=0)[0]) == pytest.approx(exact, abs=1e-6)
    few = found["VaLLA(4)/greedy, lbfgs"]["NLL"]
    assert few == pytest.approx(
        held.nll(held.task.fit(lw.VaLLA(4, start="greedy", optimiser="lbfgs", steps=STEPS), seed=1)[0]), abs=1e-6
    )
    assert few != pytest.approx(exact, abs=1e-3)


def test_the_landmarks_drawn_are_those_of_ella(task: Task) -> None:
    """Only there do its directions hold all of the prior variance."""
    fitted, _ = task.fit(lw.ELLA(3, 3), seed=5)
    found = inducing.landmarks(task, 3, seed=5)
    every = torch.cat([found, task.x])
    jacobian = fitted.network.linearise(every).jacobians()
    directions = fitted.posterior.curvature.directions
    whole = prior_kernel(jacobian, fitted.prior).diagonal()
    held = jacobian.jvp(directions)[:, :, 0].square().sum(0)
    missing = 1 - held / whole
    assert float(missing[:3].abs().max()) < 1e-12
    assert int((missing[3:].abs() < 1e-12).sum()) == 3


def test_the_published_draws_are_those_of_one_global_generator() -> None:
    """Weights in float64 first, then the orders of a DataLoader; and the generator is as it was."""
    x = torch.linspace(-1, 1, 12, dtype=torch.float64).unsqueeze(1)
    recipe = replace(QUICK, hidden=(3,), max_steps=5, batch_size=5, learning_rate=0.0)
    before = torch.get_rng_state()
    one, again, other = (trained_as_published(x, x.sin(), recipe, seed) for seed in (7, 7, 8))
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(7)
    drawn = torch.nn.Linear(1, 3, dtype=torch.float64).weight
    assert torch.equal(one[0].weight, drawn)
    assert torch.equal(one[0].weight, again[0].weight)
    assert not torch.equal(one[0].weight, other[0].weight)
    moved = [trained_as_published(x, x.sin(), replace(recipe, learning_rate=0.1), 7) for _ in range(2)]
    assert torch.equal(moved[0][0].weight, moved[1][0].weight)
    assert not torch.equal(moved[0][0].weight, drawn)
    assert not moved[0].training
    assert moved[0][0].weight.grad is None


def test_new_points_fill_the_gap_that_the_data_leave() -> None:
    settings = inducing_targets.Targets(noise_std=0.0)
    for target in inducing_targets.TARGETS.values():
        x, y = inducing_targets.noisy(target, settings, 2000, torch.Generator().manual_seed(0), gap=True)
        assert bool(((x <= 0.5) | (x >= 1.75)).all())
        assert float(x.min()) < -2.98
        assert 2.98 < float(x.max()) <= 3
        assert y.equal(target(x))
        new, _ = inducing_targets.noisy(target, settings, 2000, torch.Generator().manual_seed(0), gap=False)
        assert float(((new > 0.5) & (new < 1.75)).double().mean()) == pytest.approx(1.25 / 6, abs=0.03)


@cache
def on_targets() -> tuple[Result, list[str]]:
    """The comparison, and what was said while it was made."""
    settings = inducing_targets.Targets(QUICK, ("relu",), data=50, test=100, grid=30, points=(5, 50), seed=0)
    heard: list[str] = []
    return inducing_targets.run(settings, heard.append), heard


def test_targets_are_compared_with_full() -> None:
    result, heard = on_targets()
    assert [line.split(":")[0] for line in heard] == ["step, relu", "kinks, relu"]
    found = scores(result)
    for group in ("step, relu", "kinks, relu"):
        assert found[f"{group}/Full"]["KL"] == 0
        assert found[f"{group}/VaLLA(50)"]["KL"] < 1e-6 < found[f"{group}/VaLLA(5)"]["KL"]
        assert 0 <= found[f"{group}/ELLA(5)"]["coverage 95 % in gap"] <= 1
    assert Result.from_json(result.to_json()) == result


# Maps of error bars on one and two inputs, with tiny networks.

TINY = replace(MAPS_RECIPE, hidden=(5,), max_steps=30)
CHOICES = Choices(shares=(0.4, 1.0), members=3, draws=6)
BETWEEN = Between(TINY, CHOICES, ("tanh",), data=14, test=20, seeds=2)
PLANE = Classes(TINY, CHOICES, ("blobs",), ("relu",), data=18, test=21, seeds=1)


@pytest.fixture(scope="module")
def line() -> Maps:
    return BETWEEN.maps("tanh", 1)


def test_there_is_a_record_for_every_method() -> None:
    records = list(BETWEEN.measure("tanh/1", silent))
    assert [record.method for record in records] == list(CHOICES.methods)
    assert {(record.group, record.repeat) for record in records} == {("tanh", 1)}
    scores = {record.method: record.scores for record in records}
    assert "ratio" not in scores["plain"]  # there is nothing to divide by
    full = scores["full"]
    assert full["ratio"] == pytest.approx(full["std of f in gap"] / full["std of f"])
    assert scores["subnetwork 100 %, variance"] == pytest.approx(full, rel=1e-6)
    assert scores["subnetwork 40 %, curvature"]["std of f"] < full["std of f"]
    assert all(record.seconds is not None and record.seconds > 0 for record in records)


def test_laplace_methods_share_precision_and_noise(line: Maps) -> None:
    for method in ("full", "Kron", "diagonal", "last layer", "subnetwork 40 %, variance"):
        fitted = line.timed(method)[0]
        assert float(fitted.prior.values) == pytest.approx(float(line.full.prior.values))
        assert float(fitted.likelihood.dispersion) == pytest.approx(float(line.full.likelihood.dispersion))


def test_a_subnetwork_has_the_weights_with_the_largest_values(line: Maps) -> None:
    diagonal = line.timed("diagonal")[0].posterior
    variances = diagonal.precision.variances()
    picked = {}
    for rule in ("variance", "curvature"):
        selection = line.timed(f"subnetwork 40 %, {rule}")[0].network.selection
        picked[rule] = selection.size
    assert set(picked.values()) == {round(0.4 * len(variances))}
    low, high = (line.timed(f"subnetwork 40 %, {rule}")[0].network.theta() for rule in ("variance", "curvature"))
    theta = line.full.network.theta()
    order = variances.argsort()
    assert_close(low.sort().values, theta[order[-picked["variance"] :]].sort().values)
    assert_close(high.sort().values, theta[order[: picked["curvature"]]].sort().values)  # one prior for all weights


def test_sampled_networks_are_the_network_with_drawn_weights(line: Maps) -> None:
    fitted = line.timed("full")[0]
    x = torch.linspace(-1, 1, 7, dtype=torch.float64).unsqueeze(1)
    outputs = []
    for theta in fitted.weight_samples(6, torch.Generator().manual_seed(0)):
        weights = {name: value.detach() for name, value in fitted.network.selection.split(theta).items()}
        outputs.append(torch.func.functional_call(line.network, weights, (x,)).detach())
    predicted = Predictions(fitted, 6)(x)
    assert_close(predicted.mean, torch.stack(outputs).mean(0), SOLVED)
    assert_close(predicted.epistemic_variance, torch.stack(outputs).var(0), SOLVED)
    assert_close(predicted.aleatoric_variance, fitted.likelihood.dispersion.expand(7, 1))


def test_classes_are_scored_near_and_far() -> None:
    (unit,) = PLANE.units()
    records = {record.method: record.scores for record in PLANE.measure(unit, silent)}
    assert tuple(records) == CHOICES.methods
    for scores in records.values():
        assert 1 / 3 <= scores["confidence far"] <= 1
        assert 0 <= scores["ECE"] <= 1
    assert records["subnetwork 100 %, curvature"] == pytest.approx(records["full"], rel=1e-5)
    assert records["full"]["confidence far"] < records["plain"]["confidence far"]


def test_probabilities_of_members_are_means_over_members() -> None:
    maps = PLANE.maps("blobs", "relu", 0)
    fitted = maps.timed("ensemble")[0]
    probs = maps_classification.probabilities("ensemble", fitted, maps.x, 6)
    first = maps.network(maps.x).softmax(1)
    assert probs.shape == (18, 3)
    members = fitted.function_samples(maps.x, 3).softmax(-1)
    assert_close(members[0], first.detach())
    assert_close(probs, members.mean(0))


def test_pictures_are_drawn_from_stored_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Choices, "methods", ("plain", "full", "sampled network"))
    for settings in (BETWEEN, PLANE):
        path = tmp_path / f"{settings.name}.png"
        settings.picture(Stored(settings.name, "tiny", plain(settings), 0), path)
        drawn = torch.tensor(imread(path))[..., :3]
        assert 0.02 < float((drawn < 0.98).any(-1).float().mean()) < 0.9


# Networks trained side by side.

STACKED_SETTINGS = StackedTraining(hidden=(7, 5), steps=600, batch_size=16)


def rows(n: int = 60, inputs: int = 3) -> tuple[Tensor, Tensor]:
    x = torch.randn(n, inputs, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return x, x[:, :1].sin() + 0.5 * x[:, 1:2]


def stacked_error(net: nn.Module, x: Tensor, y: Tensor) -> float:
    """The mean squared error over the variance of the targets."""
    with torch.no_grad():
        return float((net(x) - y).square().mean() / y.var())


def networks(count: int, dropout: float = 0.0) -> list[nn.Sequential]:
    return [mlp(3, 1, TrainingSettings(hidden=(7, 5), dropout=dropout), seed) for seed in range(count)]


@pytest.mark.parametrize("masked", [False, True])
def test_the_slope_is_that_of_automatic_differentiation(masked: bool) -> None:
    generator = torch.Generator().manual_seed(2)
    stack = Stack.of(networks(4))
    x, y = (torch.randn(4, 6, size, generator=generator) for size in (3, 1))
    masks = tuple(torch.rand(4, 6, h, generator=generator).round() * 2 if masked else None for h in (7, 5))
    slope = Stack.zeros((3, 7, 5, 1), 4)
    squares = loss_slope(stack, slope, x, y, masks)
    leaves = [part.clone().requires_grad_() for part in stack.parts]
    h = x
    for weight, bias, mask in zip(leaves[:-2:2], leaves[1:-2:2], masks, strict=True):
        h = (h @ weight + bias).tanh()
        h = h if mask is None else h * mask
    errors = (h @ leaves[-2] + leaves[-1] - y).square().mean(1)
    torch.testing.assert_close(squares[:, 0], errors, rtol=1e-5, atol=1e-6)
    loss = 0.5 * errors.sum()
    expected = torch.autograd.grad(loss, leaves)
    got = slope.parts
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_training_fits_and_is_repeatable() -> None:
    x, y = rows()
    first, second, dropping = trained_stack(x, y, STACKED_SETTINGS, seed=3, plain=2, dropping=1)
    for net in (first, second):
        assert not net.training
        assert next(net.parameters()).dtype == torch.float64
        assert stacked_error(net, x, y) < 0.1
    assert not torch.allclose(first(x), second(x), atol=1e-3)
    assert any(isinstance(layer, nn.Dropout) for layer in dropping)
    assert stacked_error(dropping, x, y) < 0.3
    again = trained_stack(x, y, STACKED_SETTINGS, seed=3, plain=2, dropping=1)[0]
    assert torch.equal(first(x), again(x))


def test_adam_is_that_of_torch_with_the_decay_of_a_prior() -> None:
    """With all rows in one batch the order of the rows does not matter. The noise is a running mean."""
    x, y = rows(12)
    settings = replace(STACKED_SETTINGS, steps=20, batch_size=50, precision=3.0)
    net = mlp(3, 1, TrainingSettings(hidden=(7, 5)), 4000)
    optimiser = torch.optim.Adam(net.parameters(), lr=settings.learning_rate)
    noise: float | None = None
    for step in range(20):
        square = (net(x.float()) - y.float()).square().mean()
        noise = float(square.detach()) if noise is None else 0.99 * noise + 0.01 * float(square.detach())
        optimiser.param_groups[0]["lr"] = settings.learning_rate * 0.5 * (1 + math.cos(math.pi * step / 20))
        optimiser.param_groups[0]["weight_decay"] = 3.0 * noise / 12
        optimiser.zero_grad()
        (0.5 * square).backward()
        optimiser.step()
    stacked = trained_stack(x, y, settings, seed=4, plain=2)[0]
    torch.testing.assert_close(stacked(x), net.double()(x), rtol=1e-3, atol=1e-4)
