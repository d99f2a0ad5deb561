"""Classification into C classes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lapwing.core.gaussian import FunctionGaussian
from lapwing.core.random import classes
from lapwing.errors import DataError, ModelError
from lapwing.likelihoods.protocol import positive
from lapwing.predictives.softmax import LINKS, SoftmaxPredictive


@dataclass(frozen=True, eq=False)
class Categorical:
    """Softmax over logits, cross-entropy loss.

    ``class_weights`` (C,) and ``ignore_index`` mean what they mean in ``nn.CrossEntropyLoss``. ``link`` turns
    Gaussian logits into probabilities: "probit" (closed form), "bridge" (Laplace bridge to a Dirichlet), "mc"
    (``samples`` draws from a generator seeded with ``seed``). A ``temperature`` other than one gives a
    tempered posterior, which has no normaliser of its own.
    """

    class_weights: Tensor | tuple[float, ...] | None = None
    ignore_index: int = -100
    link: str = "probit"
    samples: int = 256
    seed: int = 0
    temperature: float | Tensor = 1.0

    def __post_init__(self) -> None:
        if self.link not in LINKS:
            raise DataError(f"link is {self.link!r}; expected one of {', '.join(LINKS)}.")
        if not positive(self.temperature):
            raise DataError(f"temperature is {self.temperature}; expected a positive number.")
        if self.class_weights is not None and not positive(self.class_weights, zero=True):
            raise DataError(f"class_weights is {self.class_weights}; expected finite numbers that are not negative.")

    @property
    def dispersion(self) -> Tensor:
        return torch.as_tensor(self.temperature, dtype=torch.float64)

    @property
    def learns_dispersion(self) -> bool:
        return False

    @property
    def ignores_common_shift(self) -> bool:
        return True

    def with_dispersion(self, phi: Tensor) -> Categorical:
        return replace(self, temperature=phi)

    def targets(self, f: Tensor, y: Tensor) -> Tensor:
        count = f.shape[-1]
        if count == 1:
            raise DataError("Categorical: the network has one output; expected two or more. Use Bernoulli().")
        if y.shape == (*f.shape[:-1], 1):
            y = y.squeeze(-1)
        if y.shape != f.shape[:-1] or y.is_floating_point() or y.is_complex():
            raise DataError(
                f"Categorical: targets have the shape {tuple(y.shape)} and dtype {y.dtype}, outputs "
                f"{tuple(f.shape)}; expected whole class numbers of shape {tuple(f.shape[:-1])}. "
                "Use y.argmax(-1) for one-hot targets, or Bernoulli() for several labels at once"
                f"{'; classes are the last dimension of outputs (B, T, C)' if f.ndim == 3 else ''}."
            )
        y = y.long()
        low, high = (int(bound) for bound in y.aminmax())
        known = y if low >= 0 and high < count else y[y != self.ignore_index]
        if known.numel() and not (int(known.min()) >= 0 and int(known.max()) < count):
            low, high = int(known.min()), int(known.max())
            raise DataError(
                f"Categorical: targets run from {low} to {high}; expected 0..{count - 1}, or "
                f"ignore_index={self.ignore_index}."
            )
        if self.class_weights is not None and len(self.class_weights) != count:
            raise DataError(f"Categorical: {len(self.class_weights)} class weights for {count} classes.")
        return y

    def check_outputs(self, f: Tensor) -> None:
        """Raise where they look like the result of a softmax: taken for logits they would be far too unsure."""
        if bool((f >= 0).all()) and bool(((f.double().sum(-1) - 1).abs() < 1e-3).all()):
            raise ModelError(
                "Categorical: all outputs are above nought and sum to one for each input, as probabilities do; "
                "expected logits. Leave the softmax out of the model: model[:-1] of a Sequential that ends in one."
            )

    def _weight(self, f: Tensor, y: Tensor) -> Tensor | None:
        """The weight of every datum, or None when all are one."""
        if self.class_weights is None and not self._ignores(y):
            return None
        ignored = y == self.ignore_index
        table = f.new_ones(f.shape[-1]) if self.class_weights is None else torch.as_tensor(self.class_weights).to(f)
        return table[y.masked_fill(ignored, 0)].masked_fill(ignored, 0)

    def _ignores(self, y: Tensor) -> bool:
        if y.is_cuda:  # asking would halt the GPU; treating all as if some were ignored costs less
            return True
        low = int(y.min())
        return (low < 0 or self.ignore_index >= 0) and bool((y == self.ignore_index).any())

    def loss(self, f: Tensor, y: Tensor) -> Tensor:
        weight = self._weight(f, y)
        safe = y if weight is None else y.masked_fill(y == self.ignore_index, 0)
        nll = -F.log_softmax(f, -1).gather(-1, safe.unsqueeze(-1)).squeeze(-1)
        return nll if weight is None else nll * weight

    def root(self, f: Tensor, y: Tensor) -> Tensor:
        r"""C - 1 columns suffice: R = diag(√p) Q with Q orthonormal and orthogonal to √p.

        Q is a Householder reflection that takes √p to the last axis, without its last column: closed form,
        no jitter, and R Rᵀ = diag(p) - p pᵀ to rounding.
        """
        root_p = (0.5 * F.log_softmax(f, -1)).exp()
        v = root_p.clone()
        v[..., -1] += 1
        scaled = v / (1 + root_p[..., -1:])  # 2 / vᵀv = 1 / (1 + √p_last)
        q = -v.unsqueeze(-1) * scaled[..., :-1].unsqueeze(-2)
        q.diagonal(dim1=-2, dim2=-1).add_(1)
        root = root_p.unsqueeze(-1) * q
        weight = self._weight(f, y)
        return root if weight is None else root * weight.sqrt()[..., None, None]

    def sampled_gradient(self, f: Tensor, y: Tensor, generator: torch.Generator | None) -> Tensor:
        p = f.softmax(-1)
        gradient = p - F.one_hot(classes(p, generator), p.shape[-1])
        weight = self._weight(f, y)
        return gradient if weight is None else gradient * weight.sqrt().unsqueeze(-1)

    def count(self, f: Tensor, y: Tensor) -> int | Tensor:
        return (y != self.ignore_index).sum() if self._ignores(y) else y.numel()

    def log_normaliser(self, phi: Tensor, outputs: int) -> Tensor:
        return torch.zeros_like(phi)

    def predict(self, belief: FunctionGaussian) -> SoftmaxPredictive:
        return SoftmaxPredictive(belief.marginal, self.link, self.samples, self.seed)

    def settings(self) -> dict[str, Any]:
        weights = self.class_weights
        return {
            "class_weights": None if weights is None else [float(w) for w in weights],
            "ignore_index": self.ignore_index,
            "link": self.link,
            "samples": self.samples,
            "seed": self.seed,
        }
