"""Binary targets, one logit or many for multilabel problems, and their predictive."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lapwing.errors import DataError
from lapwing.likelihoods.base import (
    OFFSET,
    LogitLikelihood,
    Numbers,
    OutputHessian,
    check_offset,
    divide_by_root,
    match_targets,
    offset_of,
    refuse_other_loss,
    refuse_unused,
)
from lapwing.predictives.labels import BINARY_LINKS, BinaryPredictive
from lapwing.runtime.settings import (
    FINITE,
    INTEGER,
    NONE,
    NOT_NEGATIVE,
    NUMBER,
    SMALLEST,
    Array,
    Either,
    ListOf,
    Maybe,
    Real,
    one_of,
    saved,
    setting,
)
from lapwing.runtime.threads import uniform
from lapwing.values.gaussian import FunctionGaussian

WEIGHTS = Maybe(Either(Real(0), ListOf(Real(0), 1), ListOf(Real(0), "C")))  # of positive labels, in files


@saved
@dataclass(frozen=True, eq=False)
class Bernoulli(LogitLikelihood):
    """Binary or multilabel classification: independent sigmoids and the binary cross-entropy loss.

    Targets are 0, 1 or a probability between them.

    Args:
        pos_weight: Weight of positive labels, one or (C,), as in ``nn.BCEWithLogitsLoss``, if the network was trained
            with it. The loss and the curvature have it. Predictions are corrected for it: they are those for data in
            which every label counts once, with the odds divided by the weight. Zero corrects nothing.
        ignore_index: Value of labels that do not count; None if all do.
        link: How Gaussian logits become probabilities: "quadrature" (to about 1e-9 for logits with a standard
            deviation of up to 30) or "probit" (closed form).
        temperature: Divides the curvature. Other than one it gives a tempered posterior, which has no normaliser.
        link_temperature: Divides the logits in predictions, their standard deviations too, as temperature scaling
            does. The posterior does not depend on it.
        link_offset: Added to the logits of predictions after that division, one number or (C,): a label with a higher
            number is more probable everywhere. The posterior does not depend on it. ``fit`` learns it with validation
            data.

    Raises:
        DataError: The link is unknown, the temperature not positive, or ``pos_weight`` negative.

    >>> Bernoulli().loss(torch.zeros(1, 1), torch.ones(1, 1))
    tensor([0.6931])
    """

    pos_weight: float | tuple[float, ...] | Tensor | None = setting(None, NOT_NEGATIVE | NONE, stored=WEIGHTS)
    ignore_index: int | None = setting(None, INTEGER | NONE)
    link: str = setting("quadrature", one_of(BINARY_LINKS, DataError))
    temperature: float | Tensor = setting(1.0, NUMBER, stored=Array((), SMALLEST), stored_as="dispersion")
    link_temperature: float = setting(1.0, NUMBER)
    link_offset: float | tuple[float, ...] | Tensor | None = setting(None, FINITE | NONE, stored=OFFSET)

    def targets(self, f: Tensor, y: Tensor) -> Tensor:
        y = match_targets(f, y, "Bernoulli")
        known = ~self.ignored(y)
        count = 1 if self.pos_weight is None else torch.as_tensor(self.pos_weight).numel()
        if count not in (1, f.shape[-1]):
            raise DataError(f"Bernoulli: {count} positive weights for {f.shape[-1]} outputs; expected one for each.")
        check_offset(self, f.shape[-1])
        if bool(((y < 0) | (y > 1))[known].any()):
            raise DataError(
                f"Bernoulli: targets run from {y[known].min().item():g} to {y[known].max().item():g}; expected 0..1."
            )
        return y

    def check_loss(self, f: Tensor, y: Tensor, own: Tensor) -> None:
        y = self.targets(f, y)
        loss = replace(self, pos_weight=None).loss(f, y).sum() / (~self.ignored(y)).sum()
        refuse_other_loss("Bernoulli", loss, own)

    def ignored(self, y: Tensor) -> Tensor:
        return torch.zeros_like(y, dtype=torch.bool) if self.ignore_index is None else y == self.ignore_index

    def known_log_prob(self, predictive: Any, y: Tensor) -> Tensor:
        log_prob: Tensor = predictive.known_log_prob(y, ~self.ignored(y))
        return log_prob

    def check_prediction(self) -> None:
        refuse_unused("Bernoulli", pos_weight=self.pos_weight, temperature=self.temperature)

    @property
    def refused_last(self) -> Mapping[str, str]:
        advice = "expected logits. Leave it out of the model: model[:-1] of a Sequential that ends in it."
        return dict.fromkeys(("sigmoid", "hardsigmoid", "softmax"), advice)

    def _weight(self, y: Tensor) -> Tensor:
        """Return the weight of every label, zero for ignored ones."""
        weight = (~self.ignored(y)).to(y.dtype)
        if self.pos_weight is None:
            return weight
        return weight * (1 + (torch.as_tensor(self.pos_weight, dtype=y.dtype, device=y.device) - 1) * y)

    def loss(self, f: Tensor, y: Tensor) -> Tensor:
        known = ~self.ignored(y)
        safe = torch.where(known, y, torch.zeros_like(y))
        positive = None if self.pos_weight is None else torch.as_tensor(self.pos_weight, dtype=f.dtype, device=f.device)
        each = F.binary_cross_entropy_with_logits(f, safe, pos_weight=positive, reduction="none")
        return (each * known).sum(-1)

    def root(self, f: Tensor, y: Tensor) -> Tensor:
        p = f.sigmoid()
        return torch.diag_embed((p * (1 - p) * self._weight(y)).sqrt())

    def hessian(self, f: Tensor, y: Tensor) -> OutputHessian:
        wide = f.double()
        return OutputHessian(wide.sigmoid() * (-wide).sigmoid() * self._weight(y))

    def sampled_gradient(self, f: Tensor, y: Tensor, generator: torch.Generator | None) -> Tensor:
        p = f.sigmoid()
        drawn = uniform(tuple(p.shape), generator, p) < p
        return (p - drawn.to(p)) * self._weight(y).sqrt()

    def gradient(self, f: Tensor, y: Tensor) -> Tensor:
        return divide_by_root(super().gradient(f, y), self._weight(y).to(f))

    def count(self, f: Tensor, y: Tensor) -> int | Tensor:
        return y[..., 0].numel() if self.ignore_index is None else (~self.ignored(y)).any(-1).sum()

    def predict(self, belief: FunctionGaussian) -> BinaryPredictive:
        return BinaryPredictive(self.link_input(belief.marginal), self.link)

    @property
    def loss_weights(self) -> Numbers | None:
        return self.pos_weight

    @property
    def logit_offset(self) -> Tensor | None:
        return offset_of(self.link_offset, self.pos_weight)
