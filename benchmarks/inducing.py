"""The cost of a learning step of VaLLA: python -m benchmarks.inducing [--data-dir DIR] [--peer PYTHON]

*Size*: seconds for a step at n = 1,000, 10,000 and 100,000 rows of the flights data (8-200-200-1, M = B = 100). The
goal is a flat line: a step sees its batch and its points and no more.

*Peer*: a step on 90-200-200-1 with M = B = 100 in float64, against the VaLLA of laplace-torch 0.3 in an environment of
its own, one after the other in one run. The goal is a hundredth of its time. Both move the points, the prior and the
noise (alpha = 1).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import lapwing as lw
from benchmarks.clock import best_of, machine

STEPS = 200


def network(inputs: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(inputs, 200), nn.Tanh(), nn.Linear(200, 200), nn.Tanh(), nn.Linear(200, 1)
    ).double()  # fmt: skip


def seconds_for_a_step(model: nn.Module, x: Tensor, y: Tensor, steps: int = STEPS, alpha: float = 1.0) -> float:
    """Return the seconds of a step, from two fits that differ by ``steps`` steps alone: costs of a whole fit cancel."""
    data = [(part, target) for part, target in zip(x.split(10_000), y.split(10_000), strict=True)]

    def fit(count: int) -> None:
        method = lw.VaLLA(100, alpha=alpha, start="random", optimiser="adam", steps=count, batch_size=100)
        lw.fit(model, data, "regression", method=method, tuner=lambda posterior: posterior, progress=False)

    fit(2)  # the first call also pays for imports
    return (best_of(3, lambda: fit(steps + 2)) - best_of(3, lambda: fit(2))) / steps


def by_size(folder: Path) -> list[dict[str, Any]]:
    import numpy as np

    with np.load(folder / "flights_nyc13.npz", allow_pickle=False) as file:
        x, y = torch.as_tensor(file["X"]).double(), torch.as_tensor(file["y"]).double()
    x, y = (x - x.mean(0)) / x.std(0), ((y - y.mean()) / y.std()).reshape(-1, 1)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    model = network(x.shape[1])
    return [{"rows": n, "step ms": 1e3 * seconds_for_a_step(model, x[order[:n]], y[order[:n]])} for n in
            (1_000, 10_000, 100_000)]  # fmt: skip


def against_peer(peer: str | None) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2_000, 90, generator=generator).double()
    y = x[:, :1].sin() + 0.1 * torch.randn(2_000, 1, generator=generator).double()
    figures: dict[str, Any] = {"step ms": 1e3 * seconds_for_a_step(network(90), x, y)}
    if peer is not None:
        script = str(Path(__file__).with_name("inducing_peer.py"))
        answer = subprocess.run([peer, "-W", "ignore", script], capture_output=True, text=True, check=True)
        figures["laplace-torch step ms"] = json.loads(answer.stdout.splitlines()[-1])["step ms"]
        figures["ratio"] = figures["laplace-torch step ms"] / figures["step ms"]
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-dir", type=Path, help="folder with flights_nyc13.npz")
    parser.add_argument("--peer", help="the Python of an environment with laplace-torch 0.3 (make peer)")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    figures = machine(arguments.threads)
    figures["peer"] = against_peer(arguments.peer)
    print(figures["peer"], file=sys.stdout, flush=True)
    if arguments.data_dir is not None:
        figures["size"] = by_size(arguments.data_dir)
        for row in figures["size"]:
            print(row)
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
