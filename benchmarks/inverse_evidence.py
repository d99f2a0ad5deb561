"""Error bars of images by the evidence of the tangent model, against the evidence that version 0.2.0 maximised.

    python -m benchmarks.inverse_evidence                     # signals of 40 values, seconds
    python -m benchmarks.inverse_evidence --data-dir DIR      # then digits of MNIST in two settings: 20 minutes

The former evidence is the Laplace evidence at the trained weights, as if they were the optimum of the tangent model:
-½ [|y - A f|²/σ² + w̃ᵀ Σ⁻¹ w̃ + log det K_yy + dy log 2π].
"""

from __future__ import annotations

import argparse
import copy
import math
import platform
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import lapwing as lw
from benchmarks.spine import cpu_name
from experiments.tomography.beliefs import ImageBelief, VariationPrior, rate_of_variation
from experiments.tomography.case import Scan, Setting, scans
from experiments.tomography.deep_prior import Training, reconstruct
from experiments.tomography.densities import log_density
from experiments.tomography.phantoms import digits
from experiments.tomography.scores import coverage, noise_floor, psnr, rms_z
from experiments.tomography.unet import filter_blocks, seeded_unet
from lapwing.inverse import InversePosterior
from lapwing.tuners import MaximiseEvidence

D = torch.float64
EVIDENCES = ("former", "exact")
SETTINGS = (Setting(10, 0.05), Setting(5, 0.10))
ONE = {".*": "weights"}  # one block


@dataclass(frozen=True)
class Signal:
    """A signal (40,) that a small network reconstructs from 20 noisy measurements: an inverse problem without images.

    Args:
        truth: "network", the output of another network of the same kind, or "smooth", a draw of a Gaussian process.
        steps: Training steps.
        noise: The standard deviation of the noise; the signal has about one.
    """

    truth: str = "network"
    steps: int = 500
    noise: float = 0.1

    def fitted(self, seed: int, prior: Any, noise_std: float | None) -> tuple[InversePosterior, Tensor]:
        """Return the posterior of a trained network, with nothing learned yet, and the true signal."""
        generator = torch.Generator().manual_seed(seed)
        z = torch.randn(1, 2, 40, dtype=D, generator=generator)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            other, net = (_network() for _ in range(2))
        truth = _smooth(generator) if self.truth == "smooth" else other(z).detach().reshape(-1)
        truth = (truth - truth.mean()) / truth.std()
        a = torch.randn(20, 40, dtype=D, generator=generator) / math.sqrt(40)
        y = a @ truth + self.noise * torch.randn(20, dtype=D, generator=generator)
        optimiser = torch.optim.Adam(net.parameters(), lr=1e-2)
        for _ in range(self.steps):
            optimiser.zero_grad()
            (a @ net(z).reshape(-1) - y).square().mean().backward()
            optimiser.step()
        return lw.inverse.fit(net.eval(), z, y, a, prior=prior, noise_std=noise_std, progress=False), truth


def _network() -> nn.Module:
    layers = (nn.Conv1d(2, 8, 5, padding=2), nn.Tanh(), nn.Conv1d(8, 8, 5, padding=2), nn.Tanh())
    return nn.Sequential(*layers, nn.Conv1d(8, 1, 5, padding=2)).double()


def _smooth(generator: torch.Generator) -> Tensor:
    t = torch.linspace(0, 1, 40, dtype=D)
    kernel = torch.exp(-0.5 * (t[:, None] - t).square() / 0.1**2) + 1e-8 * torch.eye(40, dtype=D)
    return torch.linalg.cholesky(kernel) @ torch.randn(40, dtype=D, generator=generator)


def former_minus_exact(posterior: Any) -> Tensor:
    """Return the difference of the two evidences, differentiable: as a hyperprior it makes a tuner maximise the former.

    They have the same log-determinant.
    """
    problem = posterior.problem
    residual, shifted = problem.residual, problem.prior_residual
    covariance = posterior.classes.covariance(problem.prior.coefficients(), posterior.noise_variance)
    exact = shifted @ torch.cholesky_solve(shifted[:, None], torch.linalg.cholesky(covariance))[:, 0]
    former = residual.square().sum() / posterior.noise_variance + problem.prior.penalty(problem.theta)
    return -0.5 * (former - exact)


def tuned(start: InversePosterior, evidence: str, density: Callable[[Any], Tensor] | None = None) -> InversePosterior:
    """Return the posterior at the optimum of one of the evidences, plus a log density of hyperparameters."""
    parts = [part for part in (former_minus_exact if evidence == "former" else None, density) if part is not None]

    def total(posterior: Any) -> Tensor:
        return torch.stack([part(posterior) for part in parts]).sum()

    return start.tuned(MaximiseEvidence(noise=True, max_steps=400, hyperprior=total if parts else None))


def signal_scores(posterior: InversePosterior, truth: Tensor) -> dict[str, float]:
    """Return the calibration of single values of a signal."""
    mean, variance = posterior.reconstruction.reshape(-1), posterior.covariance().diagonal()
    moved = posterior.tangent_mean.reshape(-1)
    return {
        "RMS z": rms_z(mean, variance.sqrt(), truth),
        "coverage": coverage(mean, variance.sqrt(), truth),
        "NLL": -log_density(truth, mean, variance),
        "RMS z t": rms_z(moved, variance.sqrt(), truth),
        "NLL t": -log_density(truth, moved, variance),
    }


def signal_lines(seeds: int) -> Iterator[str]:
    """Yield the table of signals."""
    priors = {
        "one precision": lw.isotropic(10.0), "filter_gp, one block": lw.priors.filter_gp(blocks=ONE),
        "filter_gp, by layer": lw.priors.filter_gp(),
    }  # fmt: skip
    columns = ("RMS z", "least", "most", "coverage", "NLL", "lower", "RMS z t", "NLL t")
    yield f"{'':52s}" + "".join(f"{column:>10s}" for column in columns)
    for kind in ("network", "smooth"):
        for name, prior in priors.items():
            for noise in ("known", "learned"):
                scores: dict[str, list[dict[str, float]]] = {evidence: [] for evidence in EVIDENCES}
                for seed in range(seeds):
                    signal = Signal(kind)
                    start, truth = signal.fitted(seed, prior, signal.noise if noise == "known" else None)
                    for evidence in EVIDENCES:
                        scores[evidence].append(signal_scores(tuned(start, evidence), truth))
                for evidence, rows in scores.items():
                    z, nll = [row["RMS z"] for row in rows], [row["NLL"] for row in rows]
                    lower = sum(a < b["NLL"] for a, b in zip(nll, scores["former"], strict=True))
                    mean = {key: sum(row[key] for row in rows) / seeds for key in rows[0]}
                    label = f"{kind}, {name}, {noise} noise, {evidence}"
                    values = (mean["RMS z"], min(z), max(z), mean["coverage"], mean["NLL"], lower)
                    cells = "".join(f"{value:10.2f}" for value in (*values, mean["RMS z t"], mean["NLL t"]))
                    yield f"{label:52s}{cells}"


@dataclass(frozen=True)
class Digits:
    """Digits of MNIST in the settings of the case study, with its networks and training."""

    data_dir: Path
    images: int = 5
    steps: int = 3000
    channels: int = 32

    def lines(self) -> Iterator[str]:
        """Yield a table for each setting, a row for each way to learn hyperparameters."""
        for setting in SETTINGS:
            start, scores = time.perf_counter(), [self._scores(scan, setting, i) for i, scan in self._scans(setting)]
            yield f"{setting!s}, {self.images} images, {(time.perf_counter() - start) / 60:.0f} minutes"
            columns = list(scores[0][next(iter(scores[0]))])
            yield f"{'':52s}" + "".join(f"{column:>10s}" for column in columns)
            for label in scores[0]:
                means = [sum(each[label][column] for each in scores) / len(scores) for column in columns]
                yield f"{label:52s}" + "".join(f"{value:10.3f}" for value in means)

    def _scans(self, setting: Setting) -> Iterator[tuple[int, Scan]]:
        yield from enumerate(scans(digits(self.data_dir, self.images), setting))

    def _scores(self, scan: Scan, setting: Setting, image: int) -> dict[str, dict[str, float]]:
        operator, y, z = scan.operator.to(dtype=torch.float32), scan.y.float(), scan.backprojection.float()
        training = Training(setting.weight_of_tv, self.steps, 5e-4)
        unet = copy.deepcopy(reconstruct(seeded_unet(image, channels=self.channels), operator, y, z, training).unet)
        floor = noise_floor(scan.operator.dense(), scan.noise_std)
        rate = rate_of_variation(scan, setting.weight_of_tv, scan.noise_std)
        priors = {
            "one precision": lw.isotropic(10.0),
            "filter_gp, one block": lw.priors.filter_gp(variance=0.1, blocks=ONE),
            "filter_gp, by block": lw.priors.filter_gp(variance=0.1, blocks=filter_blocks(unet)),
        }
        scores = {}
        for name, prior in priors.items():
            known = lw.inverse.fit(
                unet.double(), scan.backprojection[None, None], scan.y, scan.operator, prior=prior,
                noise_std=scan.noise_std, solver="exact", progress=False,
            )  # fmt: skip
            learned = replace(known, learns_noise=True)  # the same class matrices; the search starts at the true noise
            for noise, start in (("known", known), ("learned", learned)):
                for variation in (False, True) if name.startswith("filter_gp") else (False,):
                    density = VariationPrior.of(start, rate) if variation else None
                    for evidence in EVIDENCES:
                        label = f"{name}, {noise} noise{', TV' if variation else ''}, {evidence}"
                        scores[label] = image_scores(tuned(start, evidence, density), scan, floor)
        return scores


def image_scores(posterior: InversePosterior, scan: Scan, floor: float) -> dict[str, float]:
    """Return the scores of an image, with the noise floor of the case study for the true noise."""
    mean = posterior.reconstruction.reshape(scan.truth.shape)
    scores = ImageBelief(mean, posterior.covariance(), floor=floor).scores(scan.truth)
    moved = ImageBelief(posterior.tangent_mean.reshape(mean.shape), posterior.covariance(), floor=floor)
    return {
        **{name: scores[name] for name in ("LL", "LL 1 x 1", "RMS z")},
        "coverage": scores["coverage 95 %"],
        "noise": float(posterior.noise_std) / scan.noise_std,
        "unused": float(len(posterior.unused_blocks)),
        "PSNR": scores["PSNR"],
        "PSNR t": psnr(moved.mean, scan.truth),
        "LL t": moved.density(scan.truth, None),
        "RMS z t": rms_z(moved.mean, moved.std, scan.truth),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=6, help="signals of each kind")
    parser.add_argument("--data-dir", type=Path, help="the folder of mnist.npz, for the second part")
    parser.add_argument("--images", type=int, default=5, help="digits in each setting")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{cpu_name()}, one thread, torch {torch.__version__}, Python {platform.python_version()}\n")
    print("t: with the mean of the tangent model in place of the output of the network; coverage of 95 % intervals")
    print(f"signals of 40 values, {options.seeds} seeds; lower: seeds whose NLL per value is below that of the former")
    for line in signal_lines(options.seeds):
        print(line, flush=True)
    if options.data_dir is None:
        return
    print("\nLL: log-density of the true image in nats per pixel; unused: blocks of the prior without effect")
    for line in Digits(options.data_dir, options.images).lines():
        print(line, flush=True)


if __name__ == "__main__":
    main()
