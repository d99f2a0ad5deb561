"""Links against the integral that they approximate: python -m benchmarks.links

Random Gaussian beliefs about C logits; the mean KL divergence, in nats, from the softmax averaged over 2**14
quasi-random draws to the probabilities of every link. A shift common to all logits changes neither the integral nor the
other links; "probit, shift" is probit where such a shift is as uncertain as the logits. "integral again" is the
integral by other draws: a figure below it means nothing. For binary labels the largest error of a probability, against
SciPy's quadrature.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path

import torch
from scipy import integrate
from torch import Tensor

from benchmarks.clock import machine
from lapwing.predictives.labels import BINARY_LINKS, LINKS, SoftmaxPredictive, logit_draws
from lapwing.values.gaussian import FunctionGaussian

CLASSES = {2: 50, 3: 50, 10: 50, 100: 10, 1000: 2}  # beliefs for each number of classes and variance
VARIANCES = (0.1, 1.0, 10.0, 100.0)
DRAWS = 2**14
NAMES = ("pairwise", "probit", "bridge", "mc")
COLUMNS = (*NAMES, "probit, shift", "integral again")


def beliefs(classes: int, variance: float, count: int, seed: int) -> FunctionGaussian:
    """Return beliefs with means from N(0, 9) and Wishart covariances of this mean variance."""
    generator = torch.Generator().manual_seed(seed)
    mean = 3 * torch.randn(count, classes, generator=generator, dtype=torch.float64)
    root = torch.randn(count, classes, classes, generator=generator, dtype=torch.float64)
    return FunctionGaussian(mean, variance / classes * root @ root.mT)


def integral(belief: FunctionGaussian, seed: int) -> Tensor:
    """Return the probabilities (B, C) by many draws, one belief at a time."""
    one = lambda i: FunctionGaussian(belief.mean[i : i + 1], belief.cov[i : i + 1])
    return torch.cat([logit_draws(one(i), DRAWS, seed).softmax(-1).mean(0) for i in range(len(belief.mean))])


def divergences(classes: int, variance: float, count: int) -> list[float]:
    """Return the mean KL divergence from the integral for every column."""
    belief = beliefs(classes, variance, count, seed=classes)
    exact = integral(belief, 1)
    logs = [LINKS[link](SoftmaxPredictive(belief, link)) for link in NAMES]
    logs.append(LINKS["probit"](SoftmaxPredictive(FunctionGaussian(belief.mean, belief.cov + variance))))
    logs.append(integral(belief, 2).log())
    return [float((torch.special.xlogy(exact, exact) - exact * log).sum(-1).mean()) for log in logs]


def binary_errors() -> dict[str, float]:
    """Return the largest error of a probability of each binary link, over means and variances."""
    largest = dict.fromkeys(BINARY_LINKS, 0.0)
    for mean in (-8.0, -4.0, -2.0, -1.0, -0.5, 0.0, 1.0, 3.0, 6.0):
        for variance in (0.01, *VARIANCES, 900.0):
            std = math.sqrt(variance)
            exact = integrate.quad(_density, -9, 9, args=(mean, std), epsabs=1e-12, limit=500, points=[-mean / std])[0]
            belief = FunctionGaussian(torch.tensor([[mean]]).double(), torch.tensor([[[variance]]]).double())
            for name, link in BINARY_LINKS.items():
                largest[name] = max(largest[name], abs(float(link(belief)[0].exp()) - exact))
    return largest


def _density(z: float, mean: float, std: float) -> float:
    """Return sigmoid(mean + std z) times the normal density of z."""
    logit = mean + std * z
    sigmoid = 1 / (1 + math.exp(-logit)) if logit > -700 else 0.0
    return sigmoid * math.exp(-0.5 * z * z) / math.sqrt(2 * math.pi)


def table(head: str, rows: Sequence[tuple[str, list[float]]]) -> str:
    """Return figures in columns."""
    lines = [f"{head:>12s}" + "".join(f"{name:>16s}" for name in COLUMNS)]
    lines += [f"{name:>12s}" + "".join(f"{value:16.4f}" for value in values) for name, values in rows]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--classes", type=int, nargs="+", default=list(CLASSES), choices=list(CLASSES))
    parser.add_argument("--out", type=Path, help="file that the tables are written to as well")
    arguments = parser.parse_args()
    figures = machine(arguments.threads)
    of = {(c, v): divergences(c, v, CLASSES[c]) for c in arguments.classes for v in VARIANCES}
    mean = lambda key: [sum(column) / len(column) for column in zip(*key, strict=True)]
    by_classes = [(str(c), mean([of[c, v] for v in VARIANCES])) for c in arguments.classes]
    by_variance = [(f"{v:g}", mean([of[c, v] for c in arguments.classes])) for v in VARIANCES]
    text = "\n".join([
        str(figures), "", "KL to the integral in nats, mean over variances", table("classes", by_classes), "",
        "the same by variance, mean over classes", table("variance", by_variance), "",
        *(f"binary, {name}: largest error {error:.1e}" for name, error in binary_errors().items()),
    ])  # fmt: skip
    print(text)
    if arguments.out is not None:
        arguments.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
