"""The step of VaLLA in laplace-torch 0.3: python benchmarks/inducing_peer.py, in an environment that has it."""

from __future__ import annotations

import json
import time

import torch
from laplace.baselaplace import VaLLA
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

STEPS = 3


def main() -> None:
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2_000, 90, generator=generator).double()
    y = x[:, :1].sin() + 0.1 * torch.randn(2_000, 1, generator=generator).double()
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(90, 200), nn.Tanh(), nn.Linear(200, 200), nn.Tanh(), nn.Linear(200, 1)
    ).double()  # fmt: skip
    loader = DataLoader(TensorDataset(x, y), batch_size=100)
    times = []
    for steps in (1, STEPS + 1):
        posterior = VaLLA(model, "regression", x[:100].clone(), num_inducing=100)
        start = time.perf_counter()
        posterior.fit(loader, iterations=steps)
        times.append(time.perf_counter() - start)
    print(json.dumps({"step ms": 1e3 * (times[1] - times[0]) / STEPS}))


if __name__ == "__main__":
    main()
