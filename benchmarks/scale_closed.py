"""Fits with many outputs on one core: the last layer in closed form, token-level models, and labels that are drawn.

    python -m benchmarks.scale_closed [--full] [--parts heads tokens exact draws] [--out FILE]

Networks have random weights except in the last part. Fits are of the curvature alone, with a given prior.

- heads: the last softmax layer with 1,000 classes and 64 features. The same pass in closed form and by a backward pass
  from every column of the root; the latter over 32 rows, with its time multiplied, or over all 512 with ``--full``.
- tokens: a transformer with a vocabulary of 1,000 and 8,000, 8 sequences of 32 tokens, all weights, by default.
- exact: the exact curvature of networks whose seeds do not fit the byte budget at once, for a single sample.
- draws: the error of estimates against the exact curvature, for a trained network with 200 classes, at the same prior.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lapwing as lw
from benchmarks.clock import Peak, best_of, machine
from lapwing.curvature.base import Seeds, Sweep
from lapwing.curvature.blocks import FACTOR_LIMIT, DiagonalSum
from lapwing.curvature.kronecker import blockwise_sum, kronecker_curvature
from lapwing.data.batches import Data
from lapwing.networks.network import Network

CLASSES, ROWS, FEATURES = 1000, 512, 64
FEW = 32  # rows for the pass by seeds, without --full
DRAWS = (1, 2, 4, 8, 16)
REPEATS = 4  # of every estimate, with other labels


class Tokens(nn.Module):
    """A transformer with logits of every next token."""

    def __init__(self, vocabulary: int, width: int = 64) -> None:
        super().__init__()
        self.table = nn.Embedding(vocabulary, width)
        self.layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        logits: Tensor = self.head(self.layer(self.table(tokens), src_mask=mask, is_causal=True))
        return logits


def heads(full: bool) -> Iterator[str]:
    """Yield the rows of the last layer: both passes, in seconds and as a ratio."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, FEATURES), nn.Tanh(), nn.Linear(FEATURES, CLASSES)).eval()
    x, y = torch.randn(ROWS, 20), torch.randint(0, CLASSES, (ROWS,))
    network = Network.build(model, x, lw.last_layer)

    def computed(method: str, rows: int, closed: bool) -> Any:
        batches = list(zip(x[:rows].split(128), y[:rows].split(128), strict=True))
        data = Data(batches, torch.device("cpu"), progress=False)
        sweep = Sweep(network, lw.Categorical(), data, Seeds("ggn"), closed=closed)
        if method == "Kron":
            return kronecker_curvature(sweep, network, "expand", 1024, FACTOR_LIMIT)
        return blockwise_sum(sweep, network, [DiagonalSum(block, network) for block in network.layout])

    batches = list(zip(x.split(128), y.split(128), strict=True))
    for method, setting in (("Kron", lw.Kron("ggn")), ("Diagonal", lw.Diagonal("ggn"))):
        closed = best_of(3, partial(computed, method, ROWS, True))
        rows = ROWS if full else FEW
        seeds = best_of(1, partial(computed, method, rows, False)) * ROWS / rows
        options: dict[str, Any] = {"method": setting, "weights": "last_layer", "prior": 1.0, "progress": False}
        whole = best_of(3, partial(lw.fit, model, batches, "classification", **options))
        said = "" if full else f" (from {rows} rows)"
        yield (
            f"last layer, {CLASSES:,} classes, {ROWS} rows, {method}: closed form {closed:.3f} s, "
            f"by seeds {seeds:.1f} s{said}, ratio {seeds / closed:.0f}; the whole fit {whole:.2f} s (reach 1 s)"
        )


def tokens(full: bool) -> Iterator[str]:
    """Yield the rows of token-level models by default."""
    for vocabulary in (1000, 8000):
        torch.manual_seed(0)
        model, x = Tokens(vocabulary).eval(), torch.randint(0, vocabulary, (8, 33))
        for method in (lw.Kron(), lw.Diagonal()):
            data = [(x[:, :-1], x[:, 1:])]
            fit = partial(lw.fit, model, data, lw.Categorical(class_dim=-1), method=method, prior=1.0, progress=False)
            seconds, megabytes, posterior = measured(fit)
            yield (
                f"tokens, vocabulary {vocabulary:,}, T = 32, batch 8, {type(method).__name__}: fit {seconds:.2f} s, "
                f"{megabytes:.0f} MB, of which {stored(posterior):.0f} MB are the factors; {posterior.findings[0]}"
            )


def exact(full: bool) -> Iterator[str]:
    """Yield the rows of exact fits to one sample, whose seeds are taken in runs."""
    torch.manual_seed(0)
    vocabulary, length = (1000, 32) if full else (250, 32)
    images = nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 1000),
    ).eval()  # fmt: skip
    words = torch.randint(0, vocabulary, (1, length + 1))
    cases: dict[str, tuple[nn.Module, Any]] = {
        "convolutions, 64 x 64 pixels, 1,000 classes": (images, (torch.randn(1, 3, 64, 64), torch.zeros(1).long())),
        f"tokens, vocabulary {vocabulary:,}, T = {length}": (Tokens(vocabulary).eval(), (words[:, :-1], words[:, 1:])),
    }
    for name, (model, batch) in cases.items():
        network = Network.build(model, batch[0])
        at_once = 8 * network.footprint.width * torch.Size(network.output_shape).numel() / 2**20
        for method in (lw.Kron("ggn"), lw.Diagonal("ggn")) if full else (lw.Kron("ggn"),):
            fit = partial(
                lw.fit, model, [batch], lw.Categorical(class_dim=-1), method=method, prior=1.0, progress=False
            )
            seconds, megabytes, _ = measured(fit)
            yield (
                f"exact, {name}, {type(method).__name__}: {seconds:.1f} s for a sample, {megabytes:.0f} MB; "
                f"all seeds at once would take {at_once:,.0f} MB"
            )


def measured(call: Callable[[], Any]) -> tuple[float, float, Any]:
    """Return the seconds, the peak in MB and the result of a call."""
    results: list[Any] = []
    with Peak() as peak:
        seconds = best_of(1, lambda: results.append(call()))
    return seconds, peak.mb, results[0]


def stored(posterior: Any) -> float:
    """Return the MB of a curvature."""
    parts = [part for block in posterior.posterior.curvature.blocks for part in vars(block).values()]
    return sum(part.nbytes for part in parts if isinstance(part, Tensor)) / 2**20


def trained(rows: int, classes: int = 200, features: int = 20) -> tuple[nn.Module, Tensor, Tensor, Tensor]:
    """Return a trained network, its data, and inputs for tests: classes are normal clouds that overlap."""
    torch.manual_seed(0)
    centres, y = torch.randn(classes, features), torch.randint(0, classes, (rows + 64,))
    x = centres[y] + 0.7 * torch.randn(rows + 64, features)
    model = nn.Sequential(nn.Linear(features, 48), nn.Tanh(), nn.Linear(48, 48), nn.Tanh(), nn.Linear(48, classes))
    optimiser = torch.optim.Adam(model.parameters(), 3e-3, weight_decay=1e-4)
    for _ in range(30):
        for part in torch.randperm(rows).split(64):
            optimiser.zero_grad()
            F.cross_entropy(model(x[part]), y[part]).backward()
            optimiser.step()
    return model.eval(), x[:rows], y[:rows], x[rows:]


def draws(full: bool) -> Iterator[str]:
    """Yield the error of estimates: variances, probabilities, evidence and learned precision against the exact ones."""
    for rows in (500, 2000, 8000) if full else (500, 2000):
        model, x, y, inputs = trained(rows)
        data = list(zip(x.split(250), y.split(250), strict=True))
        fit = partial(lw.fit, model, data, "classification", tuner=lw.tuners.MaximiseEvidence(), progress=False)
        for make in (lw.Kron, lw.Diagonal, lw.EKron) if full else (lw.Kron, lw.Diagonal):
            start = quiet(partial(fit, method=make("ggn")))
            prior = float(start.prior.values)
            at_prior = partial(lw.fit, model, data, "classification", prior=prior, progress=False)
            reference = at_prior(method=make("ggn"))
            seconds = best_of(2, partial(at_prior, method=make("ggn")))
            variance, probs = reference.functions(inputs).variance, reference.predict(inputs).probs
            yield (
                f"draws, 200 classes, n = {rows}, {make.__name__}: exact fit {seconds:.2f} s, precision {prior:.3g}, "
                f"log evidence {float(reference.log_evidence()):.0f}"
            )
            for count in DRAWS:
                method = make("fisher_mc", draws=count)
                errors, evidence, learned = [], [], []
                for seed in range(REPEATS):
                    estimate = at_prior(method=method, generator=torch.Generator().manual_seed(seed))
                    errors.append(compared(estimate, inputs, variance, probs))
                    evidence.append(float(estimate.log_evidence() - reference.log_evidence()))
                    learned.append(float(quiet(estimate.tuned).prior.values) / prior)
                rms, bias, distance = torch.tensor(errors).mean(0).tolist()
                cost = best_of(2, partial(at_prior, method=method)) / seconds
                stated = estimate.findings[0].partition("about ")[2].partition(" %")[0]
                yield (
                    f"  {count:2d} draws: {cost:.3f} of the time; stated {stated:>4s} %; variances {100 * rms:.1f} % "
                    f"(mean {100 * bias:+.1f} %); probabilities {distance:.4f} in total variation; "
                    f"log evidence {sum(evidence) / len(evidence):+.1f}; precision x {sum(learned) / len(learned):.3f}"
                )


def compared(estimate: Any, inputs: Tensor, variance: Tensor, probs: Tensor) -> tuple[float, float, float]:
    """Return the relative error of variances, its mean, and the total variation between predictives."""
    gap = estimate.functions(inputs).variance / variance - 1
    distance = 0.5 * (estimate.predict(inputs).probs - probs).abs().sum(-1).mean()
    return float(gap.square().mean().sqrt()), float(gap.mean()), float(distance)


def quiet(call: Callable[[], Any]) -> Any:
    """Return the result of a call; what the evidence does to predictions is not the question here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", lw.errors.CalibrationWarning)
        return call()


PARTS = {"heads": heads, "tokens": tokens, "exact": exact, "draws": draws}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--full", action="store_true", help="all rows by seeds, 1,000 words in the exact fit, 8,000 data, more methods"
    )
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=list(PARTS))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    lines = [str(machine(1))]
    print(lines[0], flush=True)
    for name in options.parts:
        for line in PARTS[name](options.full):
            lines.append(line)
            print(line, flush=True)
    if options.out:
        options.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
