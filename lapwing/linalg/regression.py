"""The shapes of a linear model: one target for each datum or several, with features that they share or not."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from lapwing.errors import DataError
from lapwing.linalg.design import Design, MatrixDesign, OperatorDesign
from lapwing.linalg.features import checked_features, checked_targets, feature_design, refuse_unpaired
from lapwing.linalg.whitened import SharedDesign, WhitenedDesign, noise_root, prior_root

Layout = Literal["scalar", "shared", "stacked"]


@dataclass(frozen=True, eq=False)
class Frame:
    """How the white weights u and rows of a regression relate to the weights w, features and targets of the user.

    Args:
        layout: "scalar" for features (n, P) and targets (n,); "shared" for features (n, P), targets (n, C) and weights
            (C, P); "stacked" for features (n, C, P) and targets (n, C).
        outputs: the number C of targets of a datum.
        prior: S (P, q) with w = S u, for each output if the layout is "shared"; None for the identity.
        noise_logdet: Σ_i log det B_i of the relative noise covariances.
    """

    layout: Layout = "scalar"
    outputs: int = 1
    prior: OperatorDesign | None = None
    noise_logdet: float = 0.0

    def weights(self, rows: Tensor) -> Tensor:
        """Return w (K, P), or (K, C, P) if the layout is "shared", for white weights u (K, size)."""
        if self.layout == "shared":
            rows = rows.reshape(len(rows), self.outputs, -1)
        if self.prior is None:
            return rows
        flat = self.prior.forward(rows.flatten(0, -2).to(self.prior.like)).to(rows)
        return flat.reshape(*rows.shape[:-1], -1)

    def functions(self, features: Tensor, weights: Tensor) -> Tensor:
        """Return the outputs (B, C, K) of every row of weights, for features in this layout."""
        if self.layout == "shared":
            return torch.einsum("bp,kcp->bck", features, weights)
        outputs = features @ weights.mT
        return outputs if self.layout == "stacked" else outputs[:, None]

    def checked(self, features: Tensor, columns: int) -> Tensor:
        """Return features for predictions; raise unless they are finite numbers (B, P), or (B, C, P) if stacked."""
        if self.layout != "stacked" or not isinstance(features, Tensor):
            return checked_features(features, columns)
        if features.ndim != 3 or features.shape[1] != self.outputs:
            raise DataError(
                f"features have the shape {tuple(features.shape)}; expected (rows, {self.outputs}, {columns})."
            )
        return checked_features(features.flatten(0, 1), columns).reshape(features.shape)


@dataclass(frozen=True, eq=False)
class Regression:
    """A regression with white prior and noise: the design (n C, size), targets (n C,), and where they came from."""

    design: Design
    y: Tensor
    frame: Frame

    @classmethod
    def built(
        cls,
        features: Tensor | OperatorDesign,
        targets: Tensor,
        prior: Tensor | OperatorDesign | None,
        noise: Tensor | None,
    ) -> Regression:
        """Check features, targets, prior and noise, and whiten them."""
        design: Design
        if isinstance(features, Tensor) and features.ndim == 3:
            design, frame = _stack(features, targets), Frame("stacked", features.shape[1])
        else:
            design = feature_design(features)
            frame = _frame(design, targets)
        shared, outputs, device = frame.layout == "shared", frame.outputs, design.like.device
        y = checked_targets(
            targets.flatten() if outputs > 1 else targets, SharedDesign(design, outputs) if shared else design
        )
        if isinstance(design, OperatorDesign):
            refuse_unpaired(design)
        if prior is not None:
            frame = replace(frame, prior=prior_root(prior, design.size, device))
            design = WhitenedDesign(design, frame.prior, None)
        if shared:
            design = SharedDesign(design, outputs)
        if noise is not None:
            root = noise_root(noise, len(y) // outputs, outputs, device)
            frame, y = replace(frame, noise_logdet=root.logdet), root.whitened(y[None], slice(None))[0]
            design = WhitenedDesign(design, None, root, outputs)
        return cls(design, y, frame)


def _frame(design: Design, targets: Tensor) -> Frame:
    """Return the layout for a matrix or an operator: by the number of its rows, if a datum has several targets."""
    if not isinstance(targets, Tensor) or targets.ndim != 2 or targets.shape[1] < 2:
        return Frame()
    data, outputs = targets.shape
    if design.rows == data:
        return Frame("shared", outputs)
    if isinstance(design, OperatorDesign) and data > 1 and design.rows == data * outputs:
        return Frame("stacked", outputs)
    raise DataError(
        f"{design.rows} rows of features and targets {(data, outputs)}; expected ({design.rows},), or "
        f"({design.rows}, C) for C outputs with the same features. If each has its own, a tensor has the shape "
        f"({data}, {outputs}, P) and an OperatorDesign {data * outputs} rows."
    )


def _stack(features: Tensor, targets: Tensor) -> MatrixDesign:
    """Return the design of features (n, C, P), in parts that hold all rows of a datum."""
    seen = tuple(targets.shape) if isinstance(targets, Tensor) else f"a {type(targets).__name__}"
    if seen != tuple(features.shape[:2]):
        raise DataError(
            f"features have the shape {tuple(features.shape)} and targets are {seen}; expected targets "
            f"{tuple(features.shape[:2])}, or features (rows, columns)."
        )
    if 0 in features.shape:
        raise DataError(f"features have the shape {tuple(features.shape)}; expected at least one of each dimension.")
    design = feature_design(features.flatten(0, 1))
    assert isinstance(design, MatrixDesign)
    return replace(design, part=features.shape[1] * max(1, design.part // features.shape[1]))
