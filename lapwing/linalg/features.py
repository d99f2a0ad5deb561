"""Checks of the features and settings of a linear model, whose features are a matrix in memory or an operator."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from lapwing.core.inputs import check_finite, refuse_meta
from lapwing.core.random import normal
from lapwing.core.settings import is_real, require_integer
from lapwing.errors import DataError, NumericalError
from lapwing.linalg.design import Design, MatrixDesign, OperatorDesign

WIDE = (torch.float32, torch.float64)


def feature_design(features: Tensor | OperatorDesign) -> Design:
    """Return the design of features without gradients; a matrix in half precision becomes float32."""
    if isinstance(features, Tensor):
        x = checked_features(features.detach())
        return MatrixDesign(x if x.dtype in WIDE else x.float())
    if not isinstance(features, OperatorDesign):
        raise DataError(f"features are a {type(features).__name__}; expected a tensor or an OperatorDesign.")
    if features.like.dtype not in WIDE:
        raise DataError(
            f"the functions of an OperatorDesign take {features.like.dtype}; expected float32 or float64. Compute in "
            "one of them, and give a like=... of it."
        )
    return replace(features, forward=_detached(features.forward), back=_detached(features.back))


def checked_features(x: Tensor, columns: int | None = None) -> Tensor:
    """Return the features (rows, columns); raise unless they are a finite floating-point matrix of that width."""
    if not isinstance(x, Tensor):
        raise DataError(f"features are a {type(x).__name__}; expected a tensor (rows, {columns or 'columns'}).")
    if x.ndim != 2 or x.numel() == 0 or x.shape[1] != (columns or x.shape[1]):
        raise DataError(f"features have the shape {tuple(x.shape)}; expected (rows, {columns or 'columns'}).")
    if not x.dtype.is_floating_point:
        raise DataError(f"features are {x.dtype}; expected floating-point numbers.")
    check_finite(x.detach(), "features")
    return x


def checked_targets(targets: Tensor, design: Design) -> Tensor:
    """Return the targets (rows,) in float64 on the design's device; raise unless there is one number for each row."""
    if not isinstance(targets, Tensor):
        raise DataError(f"targets are a {type(targets).__name__}; expected a tensor ({design.rows},).")
    if targets.is_complex():
        raise DataError(f"targets are {targets.dtype}; expected real numbers.")
    refuse_meta(targets)
    y = targets.detach().reshape(-1).double().to(design.like.device)
    if len(y) != design.rows or targets.shape[:1] != (design.rows,):
        raise DataError(
            f"{design.rows} rows of features and targets {tuple(targets.shape)}; expected ({design.rows},)."
        )
    if not bool(torch.isfinite(y).all()):
        raise DataError("targets hold NaN or infinity; expected finite numbers.")
    return y


def check_settings(precision: float | None, noise_std: float | None, num_samples: int, tolerance: float) -> None:
    """Raise unless these settings of a linear model are valid."""
    for name, value in (("precision", precision), ("noise_std", noise_std)):
        if value is not None and not (is_real(value) and 0 < value < math.inf):
            raise DataError(f"{name} is {value!r:.80}; expected a positive number, or None to learn it.")
    require_integer("num_samples", num_samples)
    if not (is_real(tolerance) and 0 < tolerance < 1):
        raise DataError(f"tolerance is {tolerance!r:.80}; expected a relative residual between 0 and 1.")


def _detached(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Return the function with results that are checked to be real tensors and require no gradients."""

    def apply(v: Tensor) -> Tensor:
        image = function(v)
        if not isinstance(image, Tensor) or image.is_complex():
            seen = image.dtype if isinstance(image, Tensor) else f"a {type(image).__name__}"
            raise DataError(f"a function of an OperatorDesign gave {seen}; expected a tensor of real numbers.")
        return image.detach()

    return apply


def refuse_unpaired(design: OperatorDesign, tolerance: float = 1e-4) -> None:
    """Raise unless u·Xv = v·Xᵀu for random vectors, and a second call of either product equals the first.

    The second call gets its rows in reverse order, so that a product which mixes them is refused as well.
    """
    like, gen = torch.empty(0, dtype=torch.float64, device=design.like.device), torch.Generator().manual_seed(0)
    (part,) = design
    v, u = normal((2, design.size), gen, like), normal((2, design.rows), gen, like)
    forward = _repeated(part.forward, v, design.rows, "forward", tolerance)
    back = _repeated(part.back, u, design.size, "back", tolerance)
    gap, scale = float(((u * forward).sum(1) - (v * back).sum(1)).norm()), float(forward.norm() + back.norm())
    if gap > tolerance * scale:
        raise NumericalError(
            f"back is not the transpose of forward: u·Xv and v·Xᵀu differ by {gap / scale:.3g} of their size; expected "
            f"{tolerance:g}. Check the two functions of the OperatorDesign."
        )


def _repeated(product: Callable[[Tensor], Tensor], rows: Tensor, width: int, name: str, tolerance: float) -> Tensor:
    """Return the product in float64; raise if its shape is wrong, it is not finite, or a second call differs."""
    try:
        first = product(rows)
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(
            f"{name} of an operator raises {type(error).__name__}: {error}. Expected it to map rows "
            f"{tuple(rows.shape)} to ({len(rows)}, {width}), for any number of rows."
        ) from error
    if not isinstance(first, Tensor):
        raise DataError(
            f"{name} of an operator returned a {type(first).__name__}; expected a tensor ({len(rows)}, {width})."
        )
    if first.shape != (len(rows), width):
        raise DataError(
            f"{name} of an OperatorDesign made {tuple(first.shape)} of rows {tuple(rows.shape)}; expected "
            f"({len(rows)}, {width}): vectors are rows."
        )
    if not bool(torch.isfinite(first).all()):
        raise NumericalError(f"{name} of an OperatorDesign gave NaN or infinity; expected finite numbers.")
    gap, scale = float((first - product(rows.flip(0)).flip(0)).norm()), float(first.norm())
    if gap > tolerance * scale:
        raise NumericalError(
            f"two calls of {name} of an OperatorDesign with the same rows differ by {gap / scale:.3g} of their size; "
            f"expected {tolerance:g}: the same matrix at every call, and rows that do not depend on each other."
        )
    return first.double()
