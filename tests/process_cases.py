"""What several processes compute, each from its part of the data, in one run of three processes for all cases.

Every case is a function of a ``Share``: the group, and the rows of this process. Without a group it has all rows, and
is what the parts are compared with.
"""

from __future__ import annotations

import datetime
import os
import pickle
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler, TensorDataset

import lapwing as lw
from lapwing.data.processes import Processes
from lapwing.recipes import Recipe
from lapwing.training import average_buffers

Result = dict[str, Any]
LIMIT = 60  # seconds after which a process that waits for another gives up
T = lw.tuners


@dataclass(frozen=True)
class Share:
    """The processes of a case, and which of them this is."""

    group: Any = None
    rank: int = 0
    size: int = 1
    folder: Path = Path()

    def rows(self, t: Tensor) -> Tensor:
        return t[len(t) * self.rank // self.size : len(t) * (self.rank + 1) // self.size]

    def batches(self, x: Tensor, y: Tensor, size: int = 4) -> list[tuple[Tensor, Tensor]]:
        """The batches of this process, of unequal sizes; none if it has no rows."""
        own = list(zip(self.rows(x).split(size), self.rows(y).split(size), strict=True))
        return [batch for batch in own if len(batch[0])]


def network(outputs: int = 3, bias: float = 0.0) -> nn.Sequential:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, outputs)).double()
    with torch.no_grad():
        model[0].bias += bias
    return model


def rows(n: int = 22, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Inputs and classes that are not all as the network says."""
    x = torch.randn(n, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return x, (x[:, :3] + 0.5 * x[:, 1:]).argmax(1)


def numbers(n: int = 22) -> tuple[Tensor, Tensor]:
    x, _ = rows(n)
    return x, torch.stack([x.sin().sum(1), x[:, 0] * x[:, 1]], 1)


def seen(posterior: lw.Fitted, x: Tensor, evidence: bool = True) -> Result:
    """What a user gets of a posterior."""
    predictive = posterior.predict(x)
    found = {"f": posterior.functions(x).cov, "prior": posterior.prior.values, "findings": posterior.findings}
    found["y"] = predictive.probs if hasattr(predictive, "probs") else predictive.std
    if evidence:
        found["evidence"] = posterior.log_evidence().detach()
    return found


def fitted(method: Any, n: int = 22, evidence: bool = True, **settings: Any) -> Callable[[Share], Result]:
    """A fit of classes; settings that depend on the share are functions of it."""

    def run(share: Share) -> Result:
        x, y = rows(n)
        given = {name: value(share) if callable(value) else value for name, value in settings.items()}
        posterior = lw.fit(
            network(), share.batches(x, y), "classification", method=method, process_group=share.group, **given
        )
        return seen(posterior, rows(5, seed=3)[0], evidence)

    return run


def crossfit(share: Share) -> Result:
    """Folds that the processes share; each has all data, and trains its part."""
    x, y = rows(36)
    calls = []

    def train_fn(chosen: Tensor, seed: int) -> nn.Module:
        calls.append(seed)
        model = network(bias=0.1 * seed)
        optimiser = torch.optim.SGD(model.parameters(), 0.1)
        nn.functional.cross_entropy(model(x[chosen]), y[chosen]).backward()
        optimiser.step()
        return model.eval()

    crossed = lw.crossfit(
        train_fn, (x, y), "classification", model=network(), folds=3, folder=share.folder / f"folds{share.size}",
        method=lw.Diagonal(), process_group=share.group,
    )  # fmt: skip
    assert len(calls) == 3 // share.size
    return seen(crossed.posterior, x[:5], evidence=False)


def held_out(share: Share) -> list[tuple[Tensor, Tensor]]:
    x, y = rows(13, seed=2)
    return share.batches(x, y.roll(1))


def regression(share: Share) -> Result:
    """The default for numbers: Student tails, and the average with the exact posterior."""
    x, y = numbers()
    return seen(lw.fit(network(2), share.batches(x, y), "regression", process_group=share.group), x[:5])


def noise_for_each_output(share: Share) -> Result:
    x, y = numbers()
    likelihood = lw.Gaussian(per_output=True)
    return seen(lw.fit(network(2), share.batches(x, y), likelihood, prior=1.0, process_group=share.group), x[:5])


def weighted(share: Share) -> Result:
    """The default for numbers with weights; two data leave one of three processes without any."""
    x, y = numbers(2)
    w = torch.tensor([3.0, 0.5]).double()
    parts = zip(share.rows(x).split(1), share.rows(y).split(1), share.rows(w).split(1), strict=True)
    data = lw.samples.weighted([part for part in parts if len(part[0])])
    return seen(lw.fit(network(2), data, "regression", process_group=share.group), rows(5, seed=3)[0])


def added_later(share: Share) -> Result:
    """More data for a mixture that all processes fitted; of the new data one of three processes has none."""
    x, y = rows()
    fit = lw.fit(network(), share.batches(x, y), "classification", process_group=share.group)
    return seen(fit.updated(share.batches(*rows(2, seed=5))), x[:5])


def embedded(share: Share) -> Result:
    """A lookup, whose input factor is a diagonal: a process without data must learn that from the others."""
    torch.manual_seed(2)
    model = nn.Sequential(nn.Embedding(6, 3), nn.Flatten(), nn.Linear(6, 3)).double()
    x, y = torch.tensor([[1, 2], [5, 0]]), torch.tensor([0, 2])
    fit = lw.fit(model, share.batches(x, y), "classification", prior=1.0, process_group=share.group)
    return {"f": fit.functions(torch.tensor([[0, 3], [4, 1]])).cov}


def wide(limit: int) -> Callable[[Share], Result]:
    """A layer of 600 inputs, whose few rows are kept, or, above a limit for those of all processes, only squared."""

    def run(share: Share) -> Result:
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(600, 3), nn.Tanh(), nn.Linear(3, 3)).double()
        x, (_, y) = torch.randn(20, 600, generator=torch.Generator().manual_seed(4), dtype=torch.float64), rows(20)
        method = lw.Kron(factor_limit=limit)
        fit = lw.fit(model, share.batches(x, y), "classification", method=method, prior=1.0, process_group=share.group)
        kind = type(fit.posterior.curvature.blocks[0].inp).__name__
        return seen(fit, x[:3]) | {"kind": kind, "evidence": fit.log_evidence().detach()}

    return run


def one_map(share: Share) -> Result:
    """A single linear map, whose sums over pairs of outputs need a form that only data show."""
    x, y = rows(2)
    model = nn.Linear(4, 3).double()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.linspace(-1, 1, p.numel()).reshape(p.shape))
    fit = lw.fit(model, share.batches(x, y), "classification", method=lw.Full(), prior=1.0, process_group=share.group)
    return {"f": fit.functions(x).cov}


def stochastic(solver: str) -> Callable[[Share], Result]:
    """Descent on the same batches of all processes together."""

    def run(share: Share) -> Result:
        x, y = rows(12)
        method = lw.Sampled(num_samples=2, solver=solver, batch=12, epochs=6, tolerance=0.9)
        fit = lw.fit(
            network(), share.batches(x, y), "classification", method=method, prior=20.0, process_group=share.group
        )
        return {"f": fit.functions(x[:5]).cov}

    return run


def trained(recipe: Recipe, n: int = 22) -> Callable[[Share, int], Result]:
    """Training on the same batches: that of one process has the rows that several have at a time."""

    def run(share: Share, parts: int) -> Result:
        x, y = rows(n)
        data = share.batches(x, y)
        if share.group is None:
            each = [Share(None, r, parts).batches(x, y) for r in range(parts)]
            steps = range(max(map(len, each)))
            joined = [[part[k] for part in each if k < len(part)] for k in steps]
            data = [tuple(map(torch.cat, zip(*batches, strict=True))) for batches in joined]
        path = share.folder / f"state-{n}-{share.size}"
        more = {"checkpoint": path} if share.group is not None and n > 2 else {}
        result = lw.train(network(), data, "classification", recipe=recipe, process_group=share.group, **more)
        if more:
            dist.barrier(share.group)
            assert path.exists()
            again = lw.train(network(), data, "classification", recipe=recipe, process_group=share.group, resume=path)
            assert torch.equal(again.model[0].weight, result.model[0].weight)
        found = seen(result.posterior, x[:2]) | {f"w{i}": p for i, p in enumerate(result.model.parameters())}
        return found | {"losses": torch.tensor([epoch.loss for epoch in result.history], dtype=torch.float64)}

    return run


class Columns(Dataset[tuple[Tensor, Tensor]]):
    """Single samples; some raise, end the process, or have other numbers."""

    def __init__(self, n: int = 22, at: int = -1, act: str = "") -> None:
        self.x, self.y = rows(n)
        self.at, self.act = at, act

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        if i == self.at and self.act == "raise":
            raise OSError("this file cannot be read")
        if i == self.at and self.act == "end":
            os._exit(9)
        return self.x[i] * (float("nan") if i == self.at else 1.0), self.y[i]


def loaded(make: Callable[[Share, Dataset[Any]], Any], **settings: Any) -> Callable[[Share], Result]:
    """A fit to a loader of each process, or to the whole data set alone."""

    def run(share: Share) -> Result:
        data = Columns(**{k: v for k, v in settings.items() if k in ("n", "at", "act")})
        given = {k: v for k, v in settings.items() if k not in ("n", "at", "act")}
        source = DataLoader(data, 4) if share.group is None else make(share, data)
        fit = lw.fit(network(), source, "classification", process_group=share.group, **{"prior": 1.0, **given})
        return seen(fit, rows(5, seed=3)[0])

    return run


def known_rows(share: Share) -> Result:
    """The sketch of the rows of all processes, of which one is in two of them."""
    x = torch.cat([torch.arange(20.0), torch.zeros(1)])[:, None].double()
    data = lw.data.batches.Data(share.batches(x, x) or [], torch.device("cpu"), processes=Processes.of(share.group))
    sketch = data.sketch()
    assert sketch is not None
    return {"marks": (sketch.marks >> 1).double(), "repeats": (sketch.marks & 1).double(), "rows": sketch.rows}


def ordered(share: Share) -> lw.samples.Part:
    return lw.samples.Part(range(22), share.group)


def part(share: Share, data: Dataset[Any]) -> DataLoader[Any]:
    return DataLoader(data, 4, sampler=lw.samples.Part(data, share.group, shuffle=True))  # type: ignore[arg-type]


def torchs(
    drop_last: bool = False, collate_fn: Any = None, **settings: Any
) -> Callable[[Share, Dataset[Any]], DataLoader[Any]]:
    def make(share: Share, data: Dataset[Any]) -> DataLoader[Any]:
        places = {"num_replicas": share.size, "rank": share.rank} | settings
        sampler = DistributedSampler(data, **places, drop_last=drop_last)
        return DataLoader(data, 4, sampler=sampler, collate_fn=collate_fn)

    return make


class Backwards(BatchSampler):
    """Batches in another order than that of their sampler."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        super().__init__(loader.sampler, 4, False)

    def __iter__(self) -> Iterator[list[int]]:
        return iter(list(super().__iter__())[::-1])


def twice(items: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Two samples of each item, the second one turned round."""
    x, y = (torch.stack(column) for column in zip(*items, strict=True))
    return torch.cat([x, -x]), torch.cat([y, y])


def wrapped(share: Share) -> Result:
    """A model already wrapped for data-parallel training."""
    x, y = rows()
    model = network() if share.group is None else DistributedDataParallel(network(), process_group=share.group)
    return seen(lw.fit(model, share.batches(x, y), "classification", prior=1.0, process_group=share.group), x[:5])


def tuned_later(share: Share) -> Result:
    """A posterior that all processes tune after the fit, and one file of it."""
    x, y = rows()
    fit = lw.fit(network(), share.batches(x, y), "classification", prior=1.0, process_group=share.group)
    tuned = fit.tuned(T.Integrate(held_out(share), ratios=(1.0, 100.0), temperatures=(1.0, 2.0)))
    path = share.folder / f"file-{share.size}-{share.rank}"  # other names in other processes: the first writes its own
    tuned.save(path)
    assert path.exists() == (share.rank == 0)
    if share.group is not None:
        dist.barrier(share.group)
    again = lw.load(share.folder / f"file-{share.size}-0", network())
    return seen(tuned, x[:5]) | {"again": again.predict(x[:5]).probs}


def predicted(share: Share) -> Result:
    """The predictive of a loader, of classes and of numbers: every process gets all rows, in their order."""
    x, y = rows()
    data = TensorDataset(*rows(7, seed=3))
    fit = lw.fit(network(), share.batches(x, y), "classification", prior=1.0, process_group=share.group)
    part = lw.samples.Part(data, share.group)
    loader = DataLoader(data, 2, sampler=part)
    classes = fit.predict(loader, process_group=share.group)
    few = fit.predict(TensorDataset(*rows(2, seed=4)), process_group=share.group, samples=4)
    x, y = numbers()
    fit = lw.fit(network(2), share.batches(x, y), "regression", process_group=share.group)
    numbered = fit.predict(loader, process_group=share.group)
    return {
        "probs": classes.probs, "epistemic": classes.epistemic, "few": few.probs, "mean": numbered.mean,
        "interval": numbered.interval(0.9)[1], "score": numbered.log_prob(numbers(7)[1]),
    }  # fmt: skip


def bound(share: Share) -> Result:
    x, y = rows()
    posterior = lw.fit(network(), share.batches(x, y), "classification", prior=1.0, process_group=share.group)
    return {"bound": T.evidence_bound(posterior, share.batches(x, y), block=1)}


def sampled_file(share: Share) -> Result:
    """Samples under a learned prior, whose file needs products with the data of all processes."""
    x, y = rows()
    method = lw.Sampled(num_samples=3)
    fit = lw.fit(network(), share.batches(x, y), "classification", method=method, process_group=share.group)
    path = share.folder / f"samples-{share.size}-{share.rank}"
    fit.save(path)
    again = lw.load(path, network()).predict(x[:5]).probs if share.rank == 0 else fit.predict(x[:5]).probs
    return seen(fit, x[:5]) | {"again": again}


def buffers(share: Share) -> Result:
    """Running statistics after an epoch: their mean over the data, and counts from the process with the most."""
    if share.group is None:
        return {"mean": torch.full((2,), 7.0), "count": torch.tensor(5), "kept": torch.tensor([1.0, float("inf")])}
    model, processes = nn.BatchNorm1d(2), Processes.of(share.group)
    model.register_buffer("kept", torch.tensor([1.0, float("inf")]))
    before = [buffer.clone() for buffer in model.buffers()]
    count = [3, 5, 0][share.rank]
    model.running_mean += 7.0 + (5 if share.rank == 0 else -3) * (share.size > 1) if count else float("nan")
    model.num_batches_tracked += count if share.size > 1 else 5
    average_buffers(model, processes, before, count)
    return {"mean": model.running_mean, "count": model.num_batches_tracked, "kept": model.kept}


def exchanges(share: Share) -> Result:
    """The exchanges themselves: sums of every kind, rows, values, jobs and gradients."""
    alone = Processes.of(share.group)  # in a group it is not
    counts = torch.arange(alone.size) + 1.0
    unknown = torch.ones(2, dtype=torch.float16) if alone.rank == alone.size - 1 else None
    sums = alone.sum([counts.clone(), torch.full((400, 400), 1.0 + alone.rank), unknown, None])
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    (inside,) = alone.sum_gradients(x)
    y = alone.differentiable_sum((1 + alone.rank) * inside.square().sum())
    (y * x[0]).backward()
    jobs = [lambda i=i: [torch.full((i + 1,), float(i)), None] for i in range(4)]
    found = alone.run_jobs(jobs, [3.0, 1.0, 1.0, 1.0], torch.device("cpu"))
    rows = alone.gather_rows(torch.zeros(alone.rank, 2) if alone.rank else None)
    gathered = 0 if rows is None else len(rows)
    ranks = torch.arange(alone.size, dtype=torch.float64) + 1
    expected = [
        torch.equal(sums[0], alone.size * counts),
        torch.equal(sums[1], torch.full((400, 400), float(ranks.sum()))),
        torch.equal(sums[2], torch.ones(2, dtype=torch.float16)),
        sums[3] is None,
        float(y.detach()) == 5 * float(ranks.sum()),
        torch.equal(x.grad, torch.tensor([2.0 + 5.0, 4.0]) * float(ranks.sum())),
        [int(t[0][0]) for t in found] == [0, 1, 2, 3] and all(t[1] is None for t in found),
        alone.gather_values(alone.rank) == list(range(alone.size)),
        alone.first_available(alone.rank or None) == (alone.rank or (1 if alone.size > 1 else None)),
        alone.offset_and_total(2) == (2 * alone.rank, 2 * alone.size),
        torch.equal(alone.copy_of_first([torch.tensor([float(alone.rank)])])[0], torch.zeros(1)),
        gathered == sum(range(alone.size)),
    ]
    return {"right": torch.tensor(expected).double(), "all": torch.ones(len(expected)).double()}


EXACT = {  # sums and what follows from them in closed form: 1e-10
    "kron": fitted(lw.Kron(), prior=1.0),
    "crossfit": crossfit,
    "kron reduced": fitted(lw.Kron(sharing="reduce"), prior=lw.per_layer()),
    "kron, default": fitted(lw.Kron()),
    "kron, 2 data": fitted(lw.Kron(), n=2, prior=1.0),
    "ekron": fitted(lw.EKron(), prior=1.0),
    "ekron, 2 data": fitted(lw.EKron(), n=2, prior=1.0),
    "diagonal": fitted(lw.Diagonal(), prior=1.0),
    "full": fitted(lw.Full(), prior=1.0),
    "known rows": known_rows,
    "full, 2 data": fitted(lw.Full(), n=2, prior=1.0),
    "hessian": fitted(lw.Full(curvature="hessian"), prior=50.0),
    "kernel": fitted(lw.KernelSpace(), prior=1.0),
    "kernel, 2 data": fitted(lw.KernelSpace(), n=2, prior=1.0),
    "ella": fitted(lw.ELLA(num_landmarks=9, rank=6), prior=1.0),
    "ella, residual": fitted(lw.ELLA(num_landmarks=9, rank=6, residual=True), prior=1.0),
    "valla, fixed": fitted(lw.VaLLA(num_inducing=7, optimiser="none"), prior=1.0),
    "auto": fitted("auto", prior=1.0),
    "map": fitted(lw.baselines.MapOnly(), evidence=False, validation=held_out),
    "validation": fitted(lw.Kron(), validation=held_out),
    "validation, 2 data": fitted(lw.Kron(), n=2, validation=held_out),
    "regression": regression,
    "noises": noise_for_each_output,
    "weights": weighted,
    "more data": added_later,
    "empirical": fitted(lw.Kron(curvature="empirical"), prior=1.0),
    "embedding": embedded,
    "wide, rows": wide(8192),
    "wide, diagonal": wide(100),  # rows up to 100² / 600 = 16, more than any process has
    "one map": one_map,
    "grid": fitted(lw.Kron(), tuner=lambda share: T.Grid(held_out(share), precisions=(0.1, 1.0, 10.0))),
    "folds": fitted(lw.Kron(), tuner=lambda share: T.CrossValidated(held_out(share), (0.1, 1.0, 10.0), folds=3)),
    "temperature": fitted(lw.Kron(), tuner=lambda share: T.Temperature(held_out(share), (0.5, 1.0, 2.0))),
    "part": loaded(part),
    "dataset": loaded(lambda share, data: data),
    "padded": loaded(torchs()),
    "padded, 2 data": loaded(torchs(), n=2),
    "ddp": wrapped,
    "later": tuned_later,
    "predicted": predicted,
    "bound": bound,
    "exchanges": exchanges,
    "buffers": buffers,
}
SOLVED = {  # iterations, and the noise of the same global batches
    "low rank": fitted(lw.LowRank(rank=6), prior=1.0),
    "low rank, 2 data": fitted(lw.LowRank(rank=6), n=2, prior=1.0),
    "sampled": fitted(lw.Sampled(num_samples=3, tolerance=1e-9), prior=1.0),
    "sampled by groups, 2 data": fitted(lw.Sampled(num_samples=3, tolerance=1e-9), n=2, prior=lw.per_layer()),
    "sampled, default": sampled_file,
    "sgd": stochastic("sgd"),
    "sdd": stochastic("sdd"),
    "valla": fitted(lw.VaLLA(num_inducing=4, steps=5)),
    "valla, 2 data": fitted(lw.VaLLA(num_inducing=2, steps=3), n=2, prior=1.0),
    "valla by batches": fitted(lw.VaLLA(num_inducing=4, optimiser="adam", steps=4), prior=1.0),
    "valla, alpha 1": fitted(lw.VaLLA(num_inducing=4, alpha=1.0, steps=4), evidence=False, validation=held_out),
    "mode": fitted(lw.Kron(), n=8, tuner=lambda share: T.LinearMode()),
}
TRAINED = {
    "online": trained(lw.recipes.online(epochs=2, rate=1e-2, update=T.Ascend(steps=10))),
    "online, 2 data": trained(lw.recipes.online(epochs=2, update=T.Ascend(steps=10)), n=2),
    "classic": trained(lw.recipes.classic(epochs=2)),
}


METHODS = ("kron", "ekron", "diagonal", "full", "low rank", "sampled", "kernel", "ella", "valla", "online")
OTHERS = ("kron, default", "padded", "later", "exchanges")


def sizes(name: str) -> tuple[int, ...]:
    """The numbers of processes that a case is run with: every method with one, two and three, its variants with three.

    Two data leave one of three processes without any.
    """
    return (1, 2, 3) if name in METHODS + OTHERS else (3,)


def failing(share: Share, **settings: Any) -> list[tuple[Tensor, Tensor]]:
    x, y = rows()
    if share.rank == 1:
        x[share.rows(torch.arange(22))[-1]] = float("nan")
    return share.batches(x, y)


def refused(
    data: Callable[[Share], Any] | None = None, model: Any = None, **settings: Any
) -> Callable[[Share], Result]:
    def run(share: Share) -> Result:
        x, y = rows()
        source = share.batches(x, y) if data is None else data(share)
        given = network() if model is None else model(share)
        settled = {name: value(share) if callable(value) else value for name, value in settings.items()}
        lw.fit(given, source, "classification", **{"prior": 1.0, "process_group": share.group, **settled})
        return {}

    return run


def predicting(source: Callable[[Share], Any]) -> Callable[[Share], Result]:
    """A prediction by several processes that is refused."""

    def run(share: Share) -> Result:
        x, y = rows()
        fit = lw.fit(network(), share.batches(x, y), "classification", prior=1.0, process_group=share.group)
        fit.predict(source(share), process_group=share.group)
        return {}

    return run


def interrupted(share: Share, passes: int) -> Result:
    """Training in which the data of a process end in an error after so many passes."""
    epochs = {"seen": 0}

    class Source:
        def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
            epochs["seen"] += 1
            yield from share.batches(*rows())[:1]
            if share.rank == 2 and epochs["seen"] > passes:
                raise OSError("the disk is gone")

    path = share.folder / f"failed-{passes}"
    lw.train(network(), Source(), "classification", checkpoint=path, process_group=share.group)
    return {}


WHOLE = rows()


def in_another_order(share: Share) -> DataLoader[Any]:
    """All data, shuffled: only the whole pass shows that they are the same in all processes."""
    return DataLoader(TensorDataset(*WHOLE), 4, shuffle=True, generator=torch.Generator().manual_seed(share.rank))


REFUSED = {
    "not finite in one": refused(failing),
    "raises in one": refused(lambda share: DataLoader(Columns(at=9, act="raise"), 4, sampler=ordered(share))),
    "same batches": refused(lambda share: [WHOLE]),
    "same, shuffled": refused(in_another_order),
    "same, by products": refused(
        in_another_order, method=lambda share: lw.LowRank(rank=2)
    ),
    "same, by points": refused(
        in_another_order, method=lambda share: lw.VaLLA(num_inducing=2)
    ),
    "same validation": refused(validation=lambda share: [WHOLE]),
    "same data of a tuner": refused(prior=None, tuner=lambda share: T.Grid([WHOLE])),
    "no data": refused(lambda share: []),
    "other weights": refused(model=lambda share: network(bias=0.1 * (share.rank == 2))),
    "other part": refused(lambda share: torchs(rank=0)(share, Columns())),
    "other order": refused(lambda share: DataLoader(Columns(), batch_sampler=Backwards(torchs()(share, Columns())))),
    "more samples": refused(lambda share: torchs(collate_fn=twice)(share, Columns())),
    "other calls": lambda share: seen(
        lw.fit(network(), share.batches(*rows()), "classification", method=lw.Kron() if share.rank else lw.Diagonal(),
               prior=1.0, process_group=share.group), rows()[0]),
    "no loader": predicting(lambda share: rows()[0]),
    "dealt out": predicting(lambda share: torchs()(share, Columns(21))),
    "nothing to predict": predicting(lambda share: []),
    "bad inputs in one": predicting(lambda share: [rows(2)[0] * float("nan" if share.rank == 1 else 1)]),
    "swag": refused(method=lambda share: lw.baselines.SWAG()),
    "ensemble": refused(method=lambda share: lw.baselines.Ensemble([network()])),
    "hfl": refused(method=lambda share: lw.HFL()),
    "fmgp": refused(method=lambda share: lw.FMGP()),
    "dropout": refused(method=lambda share: lw.baselines.MCDropout()),
    "training": lambda share: interrupted(share, 2),  # a look at the data, and the number of them
    "training, second epoch": lambda share: interrupted(share, 4),
    "killed": refused(lambda share: DataLoader(Columns(at=9, act="end"), 4, sampler=ordered(share))),
}  # fmt: skip


def attempted(case: Callable[..., Result], *given: Any) -> Result:
    start = time.monotonic()
    try:
        return case(*given)
    except Exception as error:
        return {"error": type(error).__name__, "message": str(error), "seconds": time.monotonic() - start}


def work(rank: int, folder: str, port: int) -> None:
    """Run all cases as one of three processes, in groups of three, two and one, and write what was found."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    wait = datetime.timedelta(seconds=LIMIT)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=3, timeout=wait)
    groups = [dist.new_group(list(range(size)), timeout=wait) for size in (1, 2, 3)]
    found: dict[tuple[str, int], Result] = {}
    for size, group in enumerate(groups, 1):
        if rank >= size:
            continue
        share = Share(group, rank, size, Path(folder))
        for name, case in {**EXACT, **SOLVED, **TRAINED}.items():
            if size in sizes(name):
                found[name, size] = attempted(case, share, *([size] if name in TRAINED else []))
    share = Share(dist.group.WORLD, rank, 3, Path(folder))
    dropping = torchs(drop_last=True)
    found["dropped", 3] = attempted(loaded(dropping), share)
    found["one part", 3] = attempted(
        lambda: {"findings": lw.fit(network(), torchs()(share, Columns()), "classification", prior=1.0).findings}
    )
    write = lambda: Path(folder, f"found-{rank}").write_bytes(pickle.dumps(found))
    for name, case in REFUSED.items():
        if name == "killed":
            write()  # one process has no other chance
        found[name, 3] = attempted(case, share)
    write()
