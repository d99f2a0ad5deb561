"""The cost of a prediction by pushed weights: python -m benchmarks.response

LeNet on random images, pushed once (``HFL(mode="pretrained")``); error bars for 512 images in plain forward passes. The
goal is 2.2: the network's own pass and one with the pushed weights. The pushes are few steps of Adam, since what they
reach does not change the cost of a prediction.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

import torch

import lapwing as lw
from benchmarks import models
from benchmarks.clock import best_of, forward, machine


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    data = models.images(512, (1, 28, 28), 128)
    model = models.briefly_trained(models.lenet(), data, 4)
    x = torch.cat([part for part, _ in data])
    figures = machine(arguments.threads)
    for variant, pushes in (("mean", 1), ("absolute", 1), ("random", 4)):
        method = lw.HFL("pretrained", solver="adam", steps=5, tolerance=math.inf, variant=variant, pushes=pushes)
        posterior = lw.fit(model, data, "classification", method=method, prior=1.0, progress=False)
        plain = forward(model, [(x, x)])
        taken = best_of(10, lambda p=posterior: p.functions(x).variance)  # type: ignore[misc]
        figures[f"{variant}, {pushes}"] = taken / min(plain, forward(model, [(x, x)]))
    print(figures)
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
