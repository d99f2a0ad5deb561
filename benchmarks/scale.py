"""What a thousand classes and a hundred million weights cost: python -m benchmarks.scale [--rows NAME ...] [--small]

Every figure is a ratio to a plain pass of the same network over the same data in the same process: epochs (forward and
backward) for fits, forward passes for predictions. Fits are of the curvature alone, with a given prior;
eigendecompositions and hyperparameters have rows of their own. Networks have random weights and random data: costs do
not depend on them. On a GPU the memory is the allocator's peak above what was held before, on a CPU the resident one.

Without a GPU only the rows for a CPU run; ``--small`` runs the rows for a GPU with small networks there, to try the
script, and its figures mean nothing else. ``--out FILE`` keeps the table.
"""

from __future__ import annotations

import argparse
import platform
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lapwing as lw
from benchmarks.clock import Peak
from benchmarks.large_models import GPT, ResNet50, UNet, ViT

Data = list[tuple[Tensor, Tensor]]
SAMPLES = 32


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    work: str
    seconds: float
    plain: float  # seconds of the pass that it is compared with
    unit: str
    gigabytes: float
    before: str = ""  # what it took before networks of this size were looked at
    goal: str = ""

    def __str__(self) -> str:
        figure = f"{self.seconds / self.plain:8.1f} {self.unit}" if self.unit else f"{self.seconds:8.2f} s"
        compared = f"{self.before or '-':>24s}  {self.goal}"
        return f"{self.work:66s} {figure:25s} {self.seconds:8.3f} s {self.gigabytes:7.2f} GB  {compared}".rstrip()


@dataclass(frozen=True)
class Bench:
    """A network with data on a device, and the clock for it."""

    model: nn.Module
    data: Data
    device: torch.device

    @classmethod
    def of(cls, model: nn.Module, data: Data, device: torch.device) -> Bench:
        model = model.to(device).eval()
        return cls(model, [(x.to(device), y.to(device)) for x, y in data], device)

    def timed(self, call: Callable[[], Any], repeats: int = 2) -> tuple[float, float, Any]:
        """Return the seconds of the shortest call, the peak in GB, and the last result."""
        best, result = float("inf"), None
        with Memory(self.device) as peak:
            for _ in range(repeats):
                result = None
                start = time.perf_counter()
                result = call()
                if self.device.type == "cuda":
                    torch.cuda.synchronize()
                best = min(best, time.perf_counter() - start)
        return best, peak.gigabytes, result

    def epoch(self) -> float:
        """Return the seconds of a plain forward and backward pass over the data."""
        parameters = [p for p in self.model.parameters() if p.requires_grad]

        def run() -> None:
            for x, y in self.data:
                f = self.model(x)
                torch.autograd.grad(F.cross_entropy(f.flatten(0, -2), y.flatten()), parameters)

        run()
        return self.timed(run)[0]

    def forward(self, x: Tensor) -> float:
        """Return the seconds of a plain forward pass."""
        with torch.no_grad():
            self.model(x)
            return self.timed(lambda: self.model(x), 5)[0]

    def fit(self, method: Any, **settings: Any) -> Any:
        settings = {"prior": 1.0, **settings}
        return lw.fit(self.model, self.data, "classification", method=method, progress=False, **settings)

    def fitted(self, work: str, method: Any, before: str = "", goal: str = "", **settings: Any) -> tuple[Row, Any]:
        """Return the row of a fit, and the posterior."""
        Bench(self.model, self.data[:1], self.device).fit(method, **settings)  # kernels are chosen at their first call
        seconds, peak, posterior = self.timed(lambda: self.fit(method, **settings), 1)
        return Row(work, seconds, self.epoch(), "epochs", peak, before, goal), posterior

    def predicted(
        self, work: str, x: Tensor, call: Callable[[Tensor], Any], before: str = "", goal: str = ""
    ) -> Iterator[Row]:
        """Yield the row of a prediction; the first call, with the factorisation, is a row of its own."""
        first, peak, _ = self.timed(lambda: call(x), 1)
        seconds, again, _ = self.timed(lambda: call(x), 3)
        forward = self.forward(x)
        yield Row(work, seconds, forward, "forward passes", max(peak, again), before, goal)
        if first > 2 * seconds:
            yield Row("  the first call, with factorisations (once)", first, 1.0, "", peak)


class Memory:
    """The peak of a region above what was held before it."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._resident = device, Peak()

    def __enter__(self) -> Memory:
        if self._device.type == "cuda":
            torch.cuda.synchronize()
            self._before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
        else:
            self._resident.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        if self._device.type == "cuda":
            self.gigabytes = (torch.cuda.max_memory_allocated() - self._before) / 2**30
        else:
            self._resident.__exit__()
            self.gigabytes = self._resident.mb / 2**10


def images(n: int, size: int, classes: int, batch: int = 64) -> Data:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(n, 3, size, size, generator=generator), torch.randint(0, classes, (n,), generator=generator)
    return list(zip(x.split(batch), y.split(batch), strict=True))


def sentences(n: int, length: int, vocabulary: int, classes: int | None, batch: int = 64) -> Data:
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(0, vocabulary, (n, length), generator=generator)
    y = x.roll(-1, 1) if classes is None else torch.randint(0, classes, (n,), generator=generator)
    return list(zip(x.split(batch), y.split(batch), strict=True))


def thousand_classes(device: torch.device, small: bool) -> Iterator[Row]:
    """ResNet-50 with 1,000 classes: fits, predictions by samples, chosen outputs, the last layer."""
    size, n, exact = (64, 64, 2) if small else (224, 1024, 16)
    model = ResNet50(1000, 8, (1, 1, 1, 1)) if small else ResNet50(1000)
    bench = Bench.of(model, images(n, size, 1000), device)
    name = f"ResNet-50, 1,000 classes, {size} x {size}"
    row, posterior = bench.fitted(f"{name}, Kron, default curvature, fit to {n}", lw.Kron(), "5.1 (one label drawn)")
    yield row
    few = Bench(bench.model, [(x[:exact], y[:exact]) for x, y in bench.data[:1]], device)
    yield few.fitted(f"  exact curvature, fit to {exact}", lw.Kron(curvature="ggn"), "725, 81 GB", "20 GB")[0]
    x = bench.data[0][0]
    for inputs, before in ((4, "715, 98.8 GB"), (16, "2,524, 98.8 GB")):
        goal = "100, 10 GB" if inputs == 16 else ""
        yield from bench.predicted(
            f"  probabilities of {inputs} inputs", x[:inputs], probabilities(posterior), before, goal
        )
    for inputs, before in ((4, "192, 87 GB"), (16, "620, 87 GB")):
        work = f"  {SAMPLES} function samples at {inputs} inputs"
        yield from bench.predicted(work, x[:inputs], samples(posterior, SAMPLES), before)
    yield from bench.predicted(
        "  variances of the five largest outputs of 16 inputs", x[:16], largest(posterior, 5), "", "10"
    )
    yield from bench.predicted("  variances of the five largest outputs of 64 inputs", x, largest(posterior, 5))
    del posterior
    seconds, peak, whole = bench.timed(lambda: bench.fit(lw.Kron(), prior=None), 1)
    yield Row("  fit with hyperparameters and the guard", seconds, bench.epoch(), "epochs", peak, "19 (evidence)")
    del whole
    row, last = bench.fitted("  last layer, Kron, fit", lw.Kron(), weights="last_layer")
    yield row
    x = x[:64]
    yield from bench.predicted("  last layer, probabilities of 64 inputs", x, probabilities(last), "3.5, 4.6 GB")


def ten_classes(device: torch.device, small: bool) -> Iterator[Row]:
    """ResNet-50 with 10 classes, exact."""
    size, n = (64, 32) if small else (224, 256)
    bench = Bench.of(ResNet50(10, 8, (1, 1, 1, 1)) if small else ResNet50(10), images(n, size, 10), device)
    for method, fit, predict in ((lw.Kron(), "20", "11"), (lw.Diagonal(), "15", "13")):
        name = type(method).__name__
        row, posterior = bench.fitted(f"ResNet-50, 10 classes, {name}, fit to {n}", method, fit)
        yield row
        x = bench.data[0][0][:4]
        yield from bench.predicted("  variances of 4 inputs", x, variances(posterior), predict)


def vision_transformer(device: torch.device, small: bool) -> Iterator[Row]:
    """ViT-B/16 with 10 classes, all weights."""
    size, n = (64, 64) if small else (224, 2048)
    bench = Bench.of(ViT(10, size, 64, 2, 4) if small else ViT(10), images(n, size, 10), device)
    for kfac, before in (("expand", "19 (n = 128)"), ("reduce", "7.3 (n = 128)")):
        row, posterior = bench.fitted(
            f"ViT-B/16, 10 classes, Kron {kfac}, fit to {n}", lw.Kron(sharing=kfac), before, "8"
        )
        yield row
        x = bench.data[0][0][:8]
        yield from bench.predicted("  variances of 8 inputs", x, variances(posterior), "34, 10.6 GB", "20, 10 GB")


def language_classifier(device: torch.device, small: bool) -> Iterator[Row]:
    """GPT-2 size as a classifier: adapters, and all weights."""
    vocabulary, n, length = (500, 64, 16) if small else (32_000, 2048, 128)
    build = lambda: GPT(vocabulary, 4, 64, 2, 4, length) if small else GPT(vocabulary, 4)
    data = sentences(n, length, vocabulary, 4)
    bench = Bench.of(build().adapted(), data, device)
    for method, before in ((lw.Kron(), "8.3"), (lw.Diagonal(), "3.0"), (lw.Sampled(), "3.7")):
        name = type(method).__name__
        yield bench.fitted(f"GPT-2 size, adapters r = 8, 4 classes, {name}, fit to {n}", method, f"{before} (n = 512)")[
            0
        ]
    bench = Bench.of(build(), data, device)
    row, posterior = bench.fitted(f"GPT-2 size, all weights, Kron, fit to {n}", lw.Kron(), "13.8 (n = 256)", "8")
    yield row
    x = bench.data[0][0][:8]
    yield from bench.predicted("  variances of 8 inputs", x, variances(posterior), "21", "20, 10 GB")


def language_model(device: torch.device, small: bool) -> Iterator[Row]:
    """GPT-2 size with logits of every next token."""
    vocabulary, n, length = (500, 16, 8) if small else (32_000, 64, 128)
    model = GPT(vocabulary, None, 64, 2, 4, length) if small else GPT(vocabulary, None)
    bench = Bench.of(model, sentences(n, length, vocabulary, None, 8), device)
    row, posterior = bench.fitted(
        f"GPT-2 size, {vocabulary:,} tokens, Kron, default curvature, fit to {n}", lw.Kron(), "fits"
    )
    yield row
    x = bench.data[0][0][:2]
    yield from bench.predicted("  8 function samples at 2 sequences", x, samples(posterior, 8), "not practical")


def wide_inputs(device: torch.device, small: bool) -> Iterator[Row]:
    """10,000 input features and 300 data, on a CPU."""
    features, n = (500, 60) if small else (10_000, 300)
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(n, features, generator=generator), torch.randint(0, 2, (n,), generator=generator)
    model = nn.Sequential(nn.Linear(features, 32), nn.ReLU(), nn.Linear(32, 2))
    bench = Bench.of(model, [(x, y)], device)
    for name, method, before in (
        ("Kron", lw.Kron(), "over 170 s"),
        ("auto, seconds=60", lw.Auto(seconds=60), "over 230 s"),
    ):
        fit = lambda method=method: bench.fit(method, prior=None).predict(x[:8]).probs
        seconds, peak, _ = bench.timed(fit, 1)
        yield Row(f"{features:,} features, n = {n}: {name}, fit and prediction", seconds, 1.0, "", peak, before)


def dense_outputs(device: torch.device, small: bool) -> Iterator[Row]:
    """A U-Net with a value for each of 32 x 32 pixels, on a CPU."""
    side, n = (8, 8) if small else (32, 64)
    x = torch.randn(n, 1, side, side, generator=torch.Generator().manual_seed(0))
    model = UNet().eval()
    data = [(x, x.flatten(1))]
    likelihood = lw.Gaussian(noise_std=0.1)
    fit = lambda: lw.fit(model, data, likelihood, method=lw.Kron(curvature="fisher_mc"), prior=1.0, progress=False)
    bench = Bench(model, data, device)
    seconds, peak, posterior = bench.timed(fit, 1)
    yield Row(f"U-Net, {side} x {side} outputs, Kron by drawn targets, fit to {n}", seconds, 1.0, "", peak)
    yield from bench.predicted("  variances of one image", x[:1], variances(posterior), "31 s, 1.8 GB")


def probabilities(posterior: Any) -> Callable[[Tensor], Tensor]:
    return lambda x: posterior.predict(x).probs


def variances(posterior: Any) -> Callable[[Tensor], Tensor]:
    return lambda x: posterior.functions(x).variance


def largest(posterior: Any, count: int) -> Callable[[Tensor], Tensor]:
    return lambda x: posterior.functions(x, outputs=posterior.network(x).topk(count).indices).variance


def samples(posterior: Any, count: int) -> Callable[[Tensor], Tensor]:
    return lambda x: posterior.function_samples(x, count, torch.Generator(x.device).manual_seed(0))


ON_GPU = {
    "thousand_classes": thousand_classes, "ten_classes": ten_classes, "vision_transformer": vision_transformer,
    "language_classifier": language_classifier, "language_model": language_model,
}  # fmt: skip
ON_CPU = {"wide_inputs": wide_inputs, "dense_outputs": dense_outputs}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="*", choices=[*ON_GPU, *ON_CPU])
    parser.add_argument("--small", action="store_true", help="small networks, to try the script on a CPU")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    gpu = torch.cuda.is_available()
    device = torch.device("cuda" if gpu else "cpu")
    chosen = options.rows or [*(ON_GPU if gpu or options.small else ()), *(ON_CPU if not gpu else ())]
    where = torch.cuda.get_device_name() if gpu else f"{platform.machine()}, {torch.get_num_threads()} threads"
    lines = [f"{where}, torch {torch.__version__}, Python {platform.python_version()}, float32"]
    lines.append(f"{'work':66s} {'figure':25s} {'seconds':>10s} {'peak':>10s}  {'before':>24s}  goal")
    print("\n".join(lines), flush=True)
    for name in chosen:
        torch.manual_seed(0)
        for row in {**ON_GPU, **ON_CPU}[name](device, options.small):
            lines.append(str(row))
            print(row, flush=True)
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
