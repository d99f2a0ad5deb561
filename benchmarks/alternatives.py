"""Lapwing beside five alternatives, each cell of a table tried: ``python -m benchmarks.alternatives``.

It runs in an environment that has them: ``pip install -c constraints.txt torch scikit-learn laplace-torch==0.3
mapie==1.6.0 torch-uncertainty==0.13.0 posteriors==0.1.3 "lightning[pytorch-extra]<2.7" timm``, then
``pip install --no-deps laplace-torch==0.3`` and ``pip uninstall torchvision``. torch-uncertainty imports torchvision,
whose build does not load beside a CPU build of torch; nothing here uses it, so that an empty module takes its place.

All columns get the same trained networks, the same 200 held-out rows and the same test rows, with the settings that
their documentation shows first. A cell that raises is printed as "error", one that a package has no function for as
"none" (its public names are searched); both have a note below. The process may take 8 GiB.
"""

from __future__ import annotations

import contextlib
import io
import pkgutil
import re
import resource
import sys
import types
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module, machinery
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from sklearn.datasets import load_digits, make_friedman1
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lapwing as lw

Rows = tuple[Tensor, Tensor]


class AbsentError(Exception):
    """A package has no function for the task."""


class EmptyModules:
    """A finder of modules that gives empty ones for torchvision."""

    def find_spec(self, name: str, path: object, target: object = None) -> machinery.ModuleSpec | None:
        return machinery.ModuleSpec(name, self, is_package=True) if name.split(".")[0] == "torchvision" else None  # type: ignore[arg-type]

    def create_module(self, spec: machinery.ModuleSpec) -> types.ModuleType:
        module = types.ModuleType(spec.name)
        module.__getattr__ = lambda name: type(name, (), {}) if name[:2] != "__" else _raise(name)  # type: ignore[method-assign]
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def _raise(name: str) -> Any:
    raise AttributeError(name)


@dataclass(frozen=True, eq=False)
class Task:
    """A trained network with its data; ``held_out`` calibrates, ``fresh`` gives guarantees, ``test`` judges."""

    net: nn.Module
    train: Rows
    held_out: Rows
    fresh: Rows
    test: Rows


def train(net: nn.Module, data: Rows, loss: Callable[[Tensor, Tensor], Tensor], steps: int = 200) -> nn.Module:
    optimiser = torch.optim.Adam(net.parameters(), lr=5e-3, weight_decay=1e-4)
    for _ in range(steps):
        optimiser.zero_grad()
        loss(net(data[0]), data[1]).backward()
        optimiser.step()
    return net.eval()


class Block(nn.Module):
    """A residual block with BatchNorm."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x + self.body(x))


class Reader(nn.Module):
    """A Transformer layer over the rows of an image."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Linear(8, 16)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.head = nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(self.rows(x)).flatten(1))


class Tasks:
    """The networks of the table, each trained when it is asked for."""

    def digits(self, net: nn.Module, *shape: int) -> Task:
        torch.manual_seed(0)
        images, labels = (torch.as_tensor(part) for part in load_digits(return_X_y=True))
        x = (images.float() / 16 + 0.4 * torch.randn(images.shape)).reshape(-1, *shape)
        parts = [(x[rows], labels[rows]) for rows in torch.randperm(len(x)).split([600, 200, 400, 597])]
        return Task(train(net, parts[0], nn.functional.cross_entropy), *parts)

    @cached_property
    def classifier(self) -> Task:
        torch.manual_seed(0)
        return self.digits(nn.Sequential(nn.Linear(64, 50), nn.ReLU(), nn.Linear(50, 10)), 64)

    @cached_property
    def resnet(self) -> Task:
        torch.manual_seed(0)
        stem = [nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), Block(8), nn.MaxPool2d(2), Block(8)]
        return self.digits(nn.Sequential(*stem, nn.Flatten(), nn.Linear(128, 10)), 1, 8, 8)

    @cached_property
    def transformer(self) -> Task:
        torch.manual_seed(0)
        return self.digits(Reader(), 8, 8)

    @cached_property
    def regression(self) -> Task:
        x, y = (torch.as_tensor(part).float() for part in make_friedman1(2000, noise=1.0, random_state=0))
        y = ((y - y[:200].mean()) / y[:200].std()).unsqueeze(1)
        parts = [(x[rows], y[rows]) for rows in torch.arange(2000).split([200, 200, 200, 1400])]
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(10, 50), nn.Tanh(), nn.Linear(50, 1))
        return Task(train(net, parts[0], nn.functional.mse_loss, 400), *parts)


def loader(data: Rows, size: int = 100) -> DataLoader[Any]:
    return DataLoader(TensorDataset(*data), batch_size=size)


def strange(task: Task) -> Tensor:
    """Return the test images with their pixels in another order."""
    return task.test[0][:, torch.randperm(64, generator=torch.Generator().manual_seed(0))]


def nll(probs: Any, task: Task) -> str:
    probs = torch.as_tensor(probs).detach().double()
    return f"{-probs.gather(1, task.test[1].unsqueeze(1)).clamp_min(1e-12).log().mean():.3f}"


def covered(low: Tensor, high: Tensor, task: Task) -> str:
    y = task.test[1]
    return f"{lw.metrics.coverage(low, high, y):.3f}, {(high - low).mean():.2f}"


def auroc(score: Callable[[Tensor], Any], task: Task) -> str:
    usual, new = (torch.as_tensor(score(inputs)).detach() for inputs in (task.test[0], strange(task)))
    return f"{lw.metrics.auroc(usual, new):.3f}"


def contained(members: Any, task: Task) -> str:
    members = torch.as_tensor(members).bool()
    return f"{members.gather(1, task.test[1].unsqueeze(1)).double().mean():.3f}, {members.sum(1).double().mean():.2f}"


def finite(value: Any) -> str:
    """Return "yes" for a finite number; those of different weights cannot be compared."""
    if not bool(torch.as_tensor(value).isfinite()):
        raise ValueError(f"{value} is not finite.")
    return "yes"


def entropy(probs: Tensor) -> Tensor:
    return torch.special.entr(probs).sum(1)


def information(samples: Tensor) -> Tensor:
    """Return the mutual information of probabilities drawn from a posterior, (S, B, C)."""
    return entropy(samples.mean(0)) - torch.special.entr(samples).sum(2).mean(0)


def public_names(package: str) -> set[str]:
    """Return the public names of a package and of its modules."""
    top = import_module(package)
    names = set(dir(top))
    for module in pkgutil.walk_packages(top.__path__, f"{package}.", onerror=lambda name: None):
        with contextlib.suppress(Exception):
            names |= {module.name, *dir(import_module(module.name))}
    return names


class Column:
    """What a package does; a task that it has no function for raises ``AbsentError``."""

    package = ""

    def __init__(self, tasks: Tasks) -> None:
        self.tasks = tasks

    def without(self, pattern: str, why: str) -> str:
        """Raise ``AbsentError``, after a look through the public names of the package."""
        found = (
            [name for name in public_names(self.package) if re.search(pattern, name.lower())] if self.package else []
        )
        if found:
            raise AssertionError(f"{self.package} has {', '.join(sorted(found)[:4])}")
        raise AbsentError(why)

    def probabilities(self) -> str:
        return nll(self.probs(self.tasks.classifier), self.tasks.classifier)

    def resnet(self) -> str:
        return nll(self.probs(self.tasks.resnet), self.tasks.resnet)

    def transformer(self) -> str:
        return nll(self.probs(self.tasks.transformer), self.tasks.transformer)

    def resnet_all(self) -> str:
        return self.all_weights(self.tasks.resnet)

    def transformer_all(self) -> str:
        return self.all_weights(self.tasks.transformer)

    def probs(self, task: Task) -> Any:
        """Return probabilities of the classes, by what the package offers first."""
        raise NotImplementedError

    def all_weights(self, task: Task) -> str:
        """Return the score with error bars on all weights."""
        return self.without("laplace|bayes|^posterior", "no error bars of weights")


class Lapwing(Column):
    package = "lapwing"

    def all_weights(self, task: Task) -> str:
        return nll(self.probs(task), task)

    def fit(self, task: Task, likelihood: str = "classification") -> lw.Fitted:
        return lw.fit(task.net, task.train, likelihood, validation=task.held_out, progress=False)

    def probs(self, task: Task) -> Any:
        return self.fit(task).predict(task.test[0]).probs

    def no_held_out(self) -> str:
        task = self.tasks.classifier
        return nll(lw.fit(task.net, task.train, "classification").predict(task.test[0]).probs, task)

    def intervals(self) -> str:
        task = self.tasks.regression
        low, high = self.fit(task, "regression").predict(task.test[0]).interval(0.95)
        return covered(low, high, task)

    def strange(self) -> str:
        return auroc(self.fit(self.tasks.classifier).ood(self.tasks.classifier.fresh[0]).score, self.tasks.classifier)

    def sets(self) -> str:
        task = self.tasks.classifier
        found: Any = self.fit(task).conformal(task.fresh, level=0.9).predict(task.test[0])
        return contained(found.members, task)

    def evidence(self) -> str:
        task = self.tasks.classifier
        tuner = lw.tuners.MaximiseEvidence()
        return finite(lw.fit(task.net, task.train, "classification", tuner=tuner).log_evidence())

    def saved(self) -> str:
        task, posterior = self.tasks.classifier, self.fit(self.tasks.classifier)
        with TemporaryDirectory() as folder:
            posterior.save(Path(folder) / "net.lapwing")
            again = lw.load(Path(folder) / "net.lapwing", task.net)
        torch.testing.assert_close(again.predict(task.test[0]).probs, posterior.predict(task.test[0]).probs)
        return "yes"


class LaplaceTorch(Column):
    package = "laplace"

    def fit(self, task: Task, weights: str = "last_layer", **tuning: Any) -> Any:
        laplace: Any = import_module("laplace")
        la = laplace.Laplace(task.net, "classification", subset_of_weights=weights, hessian_structure="kron")
        la.fit(loader(task.train))
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            la.optimize_prior_precision(pred_type="glm", link_approx="probit", **tuning)
        return la

    def calibrated(self, task: Task, weights: str = "last_layer") -> Any:
        return self.fit(task, weights, method="gridsearch", val_loader=loader(task.held_out))

    def probs(self, task: Task) -> Any:
        return self.calibrated(task)(task.test[0], pred_type="glm", link_approx="probit")

    def all_weights(self, task: Task) -> str:
        probs = self.calibrated(task, "all")(task.test[0], pred_type="glm", link_approx="probit")
        return nll(probs, task)

    def no_held_out(self) -> str:
        task = self.tasks.classifier
        return nll(self.fit(task, method="marglik")(task.test[0], pred_type="glm", link_approx="probit"), task)

    def intervals(self) -> str:
        task, laplace = self.tasks.regression, import_module("laplace")
        la = laplace.Laplace(task.net, "regression", subset_of_weights="all", hessian_structure="full")
        la.fit(loader(task.train))
        log_prior, log_sigma = torch.ones(1, requires_grad=True), torch.ones(1, requires_grad=True)
        optimiser = torch.optim.Adam([log_prior, log_sigma], lr=1e-1)
        for _ in range(100):
            optimiser.zero_grad()
            (-la.log_marginal_likelihood(log_prior.exp(), log_sigma.exp())).backward()
            optimiser.step()
        mean, variance = la(task.test[0])
        half = 1.96 * (variance[:, :, 0] + la.sigma_noise.item() ** 2).sqrt()
        return covered(mean - half, mean + half, task)

    def strange(self) -> str:
        la = self.fit(self.tasks.classifier, method="marglik")
        draw = lambda x: information(la.predictive_samples(x, pred_type="glm", n_samples=100))
        return auroc(draw, self.tasks.classifier)

    def sets(self) -> str:
        return self.without("conformal", "no conformal sets")

    def evidence(self) -> str:
        return finite(self.fit(self.tasks.classifier, method="marglik").log_marginal_likelihood())

    def saved(self) -> str:
        la, laplace, task = self.calibrated(self.tasks.classifier), import_module("laplace"), self.tasks.classifier
        file = io.BytesIO()
        torch.save(la.state_dict(), file)
        file.seek(0)
        again = laplace.Laplace(task.net, "classification", subset_of_weights="last_layer", hessian_structure="kron")
        again.load_state_dict(torch.load(file, weights_only=True))
        torch.testing.assert_close(again(task.test[0]), la(task.test[0]))
        return "yes"


def estimator(task: Task) -> Any:
    """Return the network as a fitted scikit-learn estimator of its own dozen lines, which MAPIE asks for."""
    base: Any = import_module("sklearn.base")
    kind = base.ClassifierMixin if task.train[1].ndim == 1 else base.RegressorMixin

    class Trained(kind, base.BaseEstimator):  # type: ignore[misc, valid-type]
        def __init__(self, net: Any = None, shape: Any = None) -> None:
            self.net, self.shape, self.classes_, self.fitted_ = net, shape, torch.arange(10).numpy(), True

        def fit(self, x: Any, y: Any) -> Trained:
            return self

        def outputs(self, x: Any) -> Tensor:
            with torch.no_grad():
                outputs: Tensor = self.net(torch.as_tensor(x).float().reshape(-1, *self.shape))
            return outputs

        def predict_proba(self, x: Any) -> Any:
            return self.outputs(x).double().softmax(1).numpy()

        def predict(self, x: Any) -> Any:
            outputs = self.outputs(x).double()
            return outputs.argmax(1).numpy() if outputs.shape[1] > 1 else outputs[:, 0].numpy()

    return Trained(task.net, task.train[0].shape[1:])


def arrays(data: Rows) -> tuple[Any, Any]:
    return data[0].flatten(1).numpy(), data[1].flatten().numpy()


class Mapie(Column):
    package = "mapie"

    def probs(self, task: Task) -> Any:
        calibrator = import_module("mapie.calibration").VennAbersCalibrator(estimator(task), cv="prefit")
        return calibrator.fit(*arrays(task.held_out)).predict_proba(arrays(task.test)[0])

    def no_held_out(self) -> str:
        raise AbsentError("cross-conformal sets and cross Venn-ABERS train the estimator again")

    def intervals(self) -> str:
        task = self.tasks.regression
        conformal = import_module("mapie.regression").SplitConformalRegressor(estimator(task), 0.95, prefit=True)
        _, ends = conformal.conformalize(*arrays(task.held_out)).predict_interval(arrays(task.test)[0])
        low, high = torch.as_tensor(ends)[:, :, 0].split(1, dim=1)
        return covered(low, high, task)

    def strange(self) -> str:
        return self.without("ood|out_of_dist|novelty|epistemic", "no score of strange inputs")

    def sets(self) -> str:
        task = self.tasks.classifier
        conformal = import_module("mapie.classification").SplitConformalClassifier(estimator(task), 0.9, prefit=True)
        _, members = conformal.conformalize(*arrays(task.fresh)).predict_set(arrays(task.test)[0])
        return contained(members[:, :, 0], task)

    def evidence(self) -> str:
        return self.without("evidence|marginal_lik|marglik", "no evidence")

    def saved(self) -> str:
        return self.without("^save|^load|state_dict|onnx", "no file format of its own; pickle")


class TorchUncertainty(Column):
    package = "torch_uncertainty"

    def post(self, name: str, case: Task, data: Rows, **settings: Any) -> Any:
        method = getattr(import_module("torch_uncertainty.post_processing"), name)(model=case.net, **settings)
        with contextlib.redirect_stderr(io.StringIO()):
            method.fit(loader(data))
        return method

    def probs(self, task: Task) -> Any:
        return self.post("TemperatureScaler", task, task.held_out)(task.test[0]).softmax(1)

    def all_weights(self, task: Task) -> str:
        method = self.post("LaplaceApprox", task, task.train, task="classification", weight_subset="all")
        return nll(method(task.test[0]), task)

    def no_held_out(self) -> str:
        task = self.tasks.classifier
        return nll(self.post("LaplaceApprox", task, task.train, task="classification")(task.test[0]), task)

    def intervals(self) -> str:
        task = self.tasks.regression
        outputs = self.post("LaplaceApprox", task, task.train, task="regression")(task.test[0])
        if isinstance(outputs, Tensor):
            raise AbsentError("LaplaceApprox returns the mean alone, ConformalRegCQR needs a network of quantiles")
        mean, variance = outputs
        half = 1.96 * variance.reshape(-1, 1).sqrt()
        return covered(mean - half, mean + half, task)

    def strange(self) -> str:
        task = self.tasks.classifier
        method = self.post("LaplaceApprox", task, task.train, task="classification")
        return auroc(lambda x: entropy(method(x)), task)

    def sets(self) -> str:
        task = self.tasks.classifier
        method = self.post("ConformalClsTHR", task, task.fresh, alpha=0.1)
        return contained(method.conformal(task.test[0]) > 0, task)

    def evidence(self) -> str:
        return self.without("log_evidence|marginal_lik|marglik", "none of its own; it wraps laplace-torch")

    def saved(self) -> str:
        task, method = (
            self.tasks.classifier,
            self.post("TemperatureScaler", self.tasks.classifier, self.tasks.classifier.held_out),
        )
        file = io.BytesIO()
        torch.save(method.state_dict(), file)
        file.seek(0)
        again = import_module("torch_uncertainty.post_processing").TemperatureScaler(model=task.net)
        again.load_state_dict(torch.load(file, weights_only=True))
        torch.testing.assert_close(again(task.test[0]), method(task.test[0]))
        return "yes"


class Posteriors(Column):
    """A toolbox: prior, noise and averages over samples are the user's, here precision 1 and 100 samples."""

    package = "posteriors"

    def fit(self, task: Task, likelihood: Callable[[Tensor, Rows], Tensor]) -> tuple[Any, Any]:
        posteriors: Any = import_module("posteriors")
        call = posteriors.model_to_function(task.net)
        forward = lambda theta, batch: (call(theta, batch[0]), torch.tensor([]))
        laplace = posteriors.laplace.diag_ggn.build(forward, likelihood, init_prec_diag=1.0)
        state = laplace.init(dict(task.net.named_parameters()))
        for batch in loader(task.train, 20):  # memory grows with the square of a batch
            state, _ = laplace.update(state, batch)
        return forward, state

    def functions(self, task: Task, x: Tensor, forward: Any, state: Any) -> tuple[Tensor, Tensor]:
        roots = {name: precision.rsqrt() for name, precision in dict(state.prec_diag).items()}
        linearised = import_module("posteriors").linearized_forward_diag
        parts = [linearised(forward, dict(state.params), (part, part), roots)[:2] for part in x.split(20)]
        mean, root = (torch.cat(each).detach() for each in zip(*parts, strict=True))
        return mean, root

    def samples(self, task: Task, x: Tensor) -> Tensor:
        score = lambda f, batch: nn.functional.cross_entropy(f, batch[1], reduction="sum").neg()
        mean, root = self.functions(task, x, *self.fit(task, score))
        noise = torch.randn(100, *mean.shape, 1, generator=torch.Generator().manual_seed(0))
        return (mean + (root @ noise)[..., 0]).softmax(-1)

    def probs(self, task: Task) -> Any:
        return self.samples(task, task.test[0]).mean(0)

    def all_weights(self, task: Task) -> str:
        return nll(self.probs(task), task)

    def no_held_out(self) -> str:
        return self.probabilities()

    def intervals(self) -> str:
        task = self.tasks.regression
        with torch.no_grad():
            noise = (task.net(task.held_out[0]) - task.held_out[1]).square().mean()
        score = lambda f, batch: -(f - batch[1]).square().sum() / (2 * noise)
        mean, root = self.functions(task, task.test[0], *self.fit(task, score))
        half = 1.96 * (root[:, :, 0].square() + noise).sqrt()
        return covered(mean - half, mean + half, task)

    def strange(self) -> str:
        return auroc(lambda x: information(self.samples(self.tasks.classifier, x)), self.tasks.classifier)

    def sets(self) -> str:
        return self.without("conformal", "no conformal sets")

    def evidence(self) -> str:
        return self.without("evidence|marginal_lik|marglik", "no evidence")

    def saved(self) -> str:
        score = lambda f, batch: nn.functional.cross_entropy(f, batch[1], reduction="sum").neg()
        _, state = self.fit(self.tasks.classifier, score)
        file = io.BytesIO()
        torch.save({"params": dict(state.params), "precision": dict(state.prec_diag)}, file)
        file.seek(0)
        torch.testing.assert_close(torch.load(file, weights_only=True)["precision"], dict(state.prec_diag))
        return "by hand"


class Scaling(Column):
    """Temperature scaling, in the ten lines that it takes; for numbers, noise refitted on the held-out rows."""

    def temperature(self, task: Task) -> Tensor:
        with torch.no_grad():
            logits, labels = task.net(task.held_out[0]), task.held_out[1]
        log_t = torch.zeros((), requires_grad=True)
        optimiser = torch.optim.LBFGS([log_t], max_iter=50)

        def loss() -> Tensor:
            optimiser.zero_grad()
            value = nn.functional.cross_entropy(logits / log_t.exp(), labels)
            value.backward()
            return value

        optimiser.step(loss)
        return log_t.detach().exp()

    def probs(self, task: Task) -> Any:
        return (task.net(task.test[0]) / self.temperature(task)).softmax(1)

    def no_held_out(self) -> str:
        return self.without("", "a temperature needs held-out rows")

    def intervals(self) -> str:
        task = self.tasks.regression
        with torch.no_grad():
            half = 1.96 * (task.net(task.held_out[0]) - task.held_out[1]).square().mean().sqrt()
            mean = task.net(task.test[0])
        return covered(mean - half, mean + half, task)

    def strange(self) -> str:
        task, temperature = self.tasks.classifier, self.temperature(self.tasks.classifier)
        return auroc(lambda x: entropy((task.net(x) / temperature).softmax(1)), task)

    def sets(self) -> str:
        return self.without("", "probabilities, no sets")

    def evidence(self) -> str:
        return self.without("", "no evidence")

    def saved(self) -> str:
        return "a number"


COLUMNS = {
    "Lapwing": (Lapwing, "lapwing"),
    "laplace-torch": (LaplaceTorch, "laplace-torch"),
    "MAPIE": (Mapie, "mapie"),
    "torch-unc.": (TorchUncertainty, "torch-uncertainty"),
    "posteriors": (Posteriors, "posteriors"),
    "temperature": (Scaling, ""),
}
ROWS = (
    ("classes, NLL", "probabilities"),
    ("  ResNet", "resnet"),
    ("    all weights", "resnet_all"),
    ("  Transformer", "transformer"),
    ("    all weights", "transformer_all"),
    ("  no held-out rows", "no_held_out"),
    ("95 % intervals", "intervals"),
    ("strange, AUROC", "strange"),
    ("90 % sets", "sets"),
    ("log evidence", "evidence"),
    ("file, no pickle", "saved"),
)


def main() -> None:
    sys.meta_path.insert(0, EmptyModules())  # type: ignore[arg-type]
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))
    tasks, notes = Tasks(), list[str]()
    versions = [
        f"{name} {version(package)}" for _, package in COLUMNS.values() if (name := package) not in ("", "lapwing")
    ]
    print(f"lapwing {lw.__version__}, torch {torch.__version__}, {', '.join(versions)}\n")
    print(f"{'':18s}" + "".join(f"{name:>15s}" for name in COLUMNS))
    for row, task in ROWS:
        cells = []
        for name, (column, _) in COLUMNS.items():
            torch.manual_seed(0)
            try:
                cell = getattr(column(tasks), task)()
            except AbsentError as why:
                cell, note = "none", str(why)
            except Exception as error:  # whatever another package raises is a result
                cell, note = "error", f"{type(error).__name__}: {' '.join(str(error).split())[:150]}"
            if cell in ("none", "error"):
                notes.append(f"{row.strip()}, {name}: {note}")
                cell = f"{cell} [{len(notes)}]"
            cells.append(cell)
        print(f"{row:18s}" + "".join(f"{cell:>15s}" for cell in cells), flush=True)
    print("\nintervals: coverage, mean width; sets: coverage, mean size\n")
    for number, note in enumerate(notes, 1):
        print(f"[{number}] {note}")


if __name__ == "__main__":
    main()
