"""The inputs about which a posterior is most uncertain, as rows of a table."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lapwing.decisions.collecting import batches_of, labelled, source_of
from lapwing.report.verdict import percent

SHOWN = 8  # inputs in the table
LOOKED = 2000  # inputs that are looked at
VALUES = 4  # numbers of an input, and of a prediction, that are shown
PIXELS = 64  # height and width of an image at most


@dataclass(frozen=True)
class UncertainInput:
    """One input: what it is, what was predicted, what came true."""

    number: int  # in the order of the data
    shown: str  # its first numbers; empty if it is an image, or no tensor
    image: str  # a PNG as a data URI; empty if it is no image
    prediction: str
    uncertainty: float
    target: str


@dataclass(frozen=True, eq=False)
class Looked:
    """The most uncertain of the first inputs."""

    rows: tuple[UncertainInput, ...]
    count: int  # inputs that were looked at
    measure: str  # what uncertainty is, in words
    column: str  # the same in one word
    line: tuple[Tensor, Tensor] | None  # inputs and targets, if inputs are one number each


def look(posterior: Any, data: Iterable[Any], target_key: str | None, progress: bool | None) -> Looked:
    """Return the most uncertain of the first 2,000 inputs. Cost: their predictions."""
    rows: list[UncertainInput] = []
    line: list[tuple[Tensor, Tensor]] = []
    count, measure, column = 0, "", ""
    with torch.no_grad():
        source = source_of(posterior.network, data, "data", target_key, progress)
        for batch in batches_of(posterior.network, source):
            each = labelled(posterior, batch, "data")
            predictive = posterior.posterior.predict(each.inputs)
            measure, column, uncertainty = _uncertainty(predictive)
            if _is_number(each.inputs):
                line.append((each.inputs.cpu(), each.targets.cpu()))
            first = uncertainty.argsort(descending=True, stable=True)[:SHOWN].tolist()
            rows += [_row(each, predictive, i, count + i, float(uncertainty[i])) for i in first]
            rows = sorted(rows, key=lambda row: -row.uncertainty)[:SHOWN]
            count += len(uncertainty)
            if count >= LOOKED:
                break
    joined = (torch.cat([x for x, _ in line]), torch.cat([y for _, y in line])) if line else None
    return Looked(tuple(rows), count, measure, column, joined)


def _is_number(inputs: Any) -> bool:
    return isinstance(inputs, Tensor) and inputs.is_floating_point() and inputs.shape[1:].numel() == 1


def _uncertainty(predictive: Any) -> tuple[str, str, Tensor]:
    """Return what uncertainty is, in words and in one word, and that of each input (B,): a mean over its outputs."""
    if hasattr(predictive, "probs"):
        each = predictive.entropy.double().cpu().reshape(len(predictive.probs), -1).mean(1)
        return "entropy in nats", "entropy", each
    return "standard deviation", "std", predictive.std.double().cpu().flatten(1).mean(1)


def _row(batch: Any, predictive: Any, row: int, number: int, uncertainty: float) -> UncertainInput:
    x = batch.inputs[row].detach().cpu() if isinstance(batch.inputs, Tensor) else None
    image = _image(x) if x is not None and x.ndim == 3 else ""
    shown = "" if x is None or image else _listed(x.flatten())
    target = batch.targets[row].detach().cpu().flatten()
    return UncertainInput(number, shown, image, _predicted(predictive, row), uncertainty, _listed(target))


def _listed(values: Tensor) -> str:
    """Return the first numbers as text, and how many there are if there are more."""
    more = f", … ({len(values):,})" if len(values) > VALUES else ""
    return ", ".join(f"{value:.3g}" for value in values[:VALUES].tolist()).replace("-", "−") + more


def _predicted(predictive: Any, row: int) -> str:
    """Return a prediction in a few words; nothing for tokens and pixels."""
    mean = predictive.mean[row].detach().cpu()
    if mean.ndim != 1:
        return ""
    if predictive.scoring.task == "numbers":
        pairs = zip(mean[:VALUES].tolist(), predictive.std[row][:VALUES].tolist())
        text = ", ".join(f"{value:.3g} ± {std:.2g}".replace("-", "−") for value, std in pairs)
        return text + (", …" if len(mean) > VALUES else "")
    if predictive.scoring.task == "classes":
        top = mean.topk(min(2, len(mean)))
        each = zip(top.indices.tolist(), top.values.tolist())
        return ", ".join(f"{label}\N{NO-BREAK SPACE}({percent(share)})" for label, share in each)
    return ", ".join(percent(share) for share in mean[:VALUES].tolist()) + (", …" if len(mean) > VALUES else "")


def _image(x: Tensor) -> str:
    """Return an image (C, H, W) of one or three colours as a data URI, small and with its full range of values.

    Of anything else, return an empty text.
    """
    if x.shape[0] not in (1, 3) or min(x.shape[1:]) < 4 or not x.is_floating_point():
        return ""
    from matplotlib.image import imsave

    scale = min(1.0, PIXELS / max(x.shape[1:]))
    size = [max(1, round(scale * side)) for side in x.shape[1:]]
    small = torch.nn.functional.interpolate(x[None].double(), size=size, mode="area")[0]
    low, high = small.aminmax()
    levels = ((small - low) / (high - low).clamp_min(1e-12)).expand(3, -1, -1).movedim(0, -1)
    colours, written = (255 * levels).round().to(torch.uint8).contiguous().numpy(), io.BytesIO()
    imsave(written, colours, format="png")
    return "data:image/png;base64," + base64.b64encode(written.getvalue()).decode()
