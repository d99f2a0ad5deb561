"""How large a network may be for a finished push: training to the minimum, and one push, by the number of weights."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import Self

import lapwing as lw
from experiments.data import Images
from experiments.engine.contract import Record
from experiments.minimum import minimised
from experiments.options import Progress
from experiments.pushed import PushedImages, small_network
from lapwing.errors import NumericalError

CPU = torch.device("cpu")


@dataclass(frozen=True)
class PushSizes:
    """Settings: channels of the two convolutions of the network of ``pushed``, and its images of Fashion-MNIST."""

    data_dir: Path = Path()
    channels: tuple[str, ...] = ("6x10", "12x20", "16x28")
    data: int = 500
    precision: float = 1.0
    seed: int = 0

    name: ClassVar[str] = "push_sizes"
    title: ClassVar[str] = "how large a network may be for a finished push of HFL: seconds by number of weights"
    choosing: ClassVar[tuple[str, ...]] = ("channels",)

    @classmethod
    def quick(cls) -> Self:
        """Return the quick form: few weights and images."""
        return cls(channels=("2x3", "3x4"), data=60)

    @classmethod
    def full(cls) -> Self:
        """Return the full form: 1,020, 3,110 and 5,350 weights."""
        return cls()

    def units(self) -> tuple[str, ...]:
        """Return one unit for each size."""
        return self.channels

    def measure(self, unit: str, progress: Progress) -> Iterator[Record]:
        """Train to the minimum without a Hessian, then push; seconds are those of the processor."""
        first, second = (int(part) for part in unit.split("x"))
        settings = PushedImages(self.data_dir, data=self.data, channels=(first, second), precision=self.precision)
        x, y = Images.read(self.data_dir, "fashion_mnist", CPU, self.data, self.seed).train
        x = x.double()
        cost = lambda f: F.cross_entropy(f, y, reduction="sum")
        start = time.process_time()
        model = minimised(small_network(settings, self.seed), x, cost, self.precision, newton=False)
        seconds, slope = time.process_time() - start, _slope(model, x, cost, self.precision)
        size = float(sum(p.numel() for p in model.parameters()))
        progress(f"{unit}: {size:.0f} weights, slope {slope:.1e} after {seconds:.0f} s")
        yield Record(unit, "training", self.seed, {"weights": size, "slope": slope}, seconds)
        start = time.process_time()
        try:
            lw.fit(
                model, [(x, y)], lw.Categorical(), method=lw.HFL("pretrained", variant="absolute", solver="newton"),
                prior=self.precision, progress=False,
            )  # fmt: skip
            finished = 1.0
        except NumericalError as error:
            progress(f"{unit}: {error}")
            finished = 0.0
        scores = {"weights": size, "finished": finished}
        yield Record(unit, "absolute push", self.seed, scores, time.process_time() - start)


def _slope(model: nn.Module, x: Tensor, cost: Any, precision: float) -> float:
    """Return the norm of the gradient of the regularised loss."""
    weights = list(model.parameters())
    value = cost(model(x)) + 0.5 * precision * sum(p.square().sum() for p in weights)
    return float(torch.cat([g.flatten() for g in torch.autograd.grad(value, weights)]).norm())
