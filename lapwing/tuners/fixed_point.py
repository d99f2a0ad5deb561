"""MacKay's updates."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lapwing.core.trace import Step, Trace
from lapwing.errors import DivergedError
from lapwing.posteriors.effective import effective_parameters
from lapwing.tuners.coordinates import Coordinates
from lapwing.tuners.maximise_evidence import refuse_not_finite, refuse_runaway

FAR = 10.0  # the most that a logarithm moves in one step: from a far start the update overshoots as far


@dataclass(frozen=True)
class FixedPoint:
    r"""MacKay's fixed point, group by group.

    $$ \alpha_d = \gamma_d / \|\tilde w_d\|^2, \qquad \phi = \mathrm{SSE} / (N C - \gamma) $$

    γ counts the weights that the data decide. ``noise=False`` keeps the noise; a noise that was given is kept
    anyway, and one for each output is updated with its own γ. Ends when no logarithm moves by more than
    ``tolerance``, at the stationary point that ``MaximiseEvidence`` finds. An update that would lose evidence is
    halved, and so are those of a logarithm that turns back.
    γ of every layer at the end is ``posterior.effective_parameters()``. With samples γ is their estimate, and the
    evidence has no say.

    Cost: posterior variances of the weights at each step; no data is touched.
    """

    noise: bool = True
    max_steps: int = 200
    tolerance: float = 1e-6

    def __call__(self, posterior: Any) -> Any:
        coordinates = Coordinates.of(posterior, self.noise)
        x, moved = coordinates.start, math.inf
        steps: list[Step] = []
        findings: tuple[str, ...] = ()
        damping, last = torch.ones_like(x), torch.zeros_like(x)
        with torch.no_grad():
            value = float(coordinates.at(x).log_evidence())
            for _ in range(self.max_steps):
                new, gamma = self._updated(coordinates, coordinates.at(x))
                steps.append(coordinates.step(x, value, gamma))
                refuse_not_finite(coordinates, steps, "FixedPoint")
                refuse_runaway(coordinates, steps, "FixedPoint")
                if not bool(torch.isfinite(new).all()):
                    self._refuse(coordinates, steps, x, "an update is not finite")
                moved = float((new - x).abs().max())
                if moved <= self.tolerance:
                    break
                # A logarithm that turns back overshoots: near the optimum the evidence is too flat to show it.
                damping = torch.where((new - x) * last < 0, 0.5 * damping, (1.2 * damping).clamp_max(1))
                last = (new - x).clamp(-FAR, FAR)
                x, value = self._climbed(coordinates, x, x + damping * last, value)
            else:
                if moved > 1e-2 and self.max_steps > 1:
                    self._refuse(coordinates, steps, x, f"after {self.max_steps} steps a logarithm moves {moved:.2g}")
                findings = (f"stopped after {self.max_steps} steps, where a logarithm still moved {moved:.2g}",)
        return coordinates.finished(x, Trace("FixedPoint", steps=tuple(steps), findings=findings))

    def _climbed(self, coordinates: Coordinates, x: Tensor, new: Tensor, value: float) -> tuple[Tensor, float]:
        """The whole update, or the half, quarter ... of it that does not lose evidence.

        Each logarithm moves the way its slope points, so that a short enough step gains; whole ones may oscillate.
        Where evidence and γ are estimates, each of its own, the one has no say in where the other stands still.
        """
        if hasattr(coordinates.posterior, "evidence_error"):
            return new, float(coordinates.at(new).log_evidence())
        for halvings in range(8):
            trial = x + (new - x) * 0.5**halvings
            found = float(coordinates.at(trial).log_evidence())
            if found >= value - 1e-12 * abs(value):
                break
        return trial, found

    def _updated(self, coordinates: Coordinates, current: Any) -> tuple[Tensor, float]:
        prior = current.problem.prior
        effective = effective_parameters(current)
        gammas, total = effective.by_precision, effective.total
        if hasattr(getattr(current, "curvature", None), "unseen"):  # a bound stands still elsewhere than the evidence
            unseen = current.curvature.unseen(current.problem.likelihood.dispersion, prior)
            gammas, total = gammas + prior.summed(unseen).to(gammas), total + float(unseen.sum())
        squares = prior.squares(current.centre)
        new = [(gammas.clamp_min(1e-12) / squares.clamp_min(1e-300)).log()]
        if coordinates.noise:
            new.append(self._noise(current, total).log().reshape(-1).to(new[0]))
        return torch.cat(new), total

    def _noise(self, current: Any, gamma: float) -> Tensor:
        statistics, noise = current.statistics, current.noise
        if noise.ndim == 0:
            squares = 2 * torch.as_tensor(current.loss, dtype=torch.float64, device=noise.device)
            return _residual(squares, torch.full_like(noise, gamma), statistics.data * statistics.outputs, noise)
        squares = 2 * torch.tensor(statistics.losses, dtype=torch.float64, device=noise.device)
        return _residual(squares, self._by_output(current), statistics.data, noise)

    def _by_output(self, current: Any) -> Tensor:
        """γ_c = tr(Λ⁻¹ H_c / r_c), which is minus the slope of log det Λ in log r_c."""
        with torch.inference_mode(False), torch.enable_grad():
            log_noise = current.noise.detach().log().clone().requires_grad_()
            moved = current.with_noise(log_noise.exp())
            logdet = moved.current.logdet(torch.ones_like(log_noise[0]), moved.problem.prior)
            (slope,) = torch.autograd.grad(logdet, log_noise)
        return -slope

    def _refuse(self, coordinates: Coordinates, steps: list[Step], x: Tensor, what: str) -> None:
        message = f"FixedPoint: {what}; expected below {self.tolerance:g}. Raise max_steps, or use MaximiseEvidence."
        trace = Trace("FixedPoint", steps=tuple(steps), findings=(message,))
        raise DivergedError(message, trace, coordinates.finished(x, trace))


def _residual(squares: Tensor, gamma: Tensor, count: int, noise: Tensor) -> Tensor:
    """SSE / (N - γ); (SSE + γ φ) / N, which stands still at the same φ, where γ takes up (nearly) all the data.

    A structure that ignores correlations may count more than N, though never at the stationary point.
    """
    left = count - gamma
    return torch.where(left >= 1, squares / left.clamp_min(1), (squares + gamma * noise) / count)
