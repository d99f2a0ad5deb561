"""Variances of float32 networks against the same networks in float64, over scales of inputs, priors and noise.

    python -m benchmarks.scales [--out FILE] [--quick]

Every method is fitted to a float32 network and to its copy in float64, with the same weights and data: inputs times
1e-3 to 1e3, prior precisions from 1e-4 to 1e6, noise variances from 1e-4 to 1e2. A row of the table is a method, a
network and a scale of the inputs. It has the worst relative error of a variance of the outputs over all priors and
noises, at the data and away from them: among the cells without a remark, and among those that carry a finding. A cell
without a remark must be within 1 %; the command fails otherwise.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import lapwing as lw
from lapwing.errors import NumericalError

INPUTS = (1e-3, 1e-2, 1e-1, 1.0, 1e1, 1e2, 1e3)
PRIORS = (1e-4, 1e-2, 1.0, 1e2, 1e4, 1e6)
NOISES = (1e-4, 1e-2, 1.0, 1e2)
LIMIT = 0.01


@dataclass(frozen=True)
class Row:
    """The cells of one method, network and scale of the inputs."""

    method: str
    network: str
    scale: float
    worst: float  # relative error among the cells without a remark
    remarked: int  # cells that were refused or carry a finding
    remarked_worst: float  # relative error among those that carry a finding
    cells: int

    def __str__(self) -> str:
        remarked = f"{self.remarked:4d} of {self.cells}" + (
            f", worst {self.remarked_worst:.1e}" if self.remarked else ""
        )
        return f"{self.method:9s} {self.network:10s} {self.scale:7.0e} {self.worst:12.1e}   {remarked}"


def methods() -> dict[str, Any]:
    """Return the methods by name."""
    return {
        "Kron": lw.Kron(), "EKron": lw.EKron(), "Diagonal": lw.Diagonal(), "Full": lw.Full(),
        "LowRank": lw.LowRank(rank=40),
    }  # fmt: skip


def networks() -> dict[str, tuple[nn.Module, tuple[int, ...], int]]:
    """Return small float32 networks by name, with the shape of an input and the number of data."""
    made: dict[str, tuple[nn.Module, tuple[int, ...], int]] = {}
    for name, layer in (("tanh", nn.Tanh), ("relu", nn.ReLU)):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(6, 20), layer(), nn.Linear(20, 20), layer(), nn.Linear(20, 2))
        made[name] = (net, (6,), 80)
    torch.manual_seed(1)
    made["conv"] = (
        nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3, 2), nn.ReLU(), nn.Flatten(), nn.Linear(16, 2)),
        (1, 7, 7), 40,
    )  # fmt: skip
    torch.manual_seed(2)
    made["norm, few"] = (
        nn.Sequential(nn.Linear(20, 30), nn.LayerNorm(30), nn.GELU(), nn.Linear(30, 2)), (20,), 12
    )  # fmt: skip
    return {name: (net.eval(), shape, number) for name, (net, shape, number) in made.items()}


def measured(method: str, network: str, scale: float, priors: tuple[float, ...], noises: tuple[float, ...]) -> Row:
    """Return the row of one method, network and scale of the inputs."""
    net, shape, number = networks()[network]
    generator = torch.Generator().manual_seed(3)
    x = scale * torch.randn(number, *shape, generator=generator)
    y = torch.randn(number, 2, generator=generator)
    test = torch.cat([x[:10], 2 * scale * torch.randn(10, *shape, generator=generator)])
    single, double = (
        lw.fit(model, [(x.to(dtype), y.to(dtype))], lw.Gaussian(noise_std=1.0), method=methods()[method], prior=1.0)
        for model, dtype in ((net, torch.float32), (copy.deepcopy(net).double(), torch.float64))
    )
    errors: list[float] = []
    remarked: list[float] = []
    for prior in priors:
        for noise in noises:
            exact = _variances(double, prior, noise, test.double())[0]
            try:
                got, remarks = _variances(single, prior, noise, test)
            except NumericalError:
                remarked.append(0.0)
                continue
            error = float((got.double() / exact - 1).abs().max())
            (remarked if remarks else errors).append(error)
    cells = len(priors) * len(noises)
    return Row(method, network, scale, max(errors, default=0.0), len(remarked), max(remarked, default=0.0), cells)


def _variances(fitted: Any, prior: float, noise: float, x: Tensor) -> tuple[Tensor, tuple[str, ...]]:
    """Return the variances of the outputs at x under another prior and noise, and what the posterior says of them."""
    posterior = fitted.with_prior(prior).posterior
    posterior = posterior.with_problem(
        posterior.problem.with_likelihood(posterior.problem.likelihood.with_noise(torch.tensor(noise).double()))
    )
    return posterior(x).variance, posterior.findings


def rows(scales: tuple[float, ...] = INPUTS) -> Iterator[Row]:
    """Yield the rows of the table."""
    for method in methods():
        for network in networks():
            for scale in scales:
                yield measured(method, network, scale, PRIORS, NOISES)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--out", type=Path, help="a file for the table")
    parser.add_argument("--quick", action="store_true", help="only the smallest, unit and largest scale of the inputs")
    options = parser.parse_args()
    lines = [f"{'method':9s} {'network':10s} {'inputs':>7s} {'worst error':>12s}   refused or with a finding"]
    print(lines[0])
    failed = 0
    for row in rows((1e-3, 1.0, 1e3) if options.quick else INPUTS):
        mark = "" if row.worst <= LIMIT else "  MISS"
        failed += bool(mark)
        lines.append(f"{row}{mark}")
        print(lines[-1], flush=True)
    if options.out:
        options.out.write_text("\n".join(lines) + "\n")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
