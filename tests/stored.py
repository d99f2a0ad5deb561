"""Files that a version wrote, with what it predicted from them: ``python -m tests.stored FOLDER`` writes a new set.

Run it with the code of a version that is released, as ``python -m tests.stored tests/data/0.2.0``; later versions load
the files and must predict the same (``tests/unit/test_files.py``). Networks are small and in float64.
"""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lapwing as lw
from lapwing.compat import Laplace
from lapwing.errors import UnsupportedError
from tests import problems
from tests.cases import BY_NAME

D = torch.float64
EXPECTED = "expected.safetensors"


def small(outputs: int = 2, dropout: bool = False, dtype: torch.dtype = D) -> nn.Module:
    """Return 3 → 4 → outputs with a norm in between."""
    torch.manual_seed(1)
    middle = nn.Dropout(0.3) if dropout else nn.Tanh()
    return nn.Sequential(nn.Linear(3, 4), middle, nn.LayerNorm(4), nn.Linear(4, outputs)).to(dtype).eval()


def inputs(dtype: torch.dtype = D) -> Tensor:
    return torch.randn(24, 3, dtype=dtype, generator=torch.Generator().manual_seed(2))


def targets(kind: str, x: Tensor) -> Tensor:
    noise = torch.randn(24, 2, dtype=D, generator=torch.Generator().manual_seed(3))
    f = torch.stack([x[:, 0].double().sin() + x[:, 1].double(), x[:, 2].double()], 1) + 0.5 * noise
    kinds = {
        "numbers": lambda: f.to(x.dtype), "number": lambda: f[:, 0].to(x.dtype),
        "classes": lambda: (f[:, 0] > 0).long() + (f[:, 1] > 0.5).long(),
        "label": lambda: (f[:, 0] > 0).long(), "labels": lambda: (f > 0).long(),
    }  # fmt: skip
    return kinds[kind]()


@dataclass(frozen=True)
class Specimen:
    """One way to fit: a model, data and the arguments of ``fit``."""

    likelihood: Any
    kind: str
    outputs: int
    options: dict[str, Any] = field(default_factory=dict)
    dropout: bool = False
    dtype: torch.dtype = D
    case: str = ""  # a network of tests/cases.py instead

    def model(self) -> nn.Module:
        return BY_NAME[self.case].build() if self.case else small(self.outputs, self.dropout, self.dtype)

    def data(self) -> tuple[Any, Tensor]:
        if not self.case:
            x = inputs(self.dtype)
            return x, targets(self.kind, x)
        case, generator = BY_NAME[self.case], torch.Generator().manual_seed(4)
        return case.batch(12), torch.randint(0, case.outputs[-1], (12, *case.outputs[:-1]), generator=generator)

    def fitted(self) -> lw.Fitted:
        x, y = self.data()
        options: dict[str, Any] = {"prior": 2.0, **self.options}
        if options.pop("held_out", False):
            x, y, options["validation"] = x[:12], y[:12], (x[12:], y[12:])
        return lw.fit(self.model(), [(x, y)], self.likelihood, progress=False, **options)


def _classes(likelihood: Any = "classification", **options: Any) -> Specimen:
    return Specimen(likelihood, "classes", 3, options)


def _numbers(likelihood: Any = "regression", **options: Any) -> Specimen:
    return Specimen(likelihood, "numbers", 2, options)


def _case(name: str, **options: Any) -> Specimen:
    return Specimen("classification", "", 0, options, case=name)


SPECIMENS: dict[str, Callable[[], Specimen]] = {
    # Methods.
    "full": lambda: _classes(method=lw.Full()),
    "full_hessian": lambda: _classes(method=lw.Full(curvature="hessian"), prior=100.0),
    "full_regression": lambda: _numbers(method=lw.Full()),
    "diagonal": lambda: _classes(method=lw.Diagonal()),
    "kron": lambda: _classes(method=lw.Kron()),
    "kron_reduce": lambda: _case("token_level", method=lw.Kron(sharing="reduce", full_limit=3)),
    "ekron": lambda: _classes(method=lw.EKron()),
    "low_rank": lambda: _numbers(method=lw.LowRank(rank=5)),
    "kernel_space": lambda: _classes(method=lw.KernelSpace()),
    "sampled": lambda: _numbers(method=lw.Sampled(4)),
    "ella": lambda: _classes(method=lw.ELLA(num_landmarks=6, rank=4)),
    "ella_residual": lambda: _numbers(method=lw.ELLA(num_landmarks=6, rank=4, residual=True)),
    "valla": lambda: _numbers(method=lw.VaLLA(num_inducing=4, steps=2)),
    "valla_classes": lambda: _classes(method=lw.VaLLA(num_inducing=4, steps=2)),
    "fmgp": lambda: _numbers(method=lw.FMGP(4, steps=3)),
    "fmgp_features": lambda: _classes(method=lw.FMGP(4, steps=3, kernel="features")),
    "hfl": lambda: _numbers(method=lw.HFL(mode="pretrained", drift=1e9), prior=1000.0),
    "map_only": lambda: _classes(method=lw.baselines.MapOnly()),
    "ivon": lambda: _classes(method=lw.baselines.IVON(2, 1e-3, batch_size=4, samples=3)),
    "variational_last_layer": lambda: _classes(method=lw.baselines.VariationalLastLayer(samples=2)),
    "swag": lambda: _classes(method=lw.baselines.SWAG(3, 3, learning_rate=1e-3, batch_size=4, samples=3)),
    "dropout": lambda: Specimen("regression", "numbers", 2, {"method": lw.baselines.MCDropout(samples=3)}, True),
    "auto": lambda: _numbers(method="auto", prior=None),
    # Mixtures and other tuners.
    "integrate_classes": lambda: _classes(prior=None, held_out=True),
    "integrate_classes_given": lambda: _classes(method=lw.Full(), held_out=True),
    "integrate_binary": lambda: Specimen("binary", "label", 1, {"prior": None, "held_out": True}),
    "integrate_multilabel": lambda: Specimen("multilabel", "labels", 2, {"prior": None, "held_out": True}),
    "integrate_regression": lambda: _numbers(prior=None, held_out=True),
    "integrate_scales": lambda: _classes(
        method=lw.baselines.SWAG(3, 3, learning_rate=1e-3, batch_size=4, samples=3), held_out=True
    ),
    "budget_classes": lambda: _classes(prior=None),
    "budget_regression": lambda: _numbers(prior=None),
    "budget_kron": lambda: _numbers(prior=None, method=lw.Kron()),
    "evidence": lambda: _numbers(prior=lw.per_layer(), tuner=lw.tuners.MaximiseEvidence()),
    "linear_mode": lambda: _numbers(prior=None, tuner=lw.tuners.LinearMode(mean="tangent")),
    # Likelihoods.
    "per_output": lambda: _numbers(lw.Gaussian(per_output=True), method=lw.Kron()),
    "per_output_full": lambda: _numbers(lw.Gaussian(per_output=True), method=lw.Full(), prior=None),
    "given_noise": lambda: _numbers(lw.Gaussian(noise_std=(0.3, 0.4)), method=lw.Full()),
    "student": lambda: _numbers(lw.Gaussian(noise_std=0.5, degrees=6, tail_scale=0.8), method=lw.Diagonal()),
    "class_weights": lambda: _classes(lw.Categorical(class_weights=(1.0, 2.0, 3.0), link="bridge")),
    "class_weights_ignored": lambda: _classes(
        lw.Categorical(class_weights=(1.0, 2.0, 3.0), ignore_index=1, link="mc", samples=16, seed=4)
    ),
    "warm": lambda: _classes(lw.Categorical(temperature=2.5)),
    "binary": lambda: Specimen("binary", "label", 1),
    "bernoulli": lambda: Specimen(
        lw.Bernoulli(pos_weight=(1.0, 2.0), ignore_index=-1, link="quadrature"), "labels", 2, {"method": lw.Kron()}
    ),
    "bernoulli_warm": lambda: Specimen(lw.Bernoulli(pos_weight=2.0, temperature=0.5), "label", 1),
    "poisson": lambda: Specimen(lw.Poisson(), "labels", 2, {"method": lw.Diagonal()}),
    "heteroscedastic": lambda: Specimen("heteroscedastic", "number", 2, {"method": lw.Kron()}),
    # Weights.
    "last_layer": lambda: _classes(method=lw.Full(), weights=lw.last_layer),
    "last_layer_mixture": lambda: _classes(weights=lw.last_layer, prior=None),
    "named": lambda: _classes(method=lw.Kron(), weights=lw.named("3.weight")),
    "subnetwork": lambda: _classes(method=lw.Diagonal(), weights=lw.subnetwork(torch.tensor([1, 5, 30]))),
    # Priors.
    "per_layer": lambda: _classes(method=lw.Full(), prior=lw.per_layer(torch.tensor([1.0, 2.0, 3.0]))),
    "grouped": lambda: _classes(method=lw.Diagonal(), prior=lw.grouped({".*weight": 1.0, ".*bias": 2.0}, 0.5)),
    "each_weight": lambda: _classes(method=lw.Diagonal(), prior=lw.priors.diagonal(3.0)),
    "g_prior": lambda: _classes(method=lw.Full(), prior=lw.priors.g_prior(0.5)),
    "normalised_groups": lambda: _classes(method=lw.Full(), prior=lw.priors.per_normalised_group()),
    "prior_mean": lambda: _classes(method=lw.Full(), prior=lw.isotropic(2.0, torch.linspace(-1, 1, 39))),
    # Networks.
    "cnn": lambda: _case("cnn", method=lw.Kron()),
    "embedding": lambda: _case("embedding", method=lw.EKron()),
    "token_level": lambda: _case("token_level", method=lw.Kron()),
    "dict_input": lambda: _case("dict_input", prior=None),
    "tuple_input": lambda: _case("tuple_input", method=lw.Full()),
    "float32": lambda: Specimen("classification", "classes", 3, {"prior": None}, dtype=torch.float32),
}
RUNS = ("online", "online_lbfgs", "classic")  # training runs of 4 epochs; the file has the state after 2


def run(name: str, model: nn.Module, epochs: int = 4, **options: Any) -> Any:
    """Train at a constant rate, so that a shorter run is the beginning of a longer one."""
    x = inputs()
    y = targets("numbers", x)
    if name == "classic":
        recipe = lw.recipes.classic(epochs)
    else:
        optimiser = "lbfgs" if name == "online_lbfgs" else "adam"
        recipe = lw.recipes.online(
            epochs, optimiser=optimiser, update=lw.tuners.Ascend(steps=2), method=lw.Diagonal(), rate=1e-2,
            last_rate=1e-2, burn_in=0, frequency=1,
        )  # fmt: skip
    data = DataLoader(TensorDataset(x, y), batch_size=7, shuffle=name == "online")
    return lw.train(model, data, "regression", recipe=recipe, progress=False, **options)


def ensemble(model: nn.Module, folder: Path) -> list[nn.Module]:
    """Return two members that were trained for two epochs; the folder has their checkpoints."""
    x = inputs()
    recipe = lw.recipes.fixed(epochs=2)
    return lw.train_ensemble(
        model, [(x, targets("numbers", x))], "regression", members=2, recipe=recipe, folder=folder, progress=False
    )


def translated(model: nn.Module) -> Laplace:
    """Return an estimator with laplace-torch's names."""
    return Laplace(model, "classification", subset_of_weights="all", hessian_structure="kron")


def predictions(posterior: lw.Fitted, x: Any) -> dict[str, Tensor]:
    """Return what a posterior says about inputs: the belief about f, the predictive, and the evidence if it has one."""
    belief, predictive = posterior.functions(x), posterior.predict(x)
    found = {"mean": belief.mean, "cov": belief.cov, "predicted": predictive.mean}
    if hasattr(predictive, "variance"):
        found["variance"] = predictive.variance
    with contextlib.suppress(UnsupportedError):
        found["evidence"] = posterior.log_evidence().reshape(1)
    found["dispersion"] = posterior.likelihood.dispersion.reshape(-1)
    return {name: value.detach().contiguous().clone() for name, value in found.items()}


def leaves(tree: Any, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a mapping or tuple by dotted names."""
    if isinstance(tree, Tensor):
        yield prefix, tree.detach().contiguous().clone()
        return
    for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
        yield from leaves(value, f"{prefix}.{key}")


@dataclass(frozen=True)
class Stored:
    """The tensors beside the files of one version."""

    folder: Path
    tensors: dict[str, Tensor]

    @classmethod
    def of(cls, folder: Path) -> Stored:
        return cls(folder, load_file(folder / EXPECTED))

    def under(self, prefix: str) -> dict[str, Tensor]:
        return {key[len(prefix) :]: value for key, value in self.tensors.items() if key.startswith(prefix)}

    def inputs(self, name: str) -> Any:
        """Return the inputs of a specimen in their form: a tensor, a mapping or a tuple."""
        parts = self.under(f"{name}/input")
        if "" in parts:
            return parts[""]
        keys = {key[1:]: value for key, value in parts.items()}
        return tuple(keys[str(i)] for i in range(len(keys))) if "0" in keys else keys

    def model(self, name: str, model: nn.Module) -> nn.Module:
        model.load_state_dict(self.under(f"{name}/weight/"))
        return model


def write(folder: Path) -> None:
    """Write all files of the present version."""
    if folder.exists():
        raise SystemExit(f"{folder} exists; the files of a version are written once.")
    folder.mkdir(parents=True)
    tensors: dict[str, Tensor] = {}

    def keep(name: str, values: Iterable[tuple[str, Tensor]]) -> None:
        tensors.update({f"{name}{key}": value.detach().contiguous().clone() for key, value in values})

    for name, make in SPECIMENS.items():
        specimen = make()
        posterior = specimen.fitted()
        posterior.save(folder / f"{name}.lapwing")
        x = problems.rows(specimen.data()[0], slice(5))
        keep(f"{name}/weight/", specimen.model().state_dict().items())
        keep(f"{name}/input", leaves(x))
        keep(f"{name}/expected/", predictions(posterior, x).items())
    for name in RUNS:
        model = small().train()
        run(name, model, 2, checkpoint=folder / f"{name}.training")
        trained = run(name, model)
        keep(f"{name}/weight/", model.state_dict().items())
        keep(f"{name}/trained/", trained.model.state_dict().items())
        keep(f"{name}/expected/", predictions(trained.posterior, inputs()[:5]).items())
    (folder / "ensemble").mkdir()
    keep("ensemble/weight/", small().state_dict().items())
    for number, member in enumerate(ensemble(small(), folder / "ensemble")):
        keep(f"ensemble/trained{number}/", member.state_dict().items())
    x = inputs()
    model = small(3)
    laplace = translated(model)
    laplace.fit([(x, targets("classes", x))])
    torch.save(laplace.state_dict(), folder / "compat.pt")
    keep("compat/weight/", model.state_dict().items())
    keep("compat/expected/", [("probs", laplace(x[:5]))])
    save_file(tensors, folder / EXPECTED)


if __name__ == "__main__":
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        write(Path(sys.argv[1]))
