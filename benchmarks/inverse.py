"""What an inverse problem costs on one core: python -m benchmarks.inverse [--channels 16 32]

A U-Net with random weights, 28 x 28 pixels, ten angles (410 measurements), float64: seconds of the class matrices, of
one evaluation of the evidence with its gradient, of the standard deviations, and of 256 samples; beside them a
training step of the network in float32.
"""

from __future__ import annotations

import argparse
import copy
import platform
import time
from collections.abc import Callable
from typing import Any

import torch

import lapwing as lw
from benchmarks.spine import cpu_name
from experiments.tomography.case import Scan, Setting, scans
from experiments.tomography.deep_prior import Training, reconstruct
from experiments.tomography.phantoms import shepp_logan
from experiments.tomography.unet import filter_blocks, seeded_unet

STEPS, SAMPLES = 50, 256


def seconds(call: Callable[[], Any]) -> tuple[float, Any]:
    """Return the processor seconds of a call, and its result."""
    start = time.process_time()
    result = call()
    return time.process_time() - start, result


def row(scan: Scan, channels: int) -> str:
    """Return the line of one width."""
    unet = seeded_unet(0, channels=channels)
    operator, y, z = scan.operator.to(dtype=torch.float32), scan.y.float(), scan.backprojection.float()
    train = lambda: reconstruct(unet, operator, y, z, Training(3e-5, STEPS))
    train()
    training = seconds(train)[0] / STEPS
    prior = lw.priors.filter_gp(variance=0.1, blocks=filter_blocks(unet))
    model, inputs = copy.deepcopy(unet).double(), scan.backprojection[None, None]
    fit = lambda: lw.inverse.fit(model, inputs, scan.y, scan.operator, prior=prior, noise_std=scan.noise_std)
    classes, posterior = seconds(fit)

    def evaluate() -> torch.Tensor:
        values = posterior.prior.values.clone().requires_grad_()
        changed = posterior.with_problem(posterior.problem.with_precisions(values))
        return torch.autograd.grad(changed.log_evidence(), values)[0]

    evaluate()
    evidence = seconds(lambda: [evaluate() for _ in range(10)])[0] / 10
    std = seconds(lambda: posterior.std)[0]
    samples = seconds(lambda: posterior.samples(SAMPLES, torch.Generator().manual_seed(0)))[0]
    figures = f"{1e3 * training:10.1f} ms {classes:10.1f} s {1e3 * evidence:10.1f} ms {std:8.3f} s {samples:8.1f} s"
    return f"{channels:8d} {posterior.problem.network.selection.size:8d} {figures}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--channels", type=int, nargs="*", default=[16, 32])
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{cpu_name()}, one thread, torch {torch.__version__}, Python {platform.python_version()}")
    print(f"channels  weights  training step  class matrices  evidence step      std  {SAMPLES} samples")
    (scan,) = scans(shepp_logan(28)[None], Setting(10, 0.05))
    for channels in options.channels:
        print(row(scan, channels), flush=True)


if __name__ == "__main__":
    main()
