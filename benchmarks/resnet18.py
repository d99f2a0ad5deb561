"""Samples of the full posterior of a ResNet-18: PYTHONPATH=. python -m benchmarks.resnet18 --data-dir DIR [--out FILE]

CIFAR-10, 50,000 images, 11 million weights: train, then draw posterior samples by one block Krylov basis, choose the
prior precision by held-out crops (and by the evidence, with --evidence), and compare test likelihood, calibration and
strange images (Fashion-MNIST as colour images) with the plain network, Kron and the last layer. The goal is six samples
or more with a residual of at most 0.01 and a tuned precision within ten minutes after training, on one GPU. TF32
products are allowed; recurrences are float64.
"""

from __future__ import annotations

import argparse
import json
import logging
import platform
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import lapwing as lw
from benchmarks import models
from experiments.corrected import IMAGES, corrected_evidence
from experiments.data import digits_like
from experiments.resnets import cifar10, cropped, train
from lapwing import metrics

Pair = tuple[Tensor, Tensor]
PRECISIONS = tuple(10.0 ** (k / 4) for k in range(20, 11, -1))  # from 100,000 down to 1,000
WEAKER = tuple(10.0 ** (k / 2) for k in range(-4, 9))  # for the few weights of the last layer


def crops(x: Tensor, y: Tensor, count: int = 2000) -> Pair:
    """Return random crops of some training images: held-out data for a network that was trained on all images."""
    return cropped(x[:count], seed=0), y[:count]


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    start = time.perf_counter()
    result = call()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start, result


def parts(x: Tensor, size: int) -> Iterator[Tensor]:
    yield from x.split(size)


def scores(probs: Callable[[Tensor], Tensor], test: Pair, strange: Tensor, size: int) -> dict[str, float]:
    inside, outside = (torch.cat([probs(part) for part in parts(x, size)]) for x in (test[0], strange))
    entropy = lambda p: torch.special.entr(p).sum(-1)
    return {
        "accuracy": metrics.accuracy(inside, test[1]), "NLL": metrics.categorical_nll(inside, test[1]),
        "ECE": metrics.ece(inside, test[1]), "OOD AUROC": metrics.auroc(entropy(inside), entropy(outside)),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--epochs", type=int, default=24)
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--precisions", type=float, nargs="+", default=PRECISIONS, help="from large to small")
    parser.add_argument("--evidence", action="store_true", help="learn a second precision, by sample EM")
    parser.add_argument("--corrected", type=int, default=IMAGES, help="images for the corrected evidence")
    parser.add_argument("--width", type=int, nargs="+", default=[64, 128, 256, 512])
    parser.add_argument("--images", type=int, default=50_000)
    parser.add_argument("--test", type=int, default=10_000)
    parser.add_argument("--batch", type=int, default=250)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    logging.basicConfig(format="%(asctime)s %(message)s", level=logging.INFO)  # how far a basis is
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    device = torch.device(arguments.device)
    x, y = (t[: arguments.images] for t in cifar10(arguments.data_dir, "train", device))
    test = tuple(t[: arguments.test] for t in cifar10(arguments.data_dir, "test", device))
    strange = digits_like(arguments.data_dir, "fashion_mnist", device)[: arguments.test]
    torch.manual_seed(0)
    model = models.ResNet(tuple(arguments.width), 2).to(device)
    size = sum(p.numel() for p in model.parameters())
    figures: dict[str, Any] = {
        "python": platform.python_version(), "torch": str(torch.__version__), "images": len(x), "weights": size,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else platform.processor(),
    }  # fmt: skip
    figures["training s"], _ = timed(lambda: train(model, x, y, arguments.epochs))
    print(figures, flush=True)
    data = list(zip(x.split(arguments.batch), y.split(arguments.batch), strict=True))
    held_out = list(zip(*(t.split(arguments.batch) for t in crops(x, y)), strict=True))
    rows: dict[str, Any] = {"plain": scores(lambda p: model(p).detach().softmax(-1), test, strange, arguments.batch)}  # type: ignore[arg-type]
    figures["rows"] = rows
    print(rows["plain"], flush=True)

    def judged(name: str, call: Callable[[], lw.Fitted]) -> lw.Fitted:
        seconds, posterior = timed(call)
        found_here = scores(lambda p: posterior.predict(p).probs, test, strange, arguments.batch)  # type: ignore[arg-type]
        rows[name] = {"fit s": seconds, "precision": float(posterior.prior.values), **found_here}
        if name.startswith("samples"):
            rows[name] |= solved(posterior.posterior)
        if device.type == "cuda":
            rows[name]["peak GB"] = torch.cuda.max_memory_allocated() / 2**30
        print(name, rows[name], flush=True)
        if arguments.out is not None:
            arguments.out.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
        return posterior

    probit, evidence = lw.Categorical(link="probit"), lw.tuners.MaximiseEvidence()
    method = lw.Sampled(num_samples=arguments.samples, width=2 * arguments.samples)
    tuner = lw.tuners.Grid(held_out, arguments.precisions)
    sampled = judged(
        "samples, validation",
        lambda: lw.fit(model, data, probit, method=method, prior=1e4, tuner=tuner, progress=True),
    )
    kron = judged("Kron, evidence", lambda: lw.fit(model, data, probit, tuner=evidence, progress=False))
    some = x[: arguments.corrected], y[: arguments.corrected]
    judged("Kron, corrected evidence", lambda: corrected_evidence(model, some, len(x), arguments.batch, "probit"))
    judged("Kron, validation", lambda: kron.tuned(lw.tuners.Grid(held_out, arguments.precisions)))
    last = judged("last layer, evidence", lambda: lw.fit(model, data, probit, method=lw.Full(), tuner=evidence,
                                                         progress=False, weights="last_layer"))  # fmt: skip
    judged("last layer, validation", lambda: last.tuned(lw.tuners.Grid(held_out, WEAKER)))
    if arguments.evidence:  # goes on from the same basis, to a smaller precision
        judged(
            "samples, evidence", lambda: sampled.tuned(lw.tuners.SampleEM(mode="network", tolerance=0.02, max_steps=20))
        )


def solved(posterior: Any) -> dict[str, Any]:
    """Return how the samples of a posterior were solved for: residual, products and trace."""
    solution = posterior.solution
    return {
        "samples": len(solution.x), "residual": float(solution.residuals.max()), "products": solution.iterations,
        "trace": [step.precisions[0] for step in posterior.trace.steps], "findings": list(posterior.trace.findings),
    }  # fmt: skip


if __name__ == "__main__":
    main()
