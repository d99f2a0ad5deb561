"""The regularised loss as a function of a flat vector of weights: its minimum, its Hessian, and what those say.

Nothing here calls the package.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, eq=False)
class Energy:
    """U(θ) = Σ loss(f(x; θ), y)/φ + ½ (θ - μ)ᵀ A (θ - μ), for all weights or for those of ``index``."""

    kind: str  # gaussian, categorical, bernoulli or poisson
    model: nn.Module
    x: Tensor
    y: Tensor
    precision: Tensor | float = 1.0
    phi: float = 1.0
    mean: float = 0.0
    index: Tensor | None = None

    @property
    def whole(self) -> Tensor:
        return torch.cat([p.detach().reshape(-1) for p in self.model.parameters()])

    @property
    def theta(self) -> Tensor:
        return self.whole if self.index is None else self.whole[self.index]

    def named(self, theta: Tensor) -> dict[str, Tensor]:
        full = theta if self.index is None else self.whole.index_put((self.index,), theta)
        pairs = list(self.model.named_parameters())
        parts = full.split([p.numel() for _, p in pairs])
        return {name: part.reshape(p.shape) for (name, p), part in zip(pairs, parts, strict=True)}

    def output(self, theta: Tensor, x: Tensor) -> Tensor:
        out: Tensor = torch.func.functional_call(self.model, self.named(theta), (x,))
        return out

    def loss(self, f: Tensor) -> Tensor:
        if self.kind == "gaussian":
            return 0.5 * (f - self.y).square().sum()
        if self.kind == "categorical":
            return F.cross_entropy(f, self.y, reduction="sum")
        if self.kind == "bernoulli":
            return F.binary_cross_entropy_with_logits(f, self.y.to(f), reduction="sum")
        return (f.exp() - self.y * f).sum()

    def __call__(self, theta: Tensor) -> Tensor:
        penalty = 0.5 * (self.precision * (theta - self.mean).square()).sum()
        return self.loss(self.output(theta, self.x)) / self.phi + penalty

    def gradient(self, theta: Tensor) -> Tensor:
        slope: Tensor = torch.func.grad(self)(theta)
        return slope.detach()

    def hessian(self, theta: Tensor | None = None) -> Tensor:
        found: Tensor = torch.func.jacrev(torch.func.grad(self))(self.theta if theta is None else theta)
        return found.detach()

    def jacobian(self, x: Tensor) -> Tensor:
        """(B C, P), input by input."""
        flat = lambda theta: self.output(theta, x).reshape(-1)
        found: Tensor = torch.func.jacrev(flat)(self.theta)
        return found.detach()

    def ggn(self) -> Tensor:
        """Σ JᵀΛJ/φ + A."""
        jac, f = self.jacobian(self.x), self.output(self.theta, self.x).detach()
        if self.kind == "categorical":
            p = f.softmax(-1)
            root = torch.block_diag(*(torch.diag_embed(p) - p[:, :, None] * p[:, None, :]))
        else:
            p = {"gaussian": torch.ones_like(f), "bernoulli": f.sigmoid() * (1 - f.sigmoid()), "poisson": f.exp()}
            root = torch.diag(p[self.kind].reshape(-1))
        size = torch.ones(jac.shape[1], dtype=jac.dtype)
        return jac.T @ root @ jac / self.phi + torch.diag(self.precision * size)

    def covariance(self, x: Tensor, precision: Tensor | None = None) -> Tensor:
        """J H⁻¹ Jᵀ between all inputs and outputs, (B C, B C); or with another matrix in the place of H."""
        jac = self.jacobian(x)
        return jac @ torch.linalg.solve(self.hessian() if precision is None else precision, jac.T)

    def each(self, x: Tensor, precision: Tensor | None = None) -> Tensor:
        """Return the diagonal blocks of ``covariance``, one for each input: (B, C, C)."""
        whole = self.covariance(x, precision)
        outputs = len(whole) // len(x)
        return whole.reshape(len(x), outputs, len(x), outputs).diagonal(dim1=0, dim2=2).permute(2, 0, 1)

    def minimise(self, steps: int = 300) -> Energy:
        """Move the weights to the minimum: L-BFGS, then Newton steps, damped where the Hessian is indefinite.

        A direction counts as flat if its curvature is within the rounding of the Hessian's eigenvalues, P ε ‖H‖. There
        is no step along it, and its slope must be rounding as well: a symmetry of the loss, such as weights that can
        rotate without any change of the outputs.
        """
        theta = self.theta.clone().requires_grad_()
        optimiser = torch.optim.LBFGS([theta], max_iter=steps, history_size=50, line_search_fn="strong_wolfe")

        def closure() -> Tensor:
            optimiser.zero_grad()
            value = self(theta)
            value.backward()
            return value

        optimiser.step(closure)
        point, damping = theta.detach(), 0.0
        for _ in range(1000):
            values, vectors = torch.linalg.eigh(self.hessian(point))
            slope = vectors.T @ self.gradient(point)
            rounding = len(values) * torch.finfo(values.dtype).eps * float(values.abs().max())
            flat = values.abs() <= rounding
            lowest = float(values[~flat][0])
            shift = max(damping, 0.0 if lowest > 0 else 1e-2 - lowest)
            along = torch.where(flat, 0.0, slope / (values + shift))
            still = not bool((slope[flat].abs() > rounding).any())
            if shift == 0 and still and float(slope @ along) < 1e-22:
                break
            step = vectors @ along
            better = float(self(point - step)) < float(self(point)) + 1e-9
            point = point - step if better else point
            damping = (0.0 if damping < 1e-3 else damping / 10) if better else max(10 * damping, 1e-2)
        else:
            raise AssertionError(f"no minimum after 1000 Newton steps: the last slope is {float(slope.norm()):.2g}")
        self.place(point)
        return self

    def place(self, theta: Tensor) -> None:
        with torch.no_grad():
            for name, value in self.named(theta).items():
                self.model.get_parameter(name).copy_(value)
