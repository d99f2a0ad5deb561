"""The cost of fits and variances, as ratios to plain passes over the same data in the same process.

    python -m benchmarks.spine [--peer PYTHON] [--out out/spine.json] [--only NAME ...]
    python -m benchmarks.spine --against FOLDER [--rounds 10] [--only NAME ...]

One process for each case, one thread, batches of 128 already in memory. The baseline is ``autograd.grad`` of the mean
loss in all weights (an epoch) and a plain forward pass without a graph, best of three each. ``--peer`` names a python
that has laplace-torch 0.3; it runs the same networks on the same data in processes of their own, directly after ours.
Peak memory is the process's resident peak above what it held before the measured call.

``--against`` compares with the checkout of another version in FOLDER: each case runs there and here in turn, and
printed are the medians, the median ratio of the pairs, and the least and largest ratio.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

CASES: dict[str, dict[str, float]] = {
    # name: (what, reach) -- the reach of each figure, as a ratio unless a unit is given
    "mlp_kron": {"fit / epoch": 4.5, "variance / forward": 25},
    "mlp_diagonal": {"fit / epoch": 2.5, "variance / forward": 15},
    "lenet_kron": {"fit / epoch": 4, "variance / forward": 40},
    "lenet_diagonal": {"fit / epoch": 5, "variance / forward": 40},
    "mlp_last_kron": {"fit / forward": 2, "variance / forward": 2},
    "mlp_last_full": {"fit / forward": 30, "variance / forward": 60},
    "mlp_tuning": {"tuning / epoch": 0.3},
    "wide_head": {"variance MB": 1024, "covariance MB beyond the answer": 1024},
    "resnet18_kron": {"fit MB": 6144, "variance MB": 6144},
    "resnet18_diagonal": {"fit MB": 6144, "variance MB": 6144},
}
TITLES = {
    "mlp_kron": "MLP 784-256-256-10, n = 10,000, Kron",
    "mlp_diagonal": "MLP 784-256-256-10, n = 10,000, Diagonal",
    "lenet_kron": "LeNet, n = 5,000, Kron",
    "lenet_diagonal": "LeNet, n = 5,000, Diagonal",
    "mlp_last_kron": "MLP, last layer, Kron",
    "mlp_last_full": "MLP, last layer, Full",
    "mlp_tuning": "MLP, Kron, prior by the evidence to a slope of 5e-7 P",
    "wide_head": "256 features to 1000 classes, last layer, Kron",
    "resnet18_kron": "ResNet-18, 11.2 M weights, batch 32, Kron",
    "resnet18_diagonal": "ResNet-18, 11.2 M weights, batch 32, Diagonal",
}
LINE = "{:54s} {:31s} {:>9s} {:>7s} {:>22s}"  # of the table that benchmarks/results/spine.txt keeps


def run_child(
    python: str, arguments: list[str], environment: dict[str, str], folder: Path = Path()
) -> dict[str, Any] | None:
    """Run one measurement in a separate process; return None if it failed."""
    environment = {**environment, "PYTHONPATH": str(folder.resolve())}
    done = subprocess.run(
        [python, *arguments], capture_output=True, text=True, env=environment, check=False, cwd=folder
    )
    for line in reversed(done.stdout.splitlines()):
        if line.startswith("{"):
            figures: dict[str, Any] = json.loads(line)
            return figures
    sys.stderr.write(done.stderr[-2000:])
    return None


def compare(names: list[str], folder: Path, rounds: int, environment: dict[str, str]) -> None:
    """Print the figures of another version and of this one, which run in turn."""
    print(f"{'':54s} {'':31s} {'before':>9s} {'now':>9s} {'ratio':>6s} {'least':>6s} {'most':>6s}")
    for name in names:
        figures: list[list[dict[str, float]]] = [[], []]
        for _ in range(rounds):
            for place, version in zip((folder, Path()), figures, strict=True):
                done = run_child(sys.executable, ["-m", "benchmarks.spine_case", name], environment, place)
                version.append(done["figures"] if done else {})
        title = TITLES[name]
        for figure in CASES[name]:
            pairs = [
                (one[figure], two[figure]) for one, two in zip(*figures, strict=True) if figure in one and figure in two
            ]
            if pairs:
                ratios = [two / one for one, two in pairs if one]
                before, now = (_number(statistics.median(values)) for values in zip(*pairs, strict=True))
                cells = f"{statistics.median(ratios):6.3f} {min(ratios):6.3f} {max(ratios):6.3f}" if ratios else "-"
                print(f"{title:54s} {figure:31s} {before:>9s} {now:>9s} {cells}", flush=True)
            title = ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--peer", help="a python with laplace-torch 0.3")
    parser.add_argument("--out", type=Path, default=Path("out/spine.json"))
    parser.add_argument("--only", nargs="*", default=list(CASES))
    parser.add_argument("--against", type=Path, help="a checkout of another version")
    parser.add_argument("--rounds", type=int, default=10)
    options = parser.parse_args()
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    if options.against:
        compare(options.only, options.against, options.rounds, environment)
        return 0
    peer = options.peer if options.peer and Path(options.peer).exists() else None
    if peer is None:
        print("laplace-torch is not compared: no python with it was given (make peer, then make bench)")
    results: dict[str, dict[str, Any]] = {}
    print(f"$ python -m benchmarks.spine{' --peer PYTHON' if peer else ''}\n")
    print(LINE.format("", "", "Lapwing", "reach", "laplace-torch 0.3"))
    notes = []
    for name in options.only:
        ours = run_child(sys.executable, ["-m", "benchmarks.spine_case", name], environment)
        script = str(Path(__file__).with_name("spine_peer.py"))
        theirs = run_child(peer, [script, name], environment) if peer else None
        results[name] = {"lapwing": ours, "laplace-torch": theirs, "reach": CASES[name]}
        title, note = TITLES[name], (theirs or {}).get("note", "")
        for figure, reach in CASES[name].items():
            got = ours["figures"].get(figure) if ours else None
            other = theirs["figures"].get(figure) if theirs else None
            cannot = note if theirs and not theirs["figures"] else "-"
            cells = (_number(got), f"{reach:g}", cannot if other is None else _number(other))
            print(LINE.format(title, figure, *cells).rstrip(), flush=True)
            title = ""
        if theirs and theirs["figures"]:
            notes.append(f"{TITLES[name]}: {note}")
    if notes:
        print("\nlaplace-torch 0.3, the fastest backend of each figure, and all of them as fit and variance:")
        print(*(f"  {note}" for note in notes), sep="\n")
    machine = {"cpu": cpu_name(), "python": platform.python_version(), "system": platform.system()}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps({"machine": machine, "results": results}, indent=1))
    versions: dict[str, Any] = next((r["lapwing"]["versions"] for r in results.values() if r["lapwing"]), {})
    print(f"\n{machine['cpu']}, one thread, python {machine['python']}, {versions}; written to {options.out}")
    return 0


def _number(value: object) -> str:
    if value is None or isinstance(value, str):
        return value or "-"
    assert isinstance(value, (int, float))
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def cpu_name() -> str:
    """Return the processor's name, if the system knows it."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


if __name__ == "__main__":
    raise SystemExit(main())
