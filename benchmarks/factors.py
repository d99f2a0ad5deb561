"""What large factors cost: python -m benchmarks.factors [--only PART ...] [--out FILE]

Parts: ``eigh`` (eigendecompositions: one by one, in a batch, on the device and on the host, in two precisions, and the
error that the narrower one makes), ``wide`` (layers of 10,000 inputs), ``transformers`` (fits and predictions against
plain passes and against the count of multiplications), ``digits`` (networks in 16 bits), ``checkpoints`` and
``compile``. On a CPU times are those of the process, with one thread, so that other programs do not count; on a GPU
they are those of a clock.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import lapwing as lw
from benchmarks.clock import machine
from benchmarks.large_models import GPT, Layer, ViT
from lapwing.data.batches import Data
from lapwing.methods.base import Workload
from lapwing.registry import RATE

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SAVED = 0.6  # share of a Gram matrix that is computed, since it is symmetric


def seconds(call: Callable[[], Any], times: int = 3) -> float:
    """Return the seconds of the shortest of several calls."""
    best = float("inf")
    clock = time.perf_counter if DEVICE.type == "cuda" else time.process_time
    for _ in range(times):
        start = clock()
        call()
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()
        best = min(best, clock() - start)
    return best


def factor(size: int, lowest: float = 1.0, count: int = 1) -> Tensor:
    """Return Gram matrices (count, d, d) whose eigenvalues run from 1 to ``lowest``, by decades."""
    generator = torch.Generator().manual_seed(0)
    basis = torch.linalg.qr(torch.randn(count, size, size, dtype=torch.float64, generator=generator)).Q
    values = torch.logspace(0, torch.tensor(lowest).log10().item(), size, dtype=torch.float64)
    return ((basis * values) @ basis.mT).to(DEVICE)


def eigendecompositions() -> Iterator[str]:
    """Yield times of one matrix, and of eight one by one and in a batch."""
    yield "eigendecompositions, in ms: one float64, one float32; eight float64 one by one, in a batch, on the host"
    eigh = torch.linalg.eigh
    one_by_one = lambda many: [eigh(each) for each in many]
    on_host = lambda many: [part.to(DEVICE) for part in eigh(many.cpu())]
    for size in (32, 64, 128, 192, 256, 512, 1024, 2048):
        many = factor(size, 1e-3, 8 if size < 1024 else 1)
        times = 5 if size < 512 else 1
        row = [seconds(partial(eigh, many[0]), times), seconds(partial(eigh, many[0].float()), times)]
        if len(many) > 1:
            row += [seconds(partial(call, many), 1) for call in (one_by_one, eigh, on_host)]
        listed = " ".join(f"{1e3 * value:9.2f}" for value in row)
        yield f"  d = {size:5d} {listed:50s} float64 takes {row[0] * RATE / size**3:5.1f} d³ multiplications of Auto"


def precision() -> Iterator[str]:
    """Yield the error of variances and log-determinants with eigenvectors in float32."""
    from lapwing.linalg.dense import keeps_eigenvalues

    yield "float32 instead of float64: largest error of a variance and of log det / d, and what the library takes"
    for lowest in (1e-1, 1e-3, 1e-5, 1e-8):
        matrix, prior = factor(256, lowest)[0].cpu(), lowest
        exact = torch.linalg.inv(matrix + prior * torch.eye(256, dtype=torch.float64)).diagonal()
        logdet = torch.logdet(matrix + prior * torch.eye(256, dtype=torch.float64))
        values, vectors = torch.linalg.eigh(matrix.float())
        found = values.clamp_min(0).double() + prior
        variances = (vectors.double().square() / found).sum(-1)
        off = float((variances / exact - 1).abs().max()), float((found.log().sum() - logdet).abs()) / 256
        kept = "float32" if keeps_eigenvalues(matrix, torch.float32) else "float64"
        yield f"  eigenvalues 1 to {lowest:.0e}, prior {prior:.0e}: {off[0]:.1e} {off[1]:.1e}  {kept}"


def wide() -> Iterator[str]:
    """Yield the seconds of fits and predictions with many inputs."""
    yield "two layers with 50 hidden units and 10 classes: fit with the default tuner, predict(x).probs of 100, in s"
    cases = [(10_000, 300, "kron"), (10_000, 300, "ekron"), (10_000, 300, "auto"), (4_000, 300, "kron"),
             (2_000, 3_000, "kron"), (10_000, 6_000, "kron"), (10_000, 6_000, "auto")]  # fmt: skip
    for features, rows, method in cases:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(features, 50), nn.Tanh(), nn.Linear(50, 10)).to(DEVICE).eval()
        x, y = torch.randn(rows, features, device=DEVICE), torch.randint(0, 10, (rows,), device=DEVICE)
        fit = partial(lw.fit, model, (x, y), "classification", method=method, progress=False)
        took, posterior = seconds(fit, 1), fit()
        predicted = seconds(partial(probabilities, posterior, x[:100]), 1)
        core: Any = posterior.base
        forms = [type(block.inp).__name__ for block in core.curvature.blocks]
        yield f"  {features:6d} inputs, n = {rows:5d}, {method:5s}: {took:7.2f} {predicted:6.2f}  {forms[0]}"


def counted(workload: Workload, sharing: str) -> tuple[float, float]:
    """Return the epochs of a fit and the forward passes of a prediction, by multiplications alone."""
    seeds, outputs = workload.outputs - 1, workload.outputs
    blocks = [(block.positions, *block.form) for block in workload.blocks if block.form and not block.lookup]
    products = [block.product for block in workload.blocks if block.product]
    forward, backward = sum(products), sum(products[1:])
    rotated = sum(t * g * (i**2 + outputs * o**2) for t, g, o, i in blocks)
    positions = max(block.positions for block in workload.blocks)
    grams = SAVED * rotated * seeds / outputs / (positions if sharing == "reduce" else 1)
    fit = (forward + seeds * backward + grams) / (2 * forward + backward)
    formed = sum(outputs * t * g * o * i for t, g, o, i in blocks if t > 1)
    return fit, (forward + outputs * backward + rotated + formed) / forward


def probabilities(posterior: Any, x: Tensor) -> Tensor:
    return posterior.predict(x).probs  # type: ignore[no-any-return]


def covariances(posterior: Any, x: Tensor) -> Tensor:
    return posterior(x).cov  # type: ignore[no-any-return]


def plain_epoch(model: nn.Module, batches: list[tuple[Tensor, Tensor]]) -> None:
    for x, y in batches:
        torch.autograd.grad(F.cross_entropy(model(x), y), list(model.parameters()))


def fitted(method: Any, problem: Any, data: Data, made: list[Any]) -> None:
    made.append(method.fit(problem, data))


def transformers(width: int = 96, rows: int = 256) -> Iterator[str]:
    """Yield fits and predictions of small networks of the shapes of ViT-B/16 and GPT-2."""
    from lapwing.methods.base import workload_of

    yield f"transformers of width {width}, four layers, n = {rows}: the curvature in epochs, functions(x).cov of eight"
    images, tokens = torch.randn(rows, 3, 96, 96), torch.randint(0, 1000, (rows, 32))
    cases = {"ViT, 10 classes": (ViT(10, 96, width, 4, 4), images, 10),
             "GPT, 4 classes": (GPT(1000, 4, width, 4, 4, 32), tokens, 4)}  # fmt: skip
    for name, (model, inputs, classes) in cases.items():
        model, x = model.to(DEVICE).eval(), inputs.to(DEVICE)
        y = torch.arange(rows, device=DEVICE) % classes
        batches = list(zip(x.split(64), y.split(64), strict=True))
        epoch = seconds(partial(plain_epoch, model, batches))
        with torch.no_grad():
            forward = seconds(partial(model, x[:8]), 7)
        problem = lw.fit(model, batches[:1], "classification", prior=1.0, progress=False).base.problem
        workload = workload_of(problem.network, x[:4], rows)
        slow = [block.weight for block in problem.network.layout if not block.has_rule]
        for method in (lw.Kron(), lw.Kron(sharing="reduce"), lw.Diagonal()):
            data, made = Data(batches, DEVICE, None, False), list[Any]()
            fit = seconds(partial(fitted, method, problem, data, made), 1)
            made[0](x[:8])
            cov = seconds(partial(covariances, made[0], x[:8]), 4)
            sharing = getattr(method, "sharing", "")
            count = counted(workload, sharing) if isinstance(method, lw.Kron) else (0.0, 0.0)
            counts = f"(counted {count[0]:4.1f} and {count[1]:4.1f})" if sharing else ""
            title = f"{name}, {type(method).__name__} {sharing}"
            yield f"  {title:32s} {fit / epoch:5.1f} epochs, {cov / forward:5.1f} forward passes {counts}"
        yield f"  {'':32s} parameters without a rule, which take a second pass: {slow or 'none'}"


def digits() -> Iterator[str]:
    """Yield the errors of variances at the data of networks in bfloat16, against the same weights in float64."""
    yield "bfloat16 against the same weights in float64: relative error of variances at the data, median and largest"
    for rows, prior in ((60, 1.0), (2000, 1.0), (2000, 1e-2)):
        for method in (lw.Kron(), lw.Full()):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(5, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))
            narrow = model.to(torch.bfloat16)
            x = torch.randn(rows, 5).to(torch.bfloat16)
            pair = []
            for net, dtype in ((narrow, torch.bfloat16), (copy.deepcopy(narrow).double(), torch.float64)):
                data = x.to(dtype), x[:, :1].sin().to(dtype)
                fitted = lw.fit(net, data, lw.Gaussian(noise_std=0.1), method=method, prior=prior, progress=False)
                pair.append(fitted.functions(x[:200].to(dtype)).variance.double())
            off = (pair[0] / pair[1] - 1).abs()
            title = f"n = {rows:4d}, prior {prior:g}, {type(method).__name__}"
            yield f"  {title:28s} {float(off.median()):6.1%} {float(off.max()):6.1%}"


class Checkpointed(nn.Module):
    """Four transformer layers, each in a checkpoint of this form, or none."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form, self.layers = form, nn.ModuleList(Layer(64, 4, causal=False) for _ in range(4))
        self.head = nn.Linear(64, 3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x) if self.form == "none" else checkpoint(layer, x, use_reentrant=self.form == "reentrant")
        return self.head(x.mean(1))


def checkpoints() -> Iterator[str]:
    """Yield the cost of a fit of networks with gradient checkpointing over that of the same without."""
    yield "gradient checkpointing: seconds of Kron over those of the same network without it"
    x, y = torch.randn(64, 16, 64, device=DEVICE), torch.arange(64, device=DEVICE) % 3
    took = {}
    for form in ("none", "reentrant", "not reentrant"):
        model = Checkpointed(form).to(DEVICE).eval()
        fit = lambda m=model: lw.fit(m, (x, y), "classification", prior=1.0, progress=False).functions(x[:8]).cov
        fit()
        took[form] = seconds(fit)
    yield "  " + ", ".join(f"{form} {value / took['none']:.2f}" for form, value in took.items())


def compiled() -> Iterator[str]:
    """Yield what ``torch.compile`` saves of the sums of an MLP's factors, and what it takes to compile them."""
    torch.manual_seed(0)
    layers = [w.to(DEVICE) for w in (torch.randn(784, 256) * 0.03, torch.randn(256, 256) * 0.06, torch.randn(256, 10))]
    x = torch.randn(128, 784, device=DEVICE)

    def step(x: Tensor) -> list[Tensor]:
        inputs = [x]
        for weight in layers[:-1]:
            inputs.append(torch.tanh(inputs[-1] @ weight))
        p = (inputs[-1] @ layers[-1]).softmax(-1)
        g, sums = (torch.diag_embed(p) - p[:, :, None] * p[:, None]).permute(2, 0, 1), []
        for weight, a in zip(reversed(layers), reversed(inputs), strict=True):
            rows = g.flatten(0, 1)
            sums += [rows.mT @ rows, a.mT @ a]
            g = (g @ weight.mT) * (1 - a.square())
        return sums

    plain = seconds(lambda: step(x), 10)
    faster = torch.compile(step)
    start = time.perf_counter()
    faster(x)
    took = time.perf_counter() - start
    yield f"torch.compile of one batch of an MLP's factors: {seconds(lambda: faster(x), 10) / plain:.2f} of the time"
    yield f"  as it is; compiling it takes {took / plain:,.0f} times that of the batch"


PARTS: dict[str, Callable[[], Iterator[str]]] = {
    "eigh": eigendecompositions, "precision": precision, "wide": wide, "transformers": transformers, "digits": digits,
    "checkpoints": checkpoints, "compile": compiled,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", nargs="*", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    lines = [str(machine(1) | {"device": torch.cuda.get_device_name() if DEVICE.type == "cuda" else "CPU"})]
    print(lines[0], flush=True)
    for name in options.only:
        for line in PARTS[name]():
            print(line, flush=True)
            lines.append(line)
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
