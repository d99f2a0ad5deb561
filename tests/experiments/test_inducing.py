"""Inducing points against the exact posterior, on few points made here."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.image import imread

import lapwing as lw
from experiments import inducing, inducing_targets
from experiments.__main__ import main
from experiments.inducing_published import Published, Schedule, learned_as_published, trained_as_published
from experiments.inducing_task import RECIPE, SEED, Task, divergence
from experiments.options import Progress, silent
from lapwing.demo.result import Result
from lapwing.methods.inducing.points import Anchors
from lapwing.priors.filters import prior_kernel

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


@pytest.fixture
def few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests that do not ask how well VaLLA has learned."""
    limit_steps(monkeypatch, 3)


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
    cross = torch.cat([points.against(part, task.full.prior) for part in data.parts])
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


def test_every_thousandth_iteration_is_told(task: Task, monkeypatch: pytest.MonkeyPatch) -> None:
    """With an objective that costs nothing."""
    heard: list[str] = []
    monkeypatch.setattr(Published, "objective", lambda self, rows=None: self.z.sum() + self.factor.sum())
    states = learned_as_published(task, Schedule(2, 50, (1, 1000), seed=1), heard.append)
    assert heard == [f"published variant: 1,000 of 1,000 iterations, {states[1000].seconds:.0f} s"]


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


@pytest.mark.usefixtures("few_steps")
def test_equal_seeds_give_equal_numbers_and_others_do_not(
    settings: inducing.Inducing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With random starts only: they depend most on the seed, and one start instead of three saves time."""
    monkeypatch.setattr(inducing, "STARTS", ("random",))
    monkeypatch.setattr(inducing, "OPTIMISERS", ("adam",))  # of rows, whose numbers are not compared
    small = replace(settings, recipe=replace(QUICK, hidden=(3,), max_steps=20), points=2, draws=2, published=(2,),
                    published_drawn=2, sizes=(2,), starts=1, networks=0, steps=2)  # fmt: skip
    one, again, other = (inducing.run(replace(small, seed=seed)) for seed in (3, 3, 4))
    assert one.arrays == again.arrays
    assert one.arrays != other.arrays


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


def test_a_folder_without_the_toy_is_named(tmp_path: Path) -> None:
    with pytest.raises(lw.errors.DataError, match=r"toy1d\.npz is not in the data folder"):
        inducing.read_toy(tmp_path)


def test_the_command_prints_tables_and_writes_what_it_names(
    result: Result, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the results from above, which take seconds."""
    asked: list[Any] = []

    def known(found: Result) -> Callable[[Any, Progress], Result]:
        def run(settings: Any, progress: Progress) -> Result:
            asked.append(settings)
            progress(f"{settings.name} as before")
            return found

        return run

    monkeypatch.setattr(inducing, "run", known(result))
    monkeypatch.setattr(inducing_targets, "run", known(on_targets()[0]))
    assert main(["inducing", "--quick", "--data-dir", str(tmp_path), "--out", str(tmp_path)]) == 0
    assert asked == [
        replace(inducing.Inducing.quick(), data_dir=tmp_path, seed=SEED), inducing_targets.Targets.quick()
    ]  # fmt: skip
    captured = capsys.readouterr()
    assert "as it comes" in captured.out
    assert "kinks, relu" in captured.out
    assert "inducing as before" in captured.err
    *pictures, numbers = (Path(line) for line in captured.out.splitlines() if line.startswith(str(tmp_path)))
    for picture in pictures:
        pixels = torch.tensor(imread(picture))[..., :3]
        assert 0.02 < float((pixels < 0.98).any(-1).float().mean()) < 0.6
    found = json.loads(numbers.read_text())
    assert list(found) == ["inducing", "inducing_targets"]
    assert Result.from_json(json.dumps(found["inducing"])) == result
