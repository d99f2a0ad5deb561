"""MacKay's updates of precisions and noise."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lapwing.core.settings import require_flag, require_integer, require_positive
from lapwing.core.trace import NOT_CONVERGED, Step
from lapwing.posteriors.effective import effective_parameters
from lapwing.posteriors.protocols import HasUnseenGamma, SamplesGamma
from lapwing.tuners.evidence import Coordinates

LARGEST_CHANGE = 10.0  # of a logarithm in one step: far from the fixed point the update overshoots


@dataclass(frozen=True)
class FixedPoint:
    r"""A tuner that iterates MacKay's updates, group by group, until they change nothing.

    $$ \alpha_d = \gamma_d / \|\tilde w_d\|^2, \qquad \phi = \mathrm{SSE} / (N C - \gamma) $$

    γ is the number of weights that the data determine. The fixed point is the stationary point that
    ``MaximiseEvidence`` finds. An update that would lower the evidence is halved, and so are those of a logarithm that
    changes direction. ``posterior.effective_parameters()`` has γ of every layer at the end. For a posterior made of
    samples γ is an estimate, and no update is halved for its evidence.

    Cost: the posterior variance of every weight at each step; no pass over the data.

    Args:
        noise: Whether to update the noise too. A noise that the user gave is kept in any case; if each output has its
            own noise, each is updated with its own γ.
        max_steps: The largest number of updates; 1 makes a single update without a check of convergence.
        tolerance: Stop when no logarithm changes by more than this.

    Raises:
        UnsupportedError: If a setting is out of range, or, when called, the posterior has no evidence.
        DivergedError: When called, if a precision leaves its range, a number is not finite, or a logarithm still
            changes by more than 1e-2 after ``max_steps`` updates.

    >>> import lapwing as lw
    >>> x = torch.linspace(-1, 1, 40).unsqueeze(1)
    >>> posterior = lw.fit(torch.nn.Linear(1, 1), [(x, x.sin())], "regression", prior=100.0)
    >>> tuned = posterior.tuned(lw.tuners.FixedPoint())
    >>> bool(tuned.log_evidence() > posterior.log_evidence())
    True
    """

    noise: bool = True
    max_steps: int = 200
    tolerance: float = 1e-6

    def __post_init__(self) -> None:
        require_flag("noise", self.noise)
        require_integer("max_steps", self.max_steps)
        require_positive("tolerance", self.tolerance)

    def __call__(self, posterior: Any) -> Any:
        """Return the posterior at the fixed point."""
        coordinates = Coordinates.of(posterior, self.noise, "FixedPoint")
        x, steps = coordinates.start, list[Step]()
        damping, last_change = torch.ones_like(x), torch.zeros_like(x)
        with torch.no_grad():
            value = float(coordinates.at(x).log_evidence())
            for _ in range(self.max_steps):
                new, gamma = self._updated(coordinates, coordinates.at(x))
                steps.append(coordinates.step(x, value, gamma))
                coordinates.refuse_not_finite(steps)
                coordinates.refuse_runaway(steps)
                if not bool(torch.isfinite(new).all()):
                    raise coordinates.error_at(x, steps, self._message("an update is not finite"))
                change = new - x
                largest = float(change.abs().max())
                if largest <= self.tolerance:
                    return coordinates.finished(x, steps)
                # A logarithm that changes direction overshoots: near the optimum the evidence is too flat to show it.
                damping = torch.where(change * last_change < 0, 0.5 * damping, (1.2 * damping).clamp_max(1))
                last_change = change.clamp(-LARGEST_CHANGE, LARGEST_CHANGE)
                x, value = self._accepted(coordinates, x, x + damping * last_change, value)
        if largest > NOT_CONVERGED and self.max_steps > 1:
            reason = f"after {self.max_steps} steps a logarithm moves {largest:.2g}"
            raise coordinates.error_at(x, steps, self._message(reason))
        finding = f"stopped after {self.max_steps} steps, where a logarithm still moved {largest:.2g}"
        return coordinates.finished(x, steps, finding)

    def _message(self, reason: str) -> str:
        return f"FixedPoint: {reason}; expected below {self.tolerance:g}. Raise max_steps, or use MaximiseEvidence."

    def _accepted(self, coordinates: Coordinates, x: Tensor, new: Tensor, value: float) -> tuple[Tensor, float]:
        """Return the update, or the half, quarter, ... of it that does not lower the evidence, and the evidence there.

        Each logarithm changes in the direction of its slope, so a short enough step raises the evidence; full ones may
        oscillate. With stochastic estimates, skip this line search: evidence and γ are estimated independently.
        """
        if isinstance(coordinates.posterior, SamplesGamma):
            return new, float(coordinates.at(new).log_evidence())
        for halvings in range(8):
            trial = x + (new - x) * 0.5**halvings
            evidence = float(coordinates.at(trial).log_evidence())
            if evidence >= value - 1e-12 * abs(value):
                break
        return trial, evidence

    def _updated(self, coordinates: Coordinates, current: Any) -> tuple[Tensor, float]:
        """Return MacKay's update of all logarithms, (D,), and γ of all weights."""
        prior = current.problem.prior
        effective = effective_parameters(current)
        gammas, total = effective.by_precision, effective.total
        unseen = current.unseen_gamma() if isinstance(current, HasUnseenGamma) else None
        if unseen is not None:  # the stationary point of a bound is not that of the evidence
            gammas, total = gammas + prior.summed(unseen).to(gammas), total + float(unseen.sum())
        squares = prior.squares(current.centre)
        new = [(gammas.clamp_min(1e-12) / squares.clamp_min(1e-300)).log()]
        if coordinates.noise:
            new.append(self._noise(current, total).log().reshape(-1).to(new[0]))
        return torch.cat(new), total

    def _noise(self, current: Any, gamma: float) -> Tensor:
        """Return the update of the noise variances, () or (C,)."""
        statistics, noise = current.statistics, current.noise
        if noise.ndim == 0:
            squares = 2 * torch.as_tensor(current.loss, dtype=torch.float64, device=noise.device)
            return _noise_update(squares, torch.full_like(noise, gamma), statistics.data * statistics.outputs, noise)
        squares = 2 * torch.tensor(statistics.losses, dtype=torch.float64, device=noise.device)
        return _noise_update(squares, _gamma_by_output(current), statistics.data, noise)


def _gamma_by_output(current: Any) -> Tensor:
    """Return γ_c = tr(Λ⁻¹ H_c / r_c), which is minus the slope of log det Λ in log r_c, (C,)."""
    with torch.inference_mode(False), torch.enable_grad():
        log_noise = current.noise.detach().log().clone().requires_grad_()
        posterior = current.with_noise(log_noise.exp())
        logdet = posterior.current.logdet(torch.ones_like(log_noise[0]), posterior.problem.prior)
        (slope,) = torch.autograd.grad(logdet, log_noise)
    return -slope


def _noise_update(squares: Tensor, gamma: Tensor, count: int, noise: Tensor) -> Tensor:
    """Return SSE / (N - γ), or (SSE + γ φ) / N, which has the same fixed point, if γ is nearly N or larger.

    γ of a structure that ignores correlations may exceed N, though never at the fixed point.
    """
    left = count - gamma
    return torch.where(left >= 1, squares / left.clamp_min(1), (squares + gamma * noise) / count)
