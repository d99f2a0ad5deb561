"""Files of every posterior: what comes back, and what is refused."""

from __future__ import annotations

import copy
import json
import pickle
import shutil
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

import lapwing as lw
from lapwing.data.inputs import OneSample
from lapwing.posteriors.sampled import PointPosterior
from tests import problems
from tests.attack import checkpoints, files
from tests.attack.damage import Contents
from tests.cases import BY_NAME, CASES, cast
from tests.problems import batches, likelihood
from tests.stored import RUNS, SPECIMENS, Stored, ensemble, inputs, predictions, run, small, translated
from tests.tolerances import SOLVED, assert_close

# Posteriors in files: the same numbers come back, and nothing else does.

D = torch.float64
METHODS: dict[str, Any] = {
    "full": lw.Full(),
    "hessian": lw.Full(curvature="hessian"),
    "diagonal": lw.Diagonal(),
    "kron": lw.Kron(),
    "kron_reduce": lw.Kron(sharing="reduce", full_limit=3),
    "ekron": lw.EKron(),
    "low_rank": lw.LowRank(rank=5),
    "map_only": lw.baselines.MapOnly(),
    "ella": lw.ELLA(num_landmarks=9, rank=5),
    "ella_residual": lw.ELLA(num_landmarks=9, rank=5, residual=True),
    "valla": lw.VaLLA(num_inducing=5, steps=3),
}


def fitted(
    case: str = "mlp", method: Any = None, dtype: torch.dtype = D, **options: Any
) -> tuple[nn.Module, lw.Fitted]:
    chosen = BY_NAME[case]
    model = chosen.build(dtype)
    options.setdefault("prior", 1e2)
    return model, problems.fit(chosen, method, model, dtype, **options)


def reloaded(posterior: lw.Fitted, model: nn.Module, folder: Path) -> lw.Fitted:
    problems.unchanged(posterior.network.model, lambda: posterior.save(folder / "net"))
    return problems.unchanged(model, lambda: lw.load(folder / "net", model))


def assert_same(one: lw.Fitted, two: lw.Fitted, inputs: Any, power: float = 2 / 3) -> None:
    narrow = two.network.dtype
    assert_close(two.functions(inputs).mean.double(), one.functions(inputs).mean.double(), power, narrow)
    if float(one.functions(inputs).variance.max()) > 0:
        assert_close(two.functions(inputs).cov.double(), one.functions(inputs).cov.double(), power, narrow)
    assert type(two.likelihood) is type(one.likelihood)
    assert_close(two.likelihood.dispersion, one.likelihood.dispersion)
    assert type(two.prior.given) is type(one.prior.given)
    if not isinstance(one.posterior, PointPosterior):
        assert_close(two.log_evidence(), one.log_evidence(), power, narrow)


@pytest.mark.parametrize(("case", "method"), [(c.name, ("kron", "ekron")[i % 2]) for i, c in enumerate(CASES)])
def test_round_trip_of_every_network(case: str, method: str, tmp_path: Path) -> None:
    _, posterior = fitted(case, METHODS[method])
    again = reloaded(posterior, BY_NAME[case].build(), tmp_path)  # another object with the same weights
    assert_same(posterior, again, BY_NAME[case].batch(3, seed=1))
    assert again.network.layout == posterior.network.layout
    assert again.posterior.curvature.structures() == posterior.posterior.curvature.structures()


@pytest.mark.parametrize("noise_std", [2, torch.tensor(0.3), torch.tensor([0.3, 0.4, 0.5]), None])
def test_round_trip_of_noises_as_users_give_them(noise_std: Any, tmp_path: Path) -> None:
    """Other likelihoods, priors and selections are among the files of earlier versions below."""
    case = BY_NAME["mlp"]
    model, inputs = case.build(), case.batch(6)
    likelihood = lw.Gaussian(noise_std=noise_std, per_output=noise_std is None)
    posterior = lw.fit(model, [(inputs, torch.randn(6, 3, dtype=D))], likelihood, method=lw.Kron())
    again = reloaded(posterior, model, tmp_path)
    assert_same(posterior, again, inputs)
    assert json.dumps(again.likelihood.state().settings) == json.dumps(posterior.likelihood.state().settings)


@pytest.mark.parametrize(
    "options",
    [
        {}, {"method": "auto"}, {"tuner": lw.tuners.MaximiseEvidence()}, {"method": lw.FMGP(5, steps=5)},
        {"method": lw.Sampled(4)}, {"method": lw.VaLLA(5, steps=3), "prior": 1.0},
    ],
    ids=repr,
)  # fmt: skip
def test_the_summary_is_the_same_after_loading(options: dict[str, Any], tmp_path: Path) -> None:
    """Scores, findings, steps and the reason for the method are in the file."""
    model, posterior = fitted(**{"method": None, "prior": None, **options})
    again = reloaded(posterior, model, tmp_path)
    assert posterior.trace is not None
    assert again.summary() == posterior.summary()
    assert str(again.trace) == str(posterior.trace)
    assert str(again.base.trace) == str(posterior.base.trace)


def test_a_loaded_posterior_can_be_saved_tuned_and_reweighted(tmp_path: Path) -> None:
    model, posterior = fitted(method=lw.Kron())
    again, inputs = reloaded(posterior, model, tmp_path), BY_NAME["mlp"].batch(3, seed=1)
    assert_same(posterior, reloaded(again, model, tmp_path), inputs)
    assert_same(posterior.tuned(), again.tuned(), inputs)
    assert_same(posterior.with_prior(3.0), again.with_prior(3.0), inputs)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("before", "after"), [(D, torch.float32), (D, torch.bfloat16), (torch.float32, D)], ids=str)
def test_to_another_dtype(method: str, before: torch.dtype, after: torch.dtype, tmp_path: Path) -> None:
    model, posterior = fitted(method=METHODS[method], dtype=before)
    inputs, digits = BY_NAME["mlp"].batch(4, before, seed=1), torch.float32 if after == D else after
    expected = posterior.functions(inputs)
    again = reloaded(posterior, copy.deepcopy(model).to(after), tmp_path)
    belief = again.functions(cast(inputs, after))
    assert belief.cov.dtype == (D if after == D else torch.float32)  # factors are never kept in bfloat16
    assert_close(belief.mean, expected.mean, dtype=digits)
    if method != "map_only":
        assert_close(belief.std, expected.std, dtype=digits)


@pytest.mark.parametrize("method", ["auto", lw.Sampled(num_samples=4)], ids=["auto", "sampled"])
def test_what_was_found_out_moves_too(method: Any) -> None:
    case = BY_NAME["mlp"]
    model = case.build()
    posterior = problems.fit(case, method, model=model)
    assert posterior.trace is not None
    moved = problems.unchanged(model, lambda: posterior.to("cpu"))
    assert str(moved.trace) == str(posterior.trace)
    assert moved.why == posterior.why
    assert bool(moved.why) == (method == "auto")
    assert_same(posterior.with_prior(3.0), moved.with_prior(3.0), case.batch(2), 1 / 3)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("device", ["cuda", "nowhere"])
def test_a_device_that_is_not_there(device: str) -> None:
    model, posterior = fitted(method=lw.Kron())
    with pytest.raises(lw.errors.UnsupportedError, match=f"device is '{device}'; expected one that this machine has: "):
        problems.unchanged(model, lambda: posterior.to(device))


# What is refused.


def other_weights(model: nn.Module) -> nn.Module:
    model[2].weight.data[0, 0] += 1e-3
    return model


def swapped_rows(model: nn.Module) -> nn.Module:
    model[2].weight.data = model[2].weight.data.flip(0)
    return model


OTHERS = {
    "other weights": lambda: other_weights(BY_NAME["mlp"].build()),
    "rows swapped": lambda: swapped_rows(BY_NAME["mlp"].build()),
    "wider": lambda: nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 5), nn.ReLU(), nn.Linear(5, 3)).double(),
    "another kind": lambda: BY_NAME["norms"].build(),
    "other weights in float32": lambda: other_weights(BY_NAME["mlp"].build()).float(),
}


@pytest.mark.parametrize("other", OTHERS)
def test_another_model_is_refused(other: str, tmp_path: Path) -> None:
    _, posterior = fitted()
    posterior.save(tmp_path / "net")
    model = OTHERS[other]()

    def run() -> None:
        with pytest.raises(lw.errors.FileError, match="belongs to another model"):
            lw.load(tmp_path / "net", model)

    problems.unchanged(model, run)


def test_a_model_in_training_mode_is_refused(tmp_path: Path) -> None:
    model, posterior = fitted("resnet_batchnorm")
    posterior.save(tmp_path / "net")
    model.train()
    with pytest.raises(lw.errors.ModelError, match="training mode"):
        lw.load(tmp_path / "net", model)


def test_changed_weights_are_not_saved(tmp_path: Path) -> None:
    model, posterior = fitted()
    other_weights(model)
    with pytest.raises(lw.errors.ModelError, match=r"2\.weight.*has changed"):
        posterior.save(tmp_path / "net")
    assert not (tmp_path / "net").exists()


def test_a_posterior_that_could_not_be_loaded_is_not_saved(tmp_path: Path) -> None:
    _, posterior = fitted(method=lw.Kron())
    posterior.save(tmp_path / "net")
    before = (tmp_path / "net").read_bytes()
    posterior.posterior.curvature.blocks[0].inp.matrix.fill_(torch.nan)
    with pytest.raises(lw.errors.FileError, match=r"is not saved, since its file would be refused: .*inp of Kron"):
        posterior.save(tmp_path / "net")
    assert (tmp_path / "net").read_bytes() == before
    assert list(tmp_path.iterdir()) == [tmp_path / "net"]


@pytest.mark.parametrize("method", [lw.KernelSpace(), lw.LowRank(rank=20), lw.EKron(), lw.Kron()], ids=repr)
def test_float32_rounding_is_not_damage(method: Any, tmp_path: Path) -> None:
    """Small inputs in float32: directions without curvature have vectors that are not orthonormal."""
    gen = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(12, 20), nn.ReLU(), nn.Linear(20, 4))
    x, y = 1e-3 * torch.randn(100, 12, generator=gen), torch.randint(0, 4, (100,), generator=gen)
    lw.fit(net, [(x, y)], "classification", method=method, prior=1.0).save(tmp_path / "net")
    assert lw.load(tmp_path / "net", net).functions(x).std.isfinite().all()


def written(tmp_path: Path) -> tuple[nn.Module, Path, bytes]:
    model, posterior = fitted(method=lw.Kron())
    posterior.save(tmp_path / "net")
    return model, tmp_path / "net", (tmp_path / "net").read_bytes()


@pytest.mark.parametrize("keep", [0, 5, 100, 0.5, 0.99])
def test_truncated_files_are_refused(keep: float, tmp_path: Path) -> None:
    model, path, content = written(tmp_path)
    path.write_bytes(content[: int(keep if keep > 1 else keep * len(content))])
    with pytest.raises(lw.errors.FileError, match=r"cannot be read.*Expected a file with a Lapwing posterior"):
        lw.load(path, model)


def test_pickles_are_never_opened(tmp_path: Path) -> None:
    model, path, _ = written(tmp_path)
    opened = tmp_path / "opened"

    class Trap:
        def __reduce__(self) -> Any:
            return (Path.touch, (opened,))

    path.write_bytes(pickle.dumps(Trap()))
    with pytest.raises(lw.errors.FileError, match="cannot be read"):
        lw.load(path, model)
    torch.save({"trap": Trap()}, path)
    with pytest.raises(lw.errors.FileError, match="cannot be read"):
        lw.load(path, model)
    assert not opened.exists()


def test_foreign_safetensors_are_refused(tmp_path: Path) -> None:
    model, path, _ = written(tmp_path)
    save_file({"weight": torch.zeros(3)}, path)
    with pytest.raises(lw.errors.FileError, match="holds no Lapwing posterior"):
        lw.load(path, model)
    save_file({"weight": torch.zeros(3)}, path, metadata={"lapwing": "not json"})
    with pytest.raises(lw.errors.FileError, match="holds no Lapwing posterior"):
        lw.load(path, model)
    for other in ('{"name": "lapwing-posterior-999"}', '["lapwing-posterior-1"]', "{}"):
        save_file({"weight": torch.zeros(3)}, path, metadata={"lapwing": other})
        with pytest.raises(lw.errors.FileError, match=r"has the format .*; this version reads 'lapwing-posterior-"):
            lw.load(path, model)


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        lw.load(tmp_path / "nothing", BY_NAME["mlp"].build())


@pytest.mark.parametrize("lost", ["likelihood", "prior", "network", "posterior", "method", "fingerprint"])
def test_a_file_with_other_metadata(lost: str, tmp_path: Path) -> None:
    model, path, content = written(tmp_path)
    for instead in ("missing", None, 5, [], {}, "word"):
        file = Contents.of(content)
        holder = file.root["parts" if lost in file.root["parts"] else "settings"]
        holder[lost] = instead
        if instead == "missing":
            del holder[lost]
        path.write_bytes(file.packed())
        if (lost, instead) == ("method", "word"):
            assert lw.load(path, model).method == "word"
            continue
        with pytest.raises(lw.errors.FileError):
            lw.load(path, model)


@pytest.mark.parametrize("wrong", ["shape", "nan", "dtype"])
@pytest.mark.parametrize(
    "name", ["posterior.theta", "prior.precision", "posterior.curvature.0.inp", "posterior.curvature.1.out"]
)
def test_a_tensor_that_cannot_be_the_saved_one(name: str, wrong: str, tmp_path: Path) -> None:
    model, path, _ = written(tmp_path)
    file = Contents.of(path.read_bytes())
    tensors = file.tensors
    if wrong == "shape":
        tensors[name] = torch.cat([tensors[name].reshape(-1), torch.ones(2, dtype=D)])
    elif wrong == "nan":
        tensors[name] = torch.full_like(tensors[name], float("nan"))
    else:
        tensors[name] = torch.ones_like(tensors[name], dtype=torch.int64)
    path.write_bytes(file.packed())
    with pytest.raises(lw.errors.FileError, match=rf"is damaged: .*{name.rpartition('.')[2]}.*; expected"):
        lw.load(path, model)


@pytest.mark.parametrize("head", [None, "4.bias", 5])
def test_the_last_linear_map_in_a_file(head: Any, tmp_path: Path) -> None:
    """Files of earlier versions have none. One that is the weight of no block is refused."""
    model, path, _ = written(tmp_path)
    file = Contents.of(path.read_bytes())
    settings = file.root["parts"]["network"]["settings"]
    assert settings["head"] == "4.weight"
    settings["head"] = head
    if head is None:
        del settings["head"]
    path.write_bytes(file.packed())
    if head is None:
        assert lw.load(path, model).network.head == ""
        return
    with pytest.raises(lw.errors.FileError, match=r"is damaged: .*expected"):
        lw.load(path, model)


def test_the_model_itself_is_not_in_the_file(tmp_path: Path) -> None:
    _, path, _ = written(tmp_path)
    with safe_open(path, framework="pt") as file:  # any reader of the format can open it
        assert json.loads(file.metadata()["lapwing"])["name"].startswith("lapwing-posterior-")
        assert not any(key.startswith(("0.", "2.", "4.", "model")) for key in file.keys())  # noqa: SIM118


# Damaged files and checkpoints: the short form of ``python -m tests.attack files`` and ``checkpoints``.

IN_SHORT = (
    "kron", "low_rank", "fmgp", "budget_regression", "per_output", "bernoulli", "g_prior", "subnetwork", "valla",
    "tuple_input",
)  # fmt: skip


def test_every_specimen_in_short_is_refused_or_possible(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "TARGETS", {name: files.TARGETS[name] for name in IN_SHORT})
    totals, wrong = files.attacked(180, seed=11, folder=tmp_path)
    assert not wrong, "\n".join(wrong)
    assert totals["refused"] > 100
    assert totals["accepted"] > 5


def test_checkpoints_are_refused_or_possible(tmp_path: Path) -> None:
    totals, wrong = checkpoints.attacked(45, seed=11, folder=tmp_path)
    assert not wrong, "\n".join(wrong)
    assert totals["refused"] > 20
    assert totals["accepted"] > 2


# A file knows the function that it belongs to, and not its weights alone.


class Bent(nn.Module):
    """A network whose activation is a setting, or a constant that no setting shows."""

    def __init__(self, bend: Any = F.tanh) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.a, self.b, self._bend = nn.Linear(4, 6), nn.Linear(6, 3), bend

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self._bend(self.a(x)))


def sloped(slope: float) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 6), nn.LeakyReLU(slope), nn.Linear(6, 3))


def saved(model: nn.Module, path: Path, dtype: torch.dtype = torch.float32) -> Path:
    x = torch.randn(20, 4, generator=torch.Generator().manual_seed(1)).to(dtype)
    lw.fit(model, [(x, torch.arange(20) % 3)], "classification", prior=1.0).save(path)
    return path


def test_another_slope_is_refused(tmp_path: Path) -> None:
    path = saved(sloped(0.01), tmp_path / "net")
    lw.load(path, sloped(0.01))
    with pytest.raises(lw.errors.FileError, match=r"returns other outputs, by .* such as the slope of an activation"):
        lw.load(path, sloped(0.5))
    with pytest.raises(lw.errors.FileError, match="belongs to another model"):
        lw.load(path, sloped(0.02))


def test_another_forward_is_refused(tmp_path: Path) -> None:
    path = saved(Bent(), tmp_path / "net")
    lw.load(path, Bent())
    with pytest.raises(lw.errors.FileError, match="belongs to another model"):
        lw.load(path, Bent(F.gelu))


@pytest.mark.parametrize(("dtype", "other"), [(torch.bfloat16, D), (D, torch.float32), (torch.float32, torch.bfloat16)])
def test_another_dtype_is_the_same_function(dtype: torch.dtype, other: torch.dtype, tmp_path: Path) -> None:
    """Weights that have been rounded once are the same in every wider dtype."""
    rounded = sloped(0.01).bfloat16()
    path = saved(rounded.to(dtype), tmp_path / "net", dtype)
    lw.load(path, sloped(0.01).bfloat16().to(other))
    with pytest.raises(lw.errors.FileError, match="belongs to another model"):
        lw.load(path, sloped(0.5).bfloat16().to(other))


@pytest.mark.parametrize("case", [case.name for case in CASES])
def test_every_network_has_a_probe(case: str) -> None:
    """Tokens, images, mappings and tuples; a probe of four rows, none of them from the data."""
    chosen = BY_NAME[case]
    posterior = lw.fit(chosen.build(), batches(chosen), likelihood(chosen), method=lw.baselines.MapOnly(), prior=1.0)
    probe = posterior.network.probe_with_outputs
    assert probe is not None
    assert probe.outputs is not None
    assert sum(t.nbytes for t in probe.tensors) <= 2**20
    for t, given in zip(probe.tensors, lw.data.inputs.tensors_in(batches(chosen)[0][0]), strict=True):
        assert t.dtype == given.dtype
        if t.is_floating_point():
            assert not any(torch.equal(row, other) for row in t for other in given)


def test_ranges_are_those_of_each_entry() -> None:
    """Columns of very different sizes stay so, and what all rows share is kept."""
    x = torch.stack([torch.linspace(0, 1, 30), torch.linspace(1e6, 2e6, 30), torch.full((30,), 7.0)], 1)
    probe = lw.fit(nn.Linear(3, 1), (x, x[:, 0]), "regression", prior=1.0).network.probe_with_outputs
    assert probe is not None
    (drawn,) = probe.tensors
    assert float(drawn[:, 0].max()) <= 1
    assert float(drawn[:, 1].min()) >= 1e6
    assert bool((drawn[:, 2] == 7).all())


class Shifted(nn.Module):
    def __init__(self, shift: float) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.linear, self.shift = nn.Linear(4, 3), shift

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + self.shift


def test_settings_are_compared_where_inputs_cannot_be_drawn(tmp_path: Path) -> None:
    x = OneSample((torch.randn(9, 4),))
    posterior = lw.fit(Shifted(0.5), [(x, torch.arange(9)[None] % 3)], "classification", prior=1.0)
    assert posterior.network.probe_with_outputs is None
    posterior.save(tmp_path / "net")
    lw.load(tmp_path / "net", Shifted(0.5))
    with pytest.raises(lw.errors.FileError, match=r"shift of the module '' is 1\.5 and was 0\.5"):
        lw.load(tmp_path / "net", Shifted(1.5))


def test_a_setting_with_a_small_effect_is_refused_and_one_without_is_not(tmp_path: Path) -> None:
    """Outputs that differ by less than machines may differ, where the settings say why."""

    def model(eps: float = 1e-5, rate: float = 0.1) -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6, eps=eps), nn.Dropout(rate), nn.Linear(6, 3)).eval()

    path = saved(model(), tmp_path / "net")
    lw.load(path, model(rate=0.5))
    with pytest.raises(lw.errors.FileError, match=r"eps of the module '1' is 0\.0001 and was 1e-05 at the fit"):
        lw.load(path, model(eps=1e-4))


def test_settings_are_watched_after_loading(tmp_path: Path) -> None:
    model = sloped(0.01)
    again = lw.load(saved(model, tmp_path / "net"), model)
    model[1].negative_slope = 0.5
    with pytest.raises(lw.errors.ModelError, match="negative_slope"):
        again.predict(torch.zeros(1, 4))


@pytest.mark.parametrize("form", [{"tensor": 1}, {"list": 3}, {"map": {"x": {"tensor": 0}}}, [], {"value": []}])
def test_a_damaged_probe_is_refused(form: Any, tmp_path: Path) -> None:
    path = saved(sloped(0.01), tmp_path / "net")
    file = Contents.of(path.read_bytes())
    file.root["parts"]["network"]["parts"]["probe"]["settings"]["form"] = form
    path.write_bytes(file.packed())
    with pytest.raises(lw.errors.FileError, match="is damaged"):
        lw.load(path, sloped(0.01))


# Files that earlier versions wrote: each is loaded, and predicts what it predicted then (``tests/stored.py``).

FOLDERS = sorted((Path(__file__).parents[1] / "data").iterdir())
FILES = [(folder, path.stem) for folder in FOLDERS for path in sorted(folder.glob("*.lapwing"))]
IDS = [f"{folder.name}-{name}" for folder, name in FILES]
TRAINED = 1e-6  # of the largest entry: a run of 4 epochs multiplies roundings, L-BFGS more than others


@lru_cache
def stored(folder: Path) -> Stored:
    return Stored.of(folder)


def test_there_is_a_file_of_every_specimen() -> None:
    assert set(SPECIMENS) == {name for folder, name in FILES if folder == FOLDERS[0]}


@pytest.mark.parametrize(("folder", "name"), FILES, ids=IDS)
def test_a_posterior_predicts_as_before_and_is_written_as_it_was_read(folder: Path, name: str, tmp_path: Path) -> None:
    kept = stored(folder)
    model = kept.model(name, SPECIMENS[name]().model())
    again = lw.load(folder / f"{name}.lapwing", model)
    twice = reloaded(again, model, tmp_path)
    now, written = (predictions(posterior, kept.inputs(name)) for posterior in (again, twice))
    expected = kept.under(f"{name}/expected/")
    assert now.keys() == written.keys() == expected.keys()
    for what, value in expected.items():
        dtype = next(model.parameters()).dtype  # probabilities come from quadrature in float32 too
        assert_close(now[what].double(), value.double(), SOLVED, dtype)
        assert_close(written[what], now[what])
    assert twice.network.selection.names == again.network.selection.names
    assert torch.equal(twice.network.theta(), again.network.theta())
    assert json.dumps(twice.likelihood.state().settings) == json.dumps(again.likelihood.state().settings)


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
@pytest.mark.parametrize("name", RUNS)
def test_a_run_ends_as_it_did(name: str, folder: Path) -> None:
    """Resumed from the file, it ends where an uninterrupted run of that version did."""
    kept = stored(folder)
    model = kept.model(name, small()).train()
    trained = run(name, model, resume=folder / f"{name}.training")
    assert [epoch.number for epoch in trained.history] == [0, 1, 2, 3]
    for what, value in kept.under(f"{name}/trained/").items():
        assert float((trained.model.state_dict()[what] - value).abs().max()) <= TRAINED * float(value.abs().max()), what
    now, expected = predictions(trained.posterior, inputs()[:5]), kept.under(f"{name}/expected/")
    for what, value in expected.items():
        assert float((now[what] - value).abs().max()) <= TRAINED * float(value.abs().max()), what


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_members_are_those_that_were_trained(folder: Path, tmp_path: Path) -> None:
    kept = stored(folder)
    shutil.copytree(folder / "ensemble", tmp_path / "ensemble")
    for number, member in enumerate(ensemble(kept.model("ensemble", small()), tmp_path / "ensemble")):
        for what, value in kept.under(f"ensemble/trained{number}/").items():
            assert torch.equal(member.state_dict()[what], value), what


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_the_names_of_laplace_torch(folder: Path) -> None:
    kept = stored(folder)
    laplace = translated(kept.model("compat", small(3)))
    laplace.load_state_dict(torch.load(folder / "compat.pt", weights_only=True))
    assert_close(laplace(inputs()[:5]), kept.under("compat/expected/")["probs"], SOLVED)
