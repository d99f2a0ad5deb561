"""Pictures of predictions over their inputs: a band over one input, a map over two."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lapwing.core.settings import POSITIVE, PROBABILITY, require_integer
from lapwing.errors import DataError, UnsupportedError
from lapwing.metrics.arrays import numbers
from lapwing.plots.canvas import COLOURS, INK, MARKERS, POSTERIOR, add_legend, new_axis
from lapwing.plots.observed import normal_half_width


def band(
    prediction: Any,
    x: Any,
    *,
    level: float = 0.95,
    data: tuple[Any, Any] | None = None,
    output: int = 0,
    ax: Any = None,
) -> Any:
    """Draw the mean and the intervals of a prediction over one input.

    The wide band is the interval of the target. The dark band inside is that of the function alone, which more data
    would make narrower.

    Args:
        prediction: A prediction of numbers, ``posterior.predict(x)``, or a belief, ``posterior.functions(x)``.
        x: The inputs of the prediction, (B,) or (B, 1), in any order.
        level: The probability of the intervals.
        data: Inputs and targets that were observed, to be drawn as points.
        output: Which output to draw.
        ax: A Matplotlib axis to draw on; a new one if None.

    Returns:
        The axis, with limits that contain the bands and the points.

    Raises:
        DataError: There is more than one input variable, or the shapes do not fit.
        UnsupportedError: It is a prediction of labels.

    >>> import torch, lapwing as lw
    >>> x = torch.linspace(-1, 1, 40).unsqueeze(1)
    >>> posterior = lw.fit(torch.nn.Linear(1, 1), [(x, x.sin())], "regression", prior=1.0)
    >>> ax = band(posterior.predict(2 * x), 2 * x, data=(x, x.sin()))
    >>> [round(float(end), 2) for end in ax.get_xlim()]
    [-2.0, 2.0]
    """
    PROBABILITY.check("level", level)
    require_integer("output", output, least=0)
    if not _has_spread(prediction):
        raise UnsupportedError(
            f"the prediction is a {type(prediction).__name__}; expected one of numbers, or posterior.functions(x). For "
            "probabilities use lw.plots.confidence_map or lw.plots.reliability."
        )
    mean, inputs = prediction.mean.detach(), column("x", x)
    if mean.ndim != 2 or len(mean) != len(inputs) or output >= mean.shape[1]:
        raise DataError(
            f"the prediction has the shape {tuple(mean.shape)}, x has {len(inputs)} rows and output is {output}; "
            "expected (B, C) for B inputs, and an output below C."
        )
    order, percent = inputs.argsort(), f"{100 * level:g} %"
    chosen = lambda values: values.detach().double().cpu()[:, output][order]
    centre, z = chosen(prediction.mean), normal_half_width(level)
    ax, places, reach = new_axis(ax), inputs[order].tolist(), [centre]
    spread = z * chosen(prediction.std)
    if hasattr(prediction, "interval"):
        low, high = map(chosen, prediction.interval(level))
        shade(ax, places, low.tolist(), high.tolist(), label=f"{percent} of targets")
        spread = z * chosen(prediction.epistemic_variance).clamp_min(0).sqrt()
        reach += [low, high]
    low, high = centre - spread, centre + spread
    reach += [low, high]
    shade(ax, places, low.tolist(), high.tolist(), alpha=0.5, label=f"{percent} for the function")
    ax.plot(places, centre.tolist(), color=POSTERIOR, linewidth=1.6, label="mean")
    ax.set(xlabel="x", ylabel="y", xlim=(places[0], places[-1]))
    points = () if data is None else (column("x of the data", data[0]), _targets(data[1], output))
    fit_frame(ax, torch.cat(reach), *points)
    add_legend(ax, loc="lower left", bbox_to_anchor=(0, 1), ncols=2, borderaxespad=0.2)
    return ax


def shade(ax: Any, x: list[float], low: list[float], high: list[float], alpha: float = 0.3, **settings: Any) -> None:
    """Fill the area between two curves; by default in the colour of a posterior."""
    ax.fill_between(x, low, high, **{"color": POSTERIOR, "alpha": alpha, "linewidth": 0, **settings})


def fit_frame(ax: Any, values: Tensor, x: Tensor | None = None, y: Tensor | None = None) -> None:
    """Draw observed points (x, y), if any, and set limits that contain these and the values."""
    low, high = ax.get_xlim()
    if x is not None and y is not None:
        ax.scatter(x.tolist(), y.tolist(), s=8, color=INK, zorder=3, label="data", linewidth=0)
        values = torch.cat([values, y.to(values)])
        low, high = min(low, float(x.min())), max(high, float(x.max()))
    margin = 0.04 * float(values.max() - values.min()) or 1.0
    ax.set(xlim=(low, high), ylim=(float(values.min()) - margin, float(values.max()) + margin))


def column(name: str, x: Any) -> Tensor:
    """Return one number for each input, (B,), in float64; raise if there are several."""
    x = numbers(name, x).double().cpu()
    if x.ndim not in (1, 2) or (x.ndim == 2 and x.shape[1] != 1) or not len(x):
        raise DataError(f"{name} has the shape {tuple(x.shape)}; expected one number for each input, (B,) or (B, 1).")
    return x.reshape(-1)


def _targets(y: Any, output: int) -> Tensor:
    """Return the targets (B,) of one output."""
    y = numbers("y of the data", y).double().cpu()
    return y.reshape(len(y), -1)[:, output]


def grid(x: Any, points: int = 60, margin: float = 0.3) -> Tensor:
    """Return inputs on a regular grid around some inputs, for ``band`` and ``confidence_map``.

    Args:
        x: Inputs with one or two variables, (B, 1) or (B, 2).
        points: The number of points along each variable.
        margin: How far the grid goes beyond the inputs on each side, as a share of their range.

    Returns:
        The grid, (points, 1) or (points², 2), in the dtype of x.

    Raises:
        DataError: There are more than two variables.

    >>> import torch
    >>> grid(torch.rand(10, 2), points=5).shape
    torch.Size([25, 2])
    """
    require_integer("points", points, least=2)
    POSITIVE.check("margin", margin)
    x = numbers("x", x)
    if x.ndim != 2 or x.shape[1] not in (1, 2) or not len(x):
        raise DataError(f"x has the shape {tuple(x.shape)}; expected (B, 1) or (B, 2). Make the inputs by hand.")
    ends = torch.stack(x.double().aminmax(dim=0))
    reach = margin * (ends[1] - ends[0])
    lines = [torch.linspace(a, b, points) for a, b in zip((ends[0] - reach).tolist(), (ends[1] + reach).tolist())]
    made: Tensor = torch.cartesian_prod(*lines).reshape(-1, x.shape[1])
    return made.to(x)


def confidence_map(prediction: Any, x: Any, *, data: tuple[Any, Any] | None = None, ax: Any = None) -> Any:
    """Draw, over two inputs, the confidence of a classifier, or the standard deviation of predicted numbers.

    Args:
        prediction: A prediction of labels or of numbers, at these inputs.
        x: The inputs, (B, 2): ``lw.plots.grid(x)``, or any points.
        data: Inputs (B, 2) and labels or numbers that were observed, to be drawn as points.
        ax: A Matplotlib axis to draw on; a new one if None.

    Returns:
        The axis.

    Raises:
        DataError: There are not two input variables, or the shapes do not fit.

    >>> import torch, lapwing as lw
    >>> x = torch.randn(40, 2)
    >>> posterior = lw.fit(torch.nn.Linear(2, 2), [(x, (x[:, 0] > 0).long())], "classification", prior=1.0)
    >>> points = grid(x, points=9)
    >>> confidence_map(posterior.predict(points), points).get_xlabel()
    'x₁'
    """
    x = numbers("x", x).double().cpu()
    values, words, ends = _heights(prediction)
    if x.ndim != 2 or x.shape[1] != 2 or len(x) != len(values) or len(x) < 3:
        raise DataError(
            f"x has the shape {tuple(x.shape)} and the prediction {len(values)} rows; expected (B, 2) for both, with "
            "at least three points. lw.plots.grid(x) makes them."
        )
    ax = new_axis(ax)
    low, high = ends if ends is not None else (float(values.min()), float(values.max()) + 1e-12)
    levels = [low + (high - low) * i / 12 for i in range(13)]
    inside = values.clamp(low, high).tolist()
    drawn = ax.tricontourf(x[:, 0].tolist(), x[:, 1].tolist(), inside, levels=levels, cmap="cividis")
    ax.figure.colorbar(drawn, ax=ax, label=words, ticks=levels[::3], format="%.2g")
    if data is not None:
        _points(ax, *data)
    limits = torch.stack(x.aminmax(dim=0)).T.tolist()
    ax.set(xlabel="x₁", ylabel="x₂", xlim=limits[0], ylim=limits[1])
    return ax


def _has_spread(prediction: Any) -> bool:
    """Return whether a prediction has standard deviations; a tensor has a function of that name."""
    return isinstance(getattr(prediction, "std", None), Tensor)


def _heights(prediction: Any) -> tuple[Tensor, str, tuple[float, float] | None]:
    """Return what a map shows at every input, (B,), its name, and its range if it has one."""
    if _has_spread(prediction):
        return prediction.std.detach().double().cpu().flatten(1).mean(1), "standard deviation", None
    probs = numbers("probs", getattr(prediction, "probs", prediction)).double().cpu()
    if probs.ndim != 2:
        raise DataError(f"probs has the shape {tuple(probs.shape)}; expected (B, C).")
    if probs.shape[1] == 1:
        return torch.maximum(probs, 1 - probs).squeeze(1), "confidence", (0.5, 1.0)
    return probs.amax(1), "confidence", (1 / probs.shape[1], 1.0)


def _points(ax: Any, x: Any, y: Any) -> None:
    """Draw observed inputs, with a marker and a colour for each class; of one kind if there are many values."""
    x, y = numbers("x of the data", x).cpu(), numbers("y of the data", y).cpu().flatten()
    kinds = y.unique().tolist()
    many = len(kinds) > len(MARKERS)
    for i, kind in enumerate(kinds[:1] if many else kinds):
        rows = x if many else x[y == kind]
        colour = INK if many else COLOURS[i]
        ax.scatter(*rows.T.tolist(), s=14, color=colour, marker=MARKERS[i], edgecolor="white", linewidth=0.5)
