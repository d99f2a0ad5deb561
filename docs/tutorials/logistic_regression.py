"""Bayesian logistic regression: a network of one linear layer, for which the exact posterior can be computed.

The data are thirty points of two classes in the plane, the model ``nn.Linear(2, 1)`` and a sigmoid. Three weights are
few enough to integrate over on a grid, so that the Laplace approximation can be compared with the exact answer:

- the posterior. Prior times likelihood is log-concave but not Gaussian: the data bound the weights more sharply from
  below (the classes do differ) than from above (how steep the boundary is). Laplace is symmetric around the mode;
- the evidence, the integral of prior times likelihood;
- the prediction, the mean of sigmoid(w·x + b) under the posterior. The trained network uses one w, and its lines of
  equal probability are parallel. Averaged over w the lines fan out, because the direction of the boundary is uncertain
  far from the data.

The prediction has two approximations. The first is Laplace: the logit is Gaussian, f(x) ~ N(m, v). The second is the
integral of the sigmoid under that Gaussian, which has no closed form. Probit replaces it by
sigmoid(m / sqrt(1 + π v / 8)); a quadrature over f computes it. Comparing both shows the error of each.

The model is linear in its weights, so its tangent model is the model, and the GGN is the Hessian. So ``lw.fit`` returns
the same approximation as laplace_density.py.

Run it with ``python docs/tutorials/logistic_regression.py [folder]``: it prints the comparison and draws
logistic_regression.png.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from density import DensityLaplace, laplace_density
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from torch import Tensor, nn

import lapwing as lw
from lapwing.demo.result import save

EXACT, LAPLACE, PLAIN = "#333333", "#0072b2", "#d55e00"
PRIOR_PRECISION = 0.3
WINDOW = 5.0
GRID = (49, 49, 49)
LEVELS = {0.1: -3.5, 0.25: -2.5, 0.5: -4.0, 0.75: 2.5, 0.9: 3.5}  # lines of equal probability, labelled at this x₂


def two_classes(seed: int = 2, n: int = 30) -> tuple[Tensor, Tensor]:
    """Return inputs (n, 2) around two centres, and labels (n, 1)."""
    generator = torch.Generator().manual_seed(seed)
    y = torch.arange(n) % 2
    centres = torch.tensor([[-1.0, -0.5], [1.0, 0.5]], dtype=torch.float64)
    x = centres[y] + torch.randn(n, 2, generator=generator, dtype=torch.float64)
    return x, y.double().unsqueeze(1)


def log_joint(theta: Tensor, x: Tensor, y: Tensor, alpha: float) -> Tensor:
    """Return log prior + log likelihood of weights (..., 3), two for the inputs and the bias, with all constants."""
    f = theta[..., :2] @ x.mT + theta[..., 2:]
    likelihood = F.logsigmoid(f * (2 * y[:, 0] - 1)).sum(-1)
    return likelihood - 0.5 * alpha * theta.square().sum(-1) + 1.5 * math.log(alpha / (2 * math.pi))


def weights_of(model: nn.Linear) -> Tensor:
    return torch.cat([model.weight[0], model.bias]).detach()


def trained(x: Tensor, y: Tensor, alpha: float) -> nn.Linear:
    """Minimise cross-entropy plus alpha/2 times the squared weights, to a gradient of 1e-10."""
    model = nn.Linear(2, 1, dtype=torch.float64)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    # A line search compares losses and stops when they are equal up to rounding, at a gradient of 1e-8. Plain steps
    # continue from there.
    for search in ("strong_wolfe", None):
        optimiser = torch.optim.LBFGS(
            model.parameters(), max_iter=100, tolerance_grad=1e-11, tolerance_change=0.0, line_search_fn=search
        )

        def closure(optimiser: torch.optim.LBFGS = optimiser) -> Tensor:
            optimiser.zero_grad()
            penalty = 0.5 * alpha * (model.weight.square().sum() + model.bias.square().sum())
            loss = F.binary_cross_entropy_with_logits(model(x), y, reduction="sum") + penalty
            loss.backward()
            return loss

        optimiser.step(closure)
    closure()
    slope = max(float(p.grad.abs().max()) for p in model.parameters() if p.grad is not None)
    if not slope <= 1e-10:
        raise lw.errors.NumericalError(f"training ended with a gradient of {slope:.3g}; expected below 1e-10.")
    return model


@dataclass(frozen=True, eq=False)
class ExactPosterior:
    """The posterior on a grid: weights of the model (G, 3) and their probabilities (G,), which sum to one."""

    theta: Tensor
    probs: Tensor
    log_evidence: float
    first: tuple[Tensor, Tensor]  # the first weight's values and its marginal density there

    @property
    def mean(self) -> Tensor:
        return self.probs @ self.theta

    @property
    def std(self) -> Tensor:
        return (self.probs @ (self.theta - self.mean).square()).sqrt()

    def predict(self, x: Tensor) -> Tensor:
        """Return the mean of the sigmoid, (B,) for inputs (B, 2)."""
        keep = self.probs > 1e-10 * self.probs.max()
        theta, probs = self.theta[keep], self.probs[keep]
        parts = [probs @ torch.sigmoid(theta[:, :2] @ part.mT + theta[:, 2:]) for part in x.split(64)]
        return torch.cat(parts) / probs.sum()


def exact_posterior(
    x: Tensor, y: Tensor, alpha: float, counts: tuple[int, int, int] = GRID, reach: float = 10.0
) -> ExactPosterior:
    """Integrate by the trapezoidal rule, up to ``reach`` on either side in coordinates that whiten Laplace's Gaussian.

    The root of the covariance is lower triangular, so that the first coordinate is the first weight alone and its
    marginal is a sum over the other two.
    """
    gaussian = by_hand(x, y, alpha)
    root = torch.linalg.cholesky(gaussian.covariance)
    axes = [torch.linspace(-reach, reach, count, dtype=torch.float64) for count in counts]
    theta = gaussian.mean + torch.cartesian_prod(*axes) @ root.mT
    logs = torch.cat([log_joint(part, x, y, alpha) for part in theta.split(50_000)])
    steps = [float(axis[1] - axis[0]) for axis in axes]
    total = torch.logsumexp(logs, 0)
    log_evidence = float(total + root.diagonal().log().sum()) + sum(math.log(step) for step in steps)
    probs = (logs - total).exp()
    marginal = probs.reshape(counts).sum((1, 2)) / (steps[0] * root[0, 0])
    return ExactPosterior(theta, probs, log_evidence, (gaussian.mean[0] + root[0, 0] * axes[0], marginal))


def by_hand(x: Tensor, y: Tensor, alpha: float) -> DensityLaplace:
    """Return the Laplace approximation of the posterior, treated as any other density."""
    return laplace_density(lambda theta: log_joint(theta, x, y, alpha), torch.zeros(3))


@dataclass(frozen=True, eq=False)
class Study:
    """One data set: the network, its posterior by Laplace, and the exact one."""

    x: Tensor
    y: Tensor
    model: nn.Linear
    laplace: lw.Fitted
    exact: ExactPosterior

    def probabilities(self, inputs: Tensor) -> dict[str, Tensor]:
        """Return the probabilities of class one, (B,) each."""
        belief = self.laplace.functions(inputs)
        return {
            "plain network": self.model(inputs).detach().sigmoid()[:, 0],
            "Laplace, probit": lw.Bernoulli(link="probit").predict(belief).probs[:, 0],
            "Laplace, quadrature": lw.Bernoulli().predict(belief).probs[:, 0],
            "exact": self.exact.predict(inputs),
        }


def study(seed: int = 2, n: int = 30, counts: tuple[int, int, int] = GRID) -> Study:
    x, y = two_classes(seed, n)
    model = trained(x, y, PRIOR_PRECISION)
    laplace = lw.fit(model, [(x, y)], lw.Bernoulli(), method=lw.Full(), prior=PRIOR_PRECISION)
    return Study(x, y, model, laplace, exact_posterior(x, y, PRIOR_PRECISION, counts))


def window(count: int = 41) -> Tensor:
    """Return inputs (count², 2) on a square around the data."""
    axis = torch.linspace(-WINDOW, WINDOW, count, dtype=torch.float64)
    return torch.cartesian_prod(axis, axis)


def errors(probabilities: dict[str, Tensor]) -> dict[str, tuple[float, float]]:
    """Return the largest and the mean distance from the exact probability."""
    gaps = {name: (probs - probabilities["exact"]).abs() for name, probs in probabilities.items() if name != "exact"}
    return {name: (float(gap.max()), float(gap.mean())) for name, gap in gaps.items()}


def picture(study: Study, path: Path) -> None:
    """Draw the probabilities of the network, of Laplace and of the exact posterior, and the marginal of a weight."""
    figure = Figure(figsize=(9.4, 8.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(2, 2).flatten()
    probabilities = study.probabilities(window())
    gaps = errors(probabilities)
    for axis, name in zip(axes, ("plain network", "Laplace, probit", "exact"), strict=False):
        _contours(axis, study, probabilities[name])
        note = f"furthest from exact: {gaps[name][0]:.3f}" if name in gaps else "quadrature over the weights"
        axis.set_title(f"{name}\n{note}", fontsize=10.5)
    axes[0].legend(loc="lower left", fontsize=9, framealpha=0.9)
    _marginal(axes[3], study)
    save(figure, path)


def _contours(axis: Any, study: Study, probs: Tensor) -> None:
    count = math.isqrt(len(probs))
    ticks = torch.linspace(-WINDOW, WINDOW, count).tolist()
    grid = probs.reshape(count, count).mT.tolist()
    axis.contourf(ticks, ticks, grid, [0, *LEVELS, 1], cmap="RdBu", vmin=-0.35, vmax=1.35)
    lines = axis.contour(ticks, ticks, grid, list(LEVELS), colors=EXACT, linewidths=[1, 1, 2, 1, 1])
    places = []
    for level, height in LEVELS.items():
        row = grid[round((height + WINDOW) / (2 * WINDOW) * (count - 1))]
        places.append((min(zip(ticks, row, strict=True), key=lambda pair: abs(pair[1] - level))[0], height))
    axis.clabel(lines, fmt="%g", fontsize=9, manual=places)
    for label, marker, colour in ((0, "o", PLAIN), (1, "s", LAPLACE)):
        points = study.x[study.y[:, 0] == label]
        style = {"s": 26, "color": colour, "marker": marker, "edgecolors": "white", "linewidths": 0.6, "zorder": 3}
        axis.scatter(points[:, 0].tolist(), points[:, 1].tolist(), label=f"class {label}", **style)
    axis.set(xlabel="$x_1$", ylabel="$x_2$", aspect="equal", xlim=(-WINDOW, WINDOW), ylim=(-WINDOW, WINDOW))


def _marginal(axis: Any, study: Study) -> None:
    values, exact = exact_posterior(study.x, study.y, PRIOR_PRECISION, (161, 33, 33)).first
    mode, std = weights_of(study.model)[0], by_hand(study.x, study.y, PRIOR_PRECISION).covariance[0, 0].sqrt()
    line = torch.linspace(-1.0, 6.0, 300, dtype=torch.float64)
    laplace = torch.distributions.Normal(mode, std).log_prob(line).exp()
    axis.fill_between(values.tolist(), exact.tolist(), color=EXACT, alpha=0.12, linewidth=0)
    axis.plot(values.tolist(), exact.tolist(), color=EXACT, linewidth=2, label="exact")
    axis.plot(line.tolist(), laplace.tolist(), color=LAPLACE, linewidth=2, linestyle="--", label="Laplace")
    axis.axvline(float(mode), color=PLAIN, linewidth=1.5, label="trained weight")
    axis.set(xlabel="weight of $x_1$", ylabel="density", xlim=(-1.0, 6.0))
    axis.set_ylim(bottom=0)
    evidence = f"Laplace {float(study.laplace.log_evidence()):.2f}, exact {study.exact.log_evidence:.2f}"
    axis.set_title("posterior of one weight\nlog evidence: " + evidence.replace("-", "−"), fontsize=10.5)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, fontsize=9)


def wins(seeds: range = range(10)) -> tuple[int, int]:
    """Count the data sets on which probit is closer to the exact probability than the network, by both distances."""
    worst, mean = 0, 0
    for seed in seeds:
        gaps = errors(study(seed, counts=(37, 37, 37)).probabilities(window(21)))
        worst += gaps["Laplace, probit"][0] < gaps["plain network"][0]
        mean += gaps["Laplace, probit"][1] < gaps["plain network"][1]
    return worst, mean


def main(out: Path) -> Study:
    """Print the comparison, draw the picture, return the study."""
    result = study()
    gaussian = by_hand(result.x, result.y, PRIOR_PRECISION)
    print(f"log evidence: exact {result.exact.log_evidence:.4f}, Laplace {float(result.laplace.log_evidence()):.4f}\n")
    print("weight   trained  exact mean  exact std  Laplace std")
    rows = (weights_of(result.model), result.exact.mean, result.exact.std, gaussian.covariance.diagonal().sqrt())
    for name, *row in zip(("w1", "w2", "b"), *(values.tolist() for values in rows), strict=True):
        print(f"{name:6}  {row[0]:8.3f}  {row[1]:10.3f}  {row[2]:9.3f}  {row[3]:11.3f}")
    print("\ndistance from the exact probability  largest   mean")
    for name, (largest, mean) in errors(result.probabilities(window())).items():
        print(f"{name:35}  {largest:7.3f}  {mean:5.3f}")
    worst, mean_wins = wins()
    print(f"\nprobit nearer than the network, of ten data sets: largest {worst}, mean {mean_wins}")
    out.mkdir(parents=True, exist_ok=True)
    picture(result, out / "logistic_regression.png")
    return result


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Bayesian logistic regression, Laplace against the exact posterior.")
    parser.add_argument("out", type=Path, nargs="?", default=Path("docs/images"), help="folder for the picture")
    main(parser.parse_args().out)
