"""Data that are never in memory as a whole: fits and predictions whose memory does not grow with the rows."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

import lapwing as lw
import lapwing.methods.swag as swag
import lapwing.methods.valla as stochastic
import lapwing.tangent as design
from lapwing.data import known_rows
from lapwing.data.batches import Data
from lapwing.data.streams import shuffle_batches
from lapwing.networks.jacobians import Footprint
from lapwing.tuners.mixing import fit_tails, standardised_residuals
from tests.tolerances import SOLVED, assert_close

D = torch.float64
CPU = torch.device("cpu")
BATCH = 64


class Rows(IterableDataset[tuple[Tensor, Tensor]]):
    """Batches of generated rows, the same at every pass; each worker of a loader has its own part of them."""

    def __init__(self, rows: int, kind: str = "regression") -> None:
        self.rows, self.kind = rows, kind
        self.alive, self.most_alive = weakref.WeakSet[Tensor](), 0

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        worker = get_worker_info()
        first, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        for number in range(first, -(-self.rows // BATCH), step):
            generator = torch.Generator().manual_seed(number)
            size = min(BATCH, self.rows - number * BATCH)
            x = torch.randn(BATCH, 3, dtype=D, generator=generator)[:size]
            noise = torch.randn(BATCH, 2, dtype=D, generator=generator)[:size]
            f = torch.stack([x[:, 0].sin(), x[:, 1] * x[:, 2]], 1) + 0.3 * noise
            self.alive.add(x)
            self.most_alive = max(self.most_alive, len(self.alive))
            yield x, f.argmax(1) if self.kind == "classification" else f
            del x


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 2)).double().eval()


class Bytes(TorchDispatchMode):
    """The most bytes that tensors which Python holds take at the same time while the mode is on.

    Tensors that share memory count once. Those that only the graph of autograd holds do not count.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now, self.most, self._held = 0, 0, dict[int, int]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for t in tree_iter(out):
            if isinstance(t, Tensor) and t.numel() and t.dtype != torch.uint8:  # bytes are there to be freed
                address, size = t.untyped_storage().data_ptr(), t.untyped_storage().nbytes()
                self._held[address] = self._held.get(address, 0) + 1
                if self._held[address] == 1:
                    self.now += size
                    self.most = max(self.most, self.now)
                weakref.finalize(t, self._freed, address, size)
        return out

    def _freed(self, address: int, size: int) -> None:
        self._held[address] -= 1
        if not self._held[address]:
            del self._held[address]
            self.now -= size


def peak(call: Any) -> int:
    with Bytes() as held:
        call()
    return held.most


@pytest.fixture(autouse=True)
def little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set what may be kept of a loader below the size of the data here."""
    for place in (stochastic, swag):
        monkeypatch.setattr(place, "shuffle_batches", partial(shuffle_batches, kept=4096))
    monkeypatch.setattr(design, "CACHE_SHARE", 0.0)  # as a share of the byte budget
    monkeypatch.setattr(Footprint, "batch_size_for", lambda *_: BATCH)


METHODS: dict[str, Any] = {
    "default": None, "kron": lw.Kron(), "diagonal": lw.Diagonal(), "ekron": lw.EKron(), "full": lw.Full(),
    "low_rank": lw.LowRank(rank=4), "sampled": lw.Sampled(num_samples=2), "plain": lw.baselines.MapOnly(),
    "ella": lw.ELLA(num_landmarks=20, rank=4),
    "valla": lw.VaLLA(num_inducing=5, steps=3, optimiser="adam", candidates=50),
    "swag": lw.baselines.SWAG(snapshots=2, rank=2, steps_between=2, learning_rate=1e-3),
}  # fmt: skip


@pytest.mark.parametrize(("name", "kind"), [*((name, "regression") for name in METHODS), ("kron", "classification")])
def test_a_fit_holds_a_few_batches_at_a_time(name: str, kind: str) -> None:
    rows = Rows(24 * BATCH, kind)
    prior = 1.0 if name == "sampled" else None
    posterior = lw.fit(network(), rows, kind, method=METHODS[name], prior=prior)
    assert rows.most_alive <= 12  # the guard of a tuner looks at 700 data together
    assert posterior.base.statistics.data == 24 * BATCH


@pytest.mark.parametrize("name", ["default", "valla"])
def test_the_memory_of_a_fit_does_not_grow_with_the_rows(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = {"MIXED_NUMBERS": 256, "TRAINING": 64, "MAX_MARKS": 256}  # of rows that wait to be hashed, and of hashes
    for name_of, limit in limits.items():
        monkeypatch.setattr(known_rows, name_of, limit)
    few, many = (peak(lambda n=n: lw.fit(network(), Rows(n), "regression", method=METHODS[name])) for n in (768, 1536))
    assert many <= 1.05 * few


def test_tails_and_sketches_do_not_grow_with_the_rows() -> None:
    """Their own memory is less than that of a Jacobian, which would hide it in a whole fit."""
    posterior = lw.fit(network(), Rows(100), "regression", method=lw.Diagonal(), prior=1.0).posterior
    tails = [peak(lambda n=n: fit_tails(standardised_residuals(posterior, Data(Rows(n), CPU)))) for n in (256, 4096)]
    assert tails[1] <= 1.05 * tails[0]
    sketches = [peak(lambda n=n: Data(Rows(n), CPU).sketch()) for n in (256, 4096)]
    assert sketches[1] - sketches[0] <= 10 * 8 * 4096  # marks of 8 bytes, and what sorts them


@pytest.mark.parametrize("kind", ["regression", "classification"])
def test_a_prediction_holds_a_few_batches_and_its_answer(kind: str) -> None:
    posterior = lw.fit(network(), Rows(300, kind), kind, method=lw.Kron())
    rows = Rows(16 * BATCH, kind)
    predictive = posterior.predict(rows)
    assert rows.most_alive <= 3
    assert not len(rows.alive)
    everything = torch.cat([x for x, _ in rows])
    assert_close(predictive.mean, posterior.predict(everything).mean)
    assert_close(posterior.functions(rows).std, posterior.functions(everything).std)
    one, many = (peak(lambda n=n: posterior.predict(Rows(n, kind))) for n in (BATCH, 16 * BATCH))
    cells = len(posterior.posterior.cells)
    answer = 8 * 15 * BATCH * 2 * (1 + 4 * cells)  # mean, and the covariance, noise and rounding of every cell
    assert many - one <= 2 * answer


def test_a_loader_with_workers_reads_shards() -> None:
    """Two processes read a half each: the sums do not depend on the order of the batches."""
    rows = Rows(10 * BATCH)
    sharded = DataLoader(rows, None, num_workers=2)
    model = network()
    one = lw.fit(model, rows, "regression", method=lw.Kron(), prior=1.0)
    two = lw.fit(model, sharded, "regression", method=lw.Kron(), prior=1.0)
    x = torch.randn(5, 3, dtype=D)
    assert_close(one.functions(x).cov, two.functions(x).cov, SOLVED)
    assert_close(one.predict(sharded).mean.sort(0).values, one.predict(rows).mean.sort(0).values, SOLVED)


def test_progress_is_shown_while_a_loader_is_read(capsys: pytest.CaptureFixture[str]) -> None:
    posterior = lw.fit(network(), Rows(100), "regression", method=lw.Diagonal(), prior=1.0)
    posterior.predict(Rows(3 * BATCH), progress=True)
    assert "predicting" in capsys.readouterr().err
    posterior.predict(Rows(3 * BATCH), progress=False)
    assert not capsys.readouterr().err
