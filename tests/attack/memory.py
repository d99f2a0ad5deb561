"""Many fits and predictions: the memory of the process must not grow."""

from __future__ import annotations

import argparse
import gc
import sys
from pathlib import Path

import torch

import lapwing as lw
from tests.attack.threads import plain_batch
from tests.conformance.declared import SMALL, net, small_method

CHEAP = ("full", "diagonal", "kron", "ekron", "low_rank", "map_only", "ella", "ensemble", "dropout", "swag")
ALLOWED = 16.0  # MiB of growth that allocators may explain; a leaked fit of the networks here is some 100 KiB


def resident() -> float:
    """Return the memory of this process in MiB."""
    gc.collect()
    text = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(next(line for line in text.splitlines() if line.startswith("VmRSS")).split()[1]) / 1024


def objects() -> int:
    """Return how many tensors and modules Python knows."""
    gc.collect()
    return sum(issubclass(type(each), torch.Tensor | torch.nn.Module) for each in gc.get_objects())


def grown(fits: int, predictions: int) -> tuple[float, int]:
    """Return by how much memory in MiB and the number of objects grow over fits and predictions, after a start."""
    y = torch.randint(0, 3, (10,), generator=torch.Generator().manual_seed(3))
    names = [name for name in SMALL if name in CHEAP]
    models = {name: net() for name in names}
    per_fit = max(1, predictions // fits)

    def run(count: int) -> None:
        for number in range(count):
            model = models[name := names[number % len(names)]]
            method = small_method(name, model)
            posterior = lw.fit(model, [(plain_batch(10), y)], "classification", method=method, prior=1e3)
            for size in range(per_fit):
                posterior.predict(plain_batch(1 + size % 4))

    run(max(len(names), fits // 5))
    memory, count = resident(), objects()
    run(fits)
    return resident() - memory, objects() - count


def main(argv: list[str]) -> int:
    """Run the attack; return 1 if memory grows."""
    parser = argparse.ArgumentParser(prog="python -m tests.attack memory", description=__doc__)
    parser.add_argument("--count", type=int, default=500, help="number of fits; twenty times as many predictions")
    parser.add_argument("--seed", type=int, default=0, help="not used")
    options = parser.parse_args(argv)
    memory, count = grown(options.count, 20 * options.count)
    print(f"{options.count} fits, {20 * options.count} predictions: {memory:+.1f} MiB, {count:+d} tensors and modules")
    return int(memory > ALLOWED or count > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
