"""The front door: what goes in, in every form it may have, and what comes out."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, SubsetRandomSampler, TensorDataset

import lapwing as lw
from lapwing.methods.base import Method
from lapwing.priors import Isotropic
from tests import problems
from tests.cases import BY_NAME, Wrapped
from tests.conformance.declared import SMALL, small_method
from tests.tolerances import assert_close

D = torch.float64
N, INPUTS, CLASSES = 11, 4, 3


def net(outputs: int = CLASSES, squeeze: bool = False) -> nn.Module:
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(INPUTS, 5), nn.Tanh(), nn.Linear(5, outputs)).double()
    return Wrapped(lambda m, x: m.net(x).squeeze(-1), net=model) if squeeze else model


@pytest.fixture
def x() -> Tensor:
    return torch.randn(N, INPUTS, dtype=D)


@pytest.fixture
def y() -> Tensor:
    return torch.randint(0, CLASSES, (N,))


def fit(model: nn.Module, data: Any, likelihood: Any = "classification", **options: Any) -> lw.Fitted:
    options.setdefault("method", lw.Full())
    options.setdefault("prior", 1.5)
    return lw.fit(model, data, likelihood, **options)


# Data


class Stream(IterableDataset):
    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y

    def __iter__(self) -> Iterator[Any]:
        return iter(zip(self.x, self.y, strict=True))


class Again:
    """Re-iterable, and nothing more: no length."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)


class Mappings(Dataset):
    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return {"input": self.x[i], "label": self.y[i]}


SOURCES: dict[str, tuple[Any, list[int]]] = {
    "list": (lambda x, y: problems.split(x, y, (5, 6)), list(range(N))),
    "list of lists": (lambda x, y: [list(b) for b in problems.split(x, y, (5, 6))], list(range(N))),
    "tuple of tensors": (lambda x, y: (x, y), list(range(N))),
    "loader": (lambda x, y: DataLoader(TensorDataset(x, y), 4), list(range(N))),
    "drop_last": (lambda x, y: DataLoader(TensorDataset(x, y), 4, drop_last=True), list(range(8))),
    "sampler": (lambda x, y: DataLoader(TensorDataset(x, y), 2, sampler=SubsetRandomSampler([1, 4, 9])), [1, 4, 9]),
    "shuffled": (lambda x, y: DataLoader(TensorDataset(x, y), 4, shuffle=True), list(range(N))),
    "stream": (lambda x, y: DataLoader(Stream(x, y), 4), list(range(N))),
    "re-iterable": (lambda x, y: Again(problems.split(x, y, (1, 10))), list(range(N))),
}


PASSING = [lw.Full(), lw.Kron(), lw.EKron(), lw.Diagonal(), lw.LowRank(rank=60)]


@pytest.mark.parametrize(("source", "method"), [(name, PASSING[i % 5]) for i, name in enumerate(SOURCES)])
def test_every_source_of_the_same_data_gives_the_same_posterior(source: str, method: Any, x: Tensor, y: Tensor) -> None:
    make, used = SOURCES[source]
    expected = fit(net(), [(x[used], y[used])], method=method)
    posterior = fit(net(), make(x, y), method=method)
    assert posterior.posterior.statistics.data == len(used)  # what was iterated, not what a length says
    assert_close(posterior.functions(x).cov, expected.functions(x).cov)
    assert_close(posterior.log_evidence(), expected.log_evidence())


def test_mappings_with_a_target(x: Tensor, y: Tensor) -> None:
    model = Wrapped(lambda m, input: m.net(input), net=net())
    expected = fit(net(), [(x, y)])
    for data, key in (
        ([{"input": x, "labels": y}], None),
        ([{"input": x, "answer": y}], "answer"),
        (DataLoader(Mappings(x, y), 4), None),
        ([({"input": x}, y)], None),
    ):
        assert_close(fit(model, data, target_key=key).functions({"input": x}).cov, expected.functions(x).cov)


def test_generators_are_refused_untouched(x: Tensor, y: Tensor) -> None:
    source = ((a, b) for a, b in [(x, y)])
    with pytest.raises(lw.errors.DataError, match="one-shot iterator"):
        lw.fit(net(), source, "classification")
    assert len(list(source)) == 1


def test_progress_shows_and_changes_nothing(x: Tensor, y: Tensor, capsys: pytest.CaptureFixture[str]) -> None:
    loud = fit(net(), [(x, y)], progress=True)
    printed = capsys.readouterr().err
    assert "Full" in printed
    quiet = fit(net(), [(x, y)], progress=False)
    assert capsys.readouterr().err == ""
    assert_close(loud.functions(x).cov, quiet.functions(x).cov)


# Strings at the door


@pytest.mark.parametrize(("name", "method"), [(None, lw.Kron()), ("diagonal", lw.Diagonal())])
def test_names_stand_for_objects(name: str | None, method: Any, x: Tensor, y: Tensor) -> None:
    by_name = lw.fit(net(), [(x, y)], "classification", method=name, prior=1.5)
    by_object = lw.fit(net(), [(x, y)], lw.Categorical(), method=method, prior=lw.isotropic(1.5))
    assert_close(by_name.functions(x).mean, by_object.functions(x).mean)
    assert torch.equal(by_name.functions(x).cov, by_object.functions(x).cov)


@pytest.mark.parametrize(
    ("name", "kind", "outputs"),
    [
        ("classification", lw.Categorical, 3), ("categorical", lw.Categorical, 3), ("classification", lw.Bernoulli, 1),
        ("binary", lw.Bernoulli, 1), ("bernoulli", lw.Bernoulli, 1), ("multilabel", lw.Bernoulli, 3),
        ("regression", lw.Gaussian, 3), ("gaussian", lw.Gaussian, 3), ("poisson", lw.Poisson, 3),
        ("counts", lw.Poisson, 3), ("heteroscedastic", lw.HeteroscedasticGaussian, 2),
    ],
)  # fmt: skip
def test_likelihoods_by_name(name: str, kind: type, outputs: int, x: Tensor) -> None:
    y = torch.randint(0, 2, (N,) if kind is lw.Categorical else (N, 1 if name == "heteroscedastic" else outputs))
    posterior = fit(net(outputs), [(x, y)], name)
    assert type(posterior.likelihood) is kind


@pytest.mark.parametrize("name", [None, "all", "all_weights", "last_layer"])
def test_weights_by_name(name: str | None, x: Tensor, y: Tensor) -> None:
    size = fit(net(), [(x, y)], weights=name).network.selection.size
    assert size == (18 if name == "last_layer" else 43)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "kfac"}, "method is 'kfac'; expected one of full, diagonal, kron, ekron, low_rank, map_only"),
        ({"weights": "first"}, "weights is 'first'; expected one of all, all_weights, last_layer"),
        ({"likelihood": "softmax"}, "likelihood is 'softmax'; expected one of classification"),
        ({"likelihood": nn.CrossEntropyLoss()}, "likelihood is the module CrossEntropyLoss.*whose class inherits from"),
    ],
)
def test_unknown_names_list_the_known(options: dict[str, Any], message: str, x: Tensor, y: Tensor) -> None:
    options = {"likelihood": "classification", **options}
    with pytest.raises(lw.errors.UnsupportedError, match=message):
        lw.fit(net(), [(x, y)], **options)


def test_a_number_is_an_isotropic_precision(x: Tensor, y: Tensor) -> None:
    for given in (2, 2.0, torch.tensor(2.0), lw.isotropic(2.0)):
        posterior = fit(net(), [(x, y)], prior=given)
        assert isinstance(posterior.prior.given, Isotropic)
        assert posterior.prior.values.item() == 2.0


def test_no_prior_means_learned(x: Tensor, y: Tensor) -> None:
    learned = lw.fit(net(), [(x, y)], "classification", method=lw.Full())
    given = fit(net(), [(x, y)], prior=1.0)
    assert learned.prior.values.item() != 1.0
    assert float(learned.log_evidence()) > float(given.log_evidence())
    assert_close(given.tuned().prior.values, learned.prior.values, 1 / 4)


# What comes out

OUTCOMES: dict[str, tuple[Any, int, Tensor, tuple[int, ...]]] = {
    "gaussian": (lw.Gaussian(), 3, torch.randn(N, 3, dtype=D), (N, 3)),
    "gaussian, one": (lw.Gaussian(), 1, torch.randn(N, 1, dtype=D), (N, 1)),
    "gaussian, flat targets": (lw.Gaussian(), 1, torch.randn(N, dtype=D), (N, 1)),
    "heteroscedastic": (lw.HeteroscedasticGaussian(), 4, torch.randn(N, 2, dtype=D), (N, 2)),
    "poisson": (lw.Poisson(), 3, torch.randint(0, 5, (N, 3)), (N, 3)),
    "categorical": (lw.Categorical(), 3, torch.randint(0, 3, (N,)), (N, 3)),
    "categorical, bridge": (lw.Categorical(link="bridge"), 3, torch.randint(0, 3, (N,)), (N, 3)),
    "categorical, mc": (lw.Categorical(link="mc"), 3, torch.randint(0, 3, (N,)), (N, 3)),
    "bernoulli": (lw.Bernoulli(), 1, torch.randint(0, 2, (N,)), (N, 1)),
    "multilabel": (lw.Bernoulli(link="quadrature"), 3, torch.randint(0, 2, (N, 3)), (N, 3)),
}


@pytest.mark.parametrize(("name", "method"), [*zip(OUTCOMES, cycle([lw.Kron(), lw.baselines.MapOnly()]))])
def test_predictions_have_their_shapes(name: str, method: Any, x: Tensor) -> None:
    likelihood, outputs, y, shape = OUTCOMES[name]
    posterior = lw.fit(net(outputs), [(x, y)], likelihood, method=method)
    belief = posterior.functions(x)
    assert belief.mean.shape == belief.variance.shape == belief.std.shape == (N, outputs)
    assert belief.cov.shape == (N, outputs, outputs)
    p = posterior.predict(x)
    classes = isinstance(likelihood, lw.Categorical)
    assert p.mean.shape == shape
    assert p.log_prob(y).shape == (N,)
    assert bool(torch.isfinite(p.log_prob(y)).all())
    assert p.sample(5).shape == ((5, N) if classes else (5, *shape))
    assert p.entropy.shape == p.mutual_information.shape == (N,)
    assert isinstance(p.distribution, torch.distributions.Distribution)
    assert p.distribution.batch_shape == (N,)
    assert p.epistemic.shape == p.aleatoric.shape
    if isinstance(likelihood, lw.Categorical | lw.Bernoulli):
        assert p.probs.shape == shape
    else:
        low, high = p.interval(0.9)
        assert low.shape == high.shape == p.std.shape == p.variance.shape == shape
        assert bool((low <= high).all())
    assert_close(posterior(x).mean, p.mean)
    assert posterior.function_samples(x, 4).shape == posterior.network_samples(x, 4).shape == (4, N, outputs)


@pytest.mark.parametrize(
    ("likelihood", "method"),
    [*zip(cycle([lw.Gaussian(noise_std=0.5), lw.Bernoulli(), lw.Poisson()]), [*PASSING[:4], lw.LowRank(rank=9)])],
)
def test_a_squeezed_output_is_an_output_of_one(likelihood: Any, method: Any, x: Tensor) -> None:
    """f (B,) with targets (B,): never a (B, B) broadcast."""
    y = torch.randint(0, 2, (N,)).double()
    flat = fit(net(1, squeeze=True), [(x, y)], likelihood, method=method)
    column = fit(net(1), [(x, y[:, None])], likelihood, method=method)
    assert flat.functions(x).mean.shape == (N, 1)
    assert_close(flat.functions(x).cov, column.functions(x).cov)
    assert_close(flat.log_evidence(), column.log_evidence())
    assert_close(flat.predict(x).log_prob(y), column.predict(x).log_prob(y[:, None]))
    samples = flat.network_samples(x, 3, torch.Generator().manual_seed(1))
    assert_close(samples, column.network_samples(x, 3, torch.Generator().manual_seed(1)))


@pytest.mark.parametrize("method", [lw.Full(), lw.Kron(), lw.EKron(), lw.Diagonal(), lw.LowRank(rank=123)])
def test_ignored_tokens_do_not_count(method: Any) -> None:
    """What is under an ignored token's target makes no difference; the number of data is that of the others."""
    case = BY_NAME["token_level"]
    tokens, y = case.batch(5), problems.targets(case, 5)
    y[0, 1:] = -100
    y[3] = -100
    posterior = fit(case.build(), problems.split(tokens, y, (2, 3)), method=method)
    assert posterior.posterior.statistics.data == 13
    if not isinstance(method, lw.Kron | lw.EKron):  # whose rows count positions, ignored or not
        keep = fit(case.build(), [(tokens[b : b + 1], y[b : b + 1]) for b in (0, 1, 2, 4)], method=method)
        assert_close(posterior.functions(tokens).cov, keep.functions(tokens).cov)
        assert_close(posterior.log_evidence(), keep.log_evidence())
    belief = posterior.functions(tokens)
    assert belief.mean.shape == (5, 4, 3)
    assert belief.cov.shape == (5, 4, 3, 3)
    p = posterior.predict(tokens)
    assert p.probs.shape == (5, 4, 3)
    assert p.log_prob(y.clamp_min(0)).shape == (5, 4)
    assert posterior.function_samples(tokens, 6).shape == (6, 5, 4, 3)
    joint = posterior.functions(tokens, joint=True)
    assert joint.cov.shape == (5, 4, 3, 5, 4, 3)


def test_tokens_with_gaussian_targets() -> None:
    case = BY_NAME["token_level"]
    tokens, y = case.batch(5), torch.randn(5, 4, 3, dtype=D)
    posterior = lw.fit(case.build(), [(tokens, y)], "regression")
    model = case.build()
    assert posterior.posterior.statistics.data == 20
    assert_close(posterior.likelihood.dispersion, (model(tokens) - y).square().mean())
    assert posterior.predict(tokens).interval()[0].shape == (5, 4, 3)


def test_class_weights_reach_the_curvature(x: Tensor, y: Tensor) -> None:
    """A weight of two is a datum seen twice, a weight of nought one not seen."""
    weighted = fit(net(), [(x, y)], lw.Categorical(class_weights=(1.0, 2.0, 0.0)))
    again = y == 1
    keep = y != 2
    copied = fit(net(), [(x[keep], y[keep]), (x[again], y[again])])
    assert_close(weighted.functions(x).cov, copied.functions(x).cov)
    assert_close(weighted.log_evidence(), copied.log_evidence())


def test_map_only_is_the_plain_network(x: Tensor, y: Tensor) -> None:
    model = net()
    posterior = lw.fit(model, [(x, y)], "classification", method=lw.baselines.MapOnly())
    assert_close(posterior.predict(x).probs, model(x).softmax(-1))
    assert float(posterior.functions(x).variance.max()) == 0
    assert float(posterior.functions(x, joint=True).cov.abs().max()) == 0
    assert float(posterior.predict(x).mutual_information.max()) <= 1e-15
    theta = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    assert torch.equal(posterior.weight_samples(3), theta.expand(3, -1))
    assert_close(posterior.function_samples(x, 2), model(x).expand(2, N, 3))
    assert_close(posterior.network_samples(x, 2), model(x).expand(2, N, 3))
    targets = torch.randn(N, 3, dtype=D)
    regression = lw.fit(model, [(x, targets)], lw.Gaussian(per_output=True), method="map_only")
    assert_close(regression.predict(x).variance, (model(x) - targets).square().mean(0).expand(N, 3))
    for ask in (lambda: posterior.log_evidence(), lambda: posterior.tuned()):
        with pytest.raises(lw.errors.UnsupportedError):
            ask()


@pytest.mark.parametrize("method", [lw.Full(), lw.KernelSpace(), lw.Kron(), lw.Sampled()])
def test_evidence_and_tuning_in_inference_mode(method: Any, x: Tensor, y: Tensor) -> None:
    """As in fit: nothing that is kept belongs to that mode, and the answers are the same."""
    one, other = (fit(net(), [(x, y)], method=method, prior=1.0) for _ in range(2))
    expected = one.log_evidence(), one.tuned().prior.values
    with torch.inference_mode():
        results = other.log_evidence(), other.tuned().prior.values
    assert not any(t.is_inference() for t in results)
    assert torch.equal(results[0], expected[0])
    assert torch.equal(results[1], expected[1])


def test_training_in_inference_mode(x: Tensor, y: Tensor) -> None:
    recipe = lw.recipes.online(epochs=2)
    expected = lw.train(net(), [(x, y)], "classification", recipe=recipe)
    with torch.inference_mode():
        trained = lw.train(net(), [(x, y)], "classification", recipe=recipe)
    assert not any(p.is_inference() for p in trained.model.parameters())
    assert torch.equal(trained.posterior.network.theta(), expected.posterior.network.theta())


def test_a_plain_class_with_fit_is_no_method(x: Tensor, y: Tensor) -> None:
    class Plain:
        def fit(self, problem: Any, data: Any, generator: Any = None) -> Any: ...

    with pytest.raises(lw.errors.UnsupportedError, match="whose class inherits from Method"):
        lw.fit(net(), [(x, y)], "classification", method=Plain())  # type: ignore[arg-type]


@pytest.mark.parametrize("needed", [False, True])
def test_a_method_says_whether_it_needs_a_prior(needed: bool, x: Tensor, y: Tensor) -> None:
    """Where it does, the prior is learned before the fit; else it comes to the fit open, as for other methods."""
    seen: list[bool] = []

    class Asking(Method):
        needs_prior = needed

        def fit(self, problem: Any, data: Any, generator: Any = None) -> Any:
            seen.append(problem.learn_prior)
            return lw.baselines.MapOnly().fit(problem, data, generator)

    lw.fit(net(), [(x, y)], "classification", method=Asking())
    assert seen == [not needed]


# Stale weights

ASKS = {
    "predict": lambda p, x: p.predict(x),
    "functions": lambda p, x: p.functions(x),
    "joint": lambda p, x: p.functions(x, joint=True),
    "function samples": lambda p, x: p.function_samples(x, 2),
    "network samples": lambda p, x: p.network_samples(x, 2),
    "weight samples": lambda p, x: p.weight_samples(2),
    "call": lambda p, x: p(x),
    "evidence": lambda p, x: p.log_evidence(),
}
CHANGES = {
    "data in place": lambda m: m[0].weight.data.add_(1e-5),
    "one entry": lambda m: m[2].weight.data[1, 1].mul_(1.0001),
    "under no_grad": lambda m: torch.no_grad()(lambda: m[2].bias.add_(0.01))(),
    "optimiser": lambda m: step(m),
    "loaded": lambda m: m.load_state_dict({k: v + 0.1 for k, v in m.state_dict().items()}),
    "rows swapped": lambda m: m[2].weight.data.copy_(m[2].weight.data.flip(0)),
}


def step(model: nn.Module) -> None:
    optimiser = torch.optim.SGD(model.parameters(), 0.01)
    model(torch.ones(2, INPUTS, dtype=D)).sum().backward()
    optimiser.step()
    optimiser.zero_grad()


@pytest.mark.parametrize(("change", "method"), [*zip(CHANGES, cycle([lw.Kron(), lw.baselines.MapOnly()]))])
def test_changed_weights_are_refused(change: str, method: Any, x: Tensor, y: Tensor) -> None:
    model = net()
    posterior = fit(model, [(x, y)], method=method)
    asks = [ask for name, ask in ASKS.items() if name != "evidence" or isinstance(method, lw.Kron)]
    for ask in asks:
        ask(posterior, x)
    CHANGES[change](model)
    for ask in asks:
        with pytest.raises(lw.errors.ModelError, match=r"has changed since the .*fit"):
            ask(posterior, x)


def test_weights_put_back_are_accepted(x: Tensor, y: Tensor) -> None:
    model = net()
    posterior = fit(model, [(x, y)])
    kept = {name: value.clone() for name, value in model.state_dict().items()}
    model[0].weight.data.add_(1.0)
    with pytest.raises(lw.errors.ModelError):
        posterior.predict(x)
    model.load_state_dict(kept)
    assert posterior.predict(x).probs.shape == (N, CLASSES)


@pytest.mark.parametrize(  # with dropout, and with a batch norm
    ("case", "method"), [("conv_zoo", lw.Diagonal()), ("resnet_batchnorm", lw.baselines.MapOnly())]
)
def test_training_mode_after_the_fit_is_refused(case: str, method: Any) -> None:
    """Means would be random, samples mixed, and running statistics changed by a prediction."""
    chosen = BY_NAME[case]
    model = chosen.build()
    posterior = problems.fit(chosen, method, model=model, prior=1.0)
    model.train()

    def run() -> None:
        with pytest.raises(lw.errors.ModelError, match="training mode"):
            posterior.predict(chosen.batch(3))

    problems.unchanged(model, run)


def test_importing_needs_torch_alone() -> None:
    code = (
        "import torch, builtins\n"
        "real = builtins.__import__\n"
        "def only(name, *rest, **options):\n"
        "    assert name.split('.')[0] not in ('matplotlib', 'jinja2', 'sklearn', 'safetensors', 'tqdm', 'scipy')\n"
        "    return real(name, *rest, **options)\n"
        "builtins.__import__ = only\n"
        "import lapwing\n"
        "print(sorted(set(lapwing.__all__) - set(dir(lapwing))))\n"
    )
    root = Path(__file__).parents[2]
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root, check=False)
    assert run.returncode == 0, run.stderr[-500:]
    assert run.stdout.strip() == "[]"


# Ensembles and dropout run the network itself, which takes such an input; the third fits no random pushes here.
TANGENT = [setting for setting in SMALL if setting not in ("ensemble", "dropout", "hfl pretrained")]


@pytest.mark.parametrize("setting", TANGENT)
def test_one_input_without_its_batch_is_refused(setting: str) -> None:
    """A (C,) output of one input reads like a (B,) of many."""
    inputs, labels = torch.randn(20, 3, dtype=D), torch.randint(0, 2, (20,))
    net = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Dropout(0.2), nn.Linear(6, 2)).double().eval()
    posterior = lw.fit(net, [(inputs, labels)], "classification", method=small_method(setting, net), prior=1e3)
    with pytest.raises(lw.errors.DataError, match=r"outputs of shape \(2, 1\); expected \(B, 2\).* give x\[None\]"):
        posterior.predict(inputs[0])


def test_a_posterior_in_one_line() -> None:
    x = torch.randn(20, 3)
    posterior = lw.fit(nn.Linear(3, 1), [(x, x[:, :1])], lw.Gaussian(noise_std=0.5), prior=0.25, method=lw.Full())
    assert repr(posterior) == "<Fitted: Full, 4 weights, prior precision 0.25, noise variance 0.25>"
    grouped = lw.fit(
        nn.Linear(3, 1),
        [(x, torch.ones(20, 1))],
        lw.Poisson(),
        prior=lw.priors.diagonal(2.0),
        method=lw.baselines.MapOnly(),
    )
    assert repr(grouped) == "<Fitted: MapOnly, 4 weights, prior precision 2, 2, 2, ... (4)>"


def test_a_softmax_inside_the_network_is_seen() -> None:
    inputs, labels = torch.randn(30, 3), torch.randint(0, 2, (30,))
    logits = nn.Linear(3, 2)
    for use in (lw.fit, lw.train):
        with pytest.raises(
            lw.errors.ModelError, match="sum to one for each input, as probabilities do; expected logits"
        ):
            use(nn.Sequential(logits, nn.Softmax(-1)), [(inputs, labels)], "classification")
    lw.fit(
        nn.Sequential(logits, nn.LogSoftmax(-1)), [(inputs, labels)], "classification", prior=1.0
    )  # those are logits


def test_only_sampled_labels_take_numbers_from_the_generator() -> None:
    x = torch.linspace(-1, 1, 12, dtype=torch.float64).reshape(6, 2)
    net = torch.nn.Linear(2, 1).double()
    for curvature, drawn in (("ggn", False), ("fisher_mc", True)):
        for method in (lw.Kron(curvature), lw.Diagonal(curvature), lw.Full(curvature)):
            generator = torch.Generator().manual_seed(3)
            before = generator.get_state()
            lw.fit(net, [(x, x[:, :1].sin())], "regression", method=method, prior=1.0, generator=generator)
            assert torch.equal(generator.get_state(), before) is not drawn
