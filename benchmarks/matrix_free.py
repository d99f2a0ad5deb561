"""Products with the GGN, and samples of the full posterior: python -m benchmarks.matrix_free [--data-dir DIR]

*Products*: the cost of 1, 4 and 16 products with the GGN of 512 inputs in one call, in plain forward passes, on the MLP
and the CNN of the other benchmarks: with the layer factors kept, and streaming. The goal is 16 products for at most 8
single ones on the MLP and 13 on the CNN.

*LeNet*: with a folder of data, a LeNet on 10,000 Fashion-MNIST images: train, sample the full posterior, tune its
precision by sample EM; residuals and times. The goal is ten minutes on two cores.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import lapwing as lw
from benchmarks import models
from benchmarks.clock import best_of, forward, machine
from lapwing.data.batches import Data
from lapwing.networks.network import Network
from lapwing.tangent import NetworkDesign, Operator

COUNTS = (1, 4, 16)


def products(name: str, model: nn.Module, shape: tuple[int, ...]) -> list[dict[str, Any]]:
    """Return the costs of products in forward passes, and the ratio of sixteen products to one."""
    data = models.images(512, shape, 128)
    network = Network.build(model.eval(), data[0][0])
    batches = Data(data, torch.device("cpu"))
    plain = forward(model, data)
    rows = []
    for kind, cache in (("kept", None), ("streamed", 0)):
        operator = Operator.ggn(NetworkDesign.build(network, lw.Categorical(), batches, cache))
        vectors = {k: torch.randn(operator.shape[1], k) for k in COUNTS}
        times = {k: best_of(5, lambda v=v, g=operator: g @ v) for k, v in vectors.items()}  # type: ignore[misc]
        rows.append({"network": name, "factors": kind, **{f"{k} / forward": times[k] / plain for k in COUNTS},
                     "16 / 1": times[16] / times[1]})  # fmt: skip
    return rows


def lenet(folder: Path, count: int, samples: int, seed: int = 0) -> dict[str, Any]:
    """Train a LeNet, sample its posterior, tune it, and return the times and results."""
    from experiments.data import Images
    from lapwing.demo.training import TrainingSettings, batches, optimise

    images = Images.read(folder, "fashion_mnist", torch.device("cpu"), count, seed)
    torch.manual_seed(seed)
    model = models.lenet()
    start = time.perf_counter()
    recipe = TrainingSettings(epochs=10, batch_size=128, learning_rate=2e-3, weight_decay=1e-4, max_steps=10**9)
    optimise(model, *images.train, recipe, seed)
    trained = time.perf_counter()
    data = batches(*images.train, 500)
    probit, tuner = lw.Categorical(link="probit"), lw.tuners.SampleEM(mode="network")
    posterior = lw.fit(model, data, probit, method=lw.Sampled(num_samples=samples), tuner=tuner, progress=False)
    drawn: Any = posterior.posterior
    residual = float(drawn.solution.residuals.max())
    fitted = time.perf_counter()
    x, y = images.test
    return {
        "images": count, "weights": posterior.network.selection.size, "samples": samples, "residual": residual,
        "precision": float(posterior.prior.values), "basis": len(drawn.solver.ridge.basis.rows),
        "training s": trained - start, "fit and tuning s": fitted - trained,
        "NLL plain": nll(model(x).detach().softmax(-1), y), "NLL": nll(probabilities(posterior, x), y),
    }  # fmt: skip


def probabilities(posterior: lw.Fitted, x: Tensor) -> Tensor:
    return torch.cat([posterior.predict(part).probs for part in x.split(500)])


def nll(probs: Tensor, y: Tensor) -> float:
    return float(-probs.gather(1, y[:, None]).clamp_min(1e-30).log().mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-dir", type=Path, help="folder with fashion_mnist.npz, for the LeNet part")
    parser.add_argument("--images", type=int, default=10_000)
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    figures = machine(arguments.threads)
    figures["products"] = [
        *products("MLP 784-256-256-10", models.mlp(), (784,)),
        *products("LeNet", models.lenet(), (1, 28, 28)),
    ]
    for row in figures["products"]:
        print({key: round(value, 2) if isinstance(value, float) else value for key, value in row.items()})
    if arguments.data_dir is not None:
        figures["lenet"] = lenet(arguments.data_dir, arguments.images, arguments.samples)
        print({key: float(f"{value:.4g}") for key, value in figures["lenet"].items()})
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
