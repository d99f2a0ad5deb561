"""A linear bandit with Thompson sampling, on ``lw.linear.fit``.

A bandit has many arms. Pulling an arm gives its reward plus noise; the aim is a large sum of rewards over all pulls.
The reward is linear in features of the arm, with unknown weights, so that every pull gives information about every arm.
Pulls come in batches: the rewards of a batch are known when the whole batch is done.

- *greedy* chooses the arm that is best under the mean of the posterior, for the whole batch;
- *Thompson sampling* draws one set of weights from the posterior for each pull and chooses the arm that is best under
  it. So each arm is pulled with the probability that it is the best. This needs samples, and neither variances of arms
  nor covariances between them;
- *exact* is Thompson sampling with samples of the exact posterior over all arms, by matrices.

``lw.linear.fit`` computes the mean and the samples from products with the features alone. There are two bandits:

- *twenty features*: five hundred arms with random features, weights from the prior. It is small, so that every strategy
  can be repeated for many bandits. One more strategy does not know the prior precision and the noise, and learns them;
- *a hundred thousand features*: arms are points of a square, and the reward is a smooth function of the point. A model
  that is linear in random Fourier features (Rahimi and Recht 2007) approximates it. The features of the pulls are an
  ``lw.linear.OperatorDesign``, computed for each product and not stored. The covariance of the weights would have 10¹⁰
  entries, 80 GB. For a check there is the Gaussian process whose kernel the features approximate; it works with
  matrices of arms and pulls, which are few here.

Every strategy starts with the same batch of random arms and has the same noise.

Run it with ``python docs/tutorials/bandit.py [folder]``: it prints the regrets and draws bandit.png.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from bandits import Bandit, linear, smooth
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from torch import Tensor

import lapwing as lw
from lapwing.demo.result import save

INK, PALE = "#333333", "#9a9a9a"
STYLES = {
    "uniform": (PALE, "-"), "greedy": ("#d55e00", "-"), "Thompson": ("#0072b2", "-"),
    "Thompson, learned": ("#009e73", "-."), "exact Thompson": (INK, ":"),
}  # fmt: skip


Strategy = Callable[[Bandit, Tensor, Tensor, int, torch.Generator], Tensor]  # pulls and rewards so far: the next batch


def uniform(bandit: Bandit, pulls: Tensor, rewards: Tensor, batch: int, generator: torch.Generator) -> Tensor:
    return torch.randint(0, len(bandit.value), (batch,), generator=generator)


def greedy(bandit: Bandit, pulls: Tensor, rewards: Tensor, batch: int, generator: torch.Generator) -> Tensor:
    posterior = bandit.posterior(pulls, rewards, 1, generator)
    return bandit.scores(posterior.mean[None]).argmax(1).expand(batch)


def thompson(bandit: Bandit, pulls: Tensor, rewards: Tensor, batch: int, generator: torch.Generator) -> Tensor:
    posterior = bandit.posterior(pulls, rewards, batch, generator)
    return bandit.scores(posterior.samples()).argmax(1)


def learned(bandit: Bandit, pulls: Tensor, rewards: Tensor, batch: int, generator: torch.Generator) -> Tensor:
    """Learn precision and noise by expectation maximisation, once there are two pulls for each feature.

    Before, both are one: with fewer pulls than features the weights can explain every reward, so that the noise cannot
    be learned.
    """
    guess = None if len(pulls) >= 2 * bandit.root.shape[1] else 1.0
    posterior = bandit.posterior(pulls, rewards, batch, generator, precision=guess, noise_std=guess)
    return bandit.scores(posterior.samples()).argmax(1)


def exact(bandit: Bandit, pulls: Tensor, rewards: Tensor, batch: int, generator: torch.Generator) -> Tensor:
    """Choose by samples of the exact posterior: samples of the prior plus a correction (Matheron's rule)."""
    prior = torch.randn(batch, bandit.root.shape[1], generator=generator, dtype=torch.float64) @ bandit.root.mT
    noise = bandit.noise_std * torch.randn(batch, len(pulls), generator=generator, dtype=torch.float64)
    return (prior + conditional_mean(bandit, pulls, rewards - prior[:, pulls] - noise)).argmax(1)


def exact_greedy(bandit: Bandit, pulls: Tensor, rewards: Tensor, batch: int, generator: torch.Generator) -> Tensor:
    return conditional_mean(bandit, pulls, rewards[None]).argmax(1).expand(batch)


def conditional_mean(bandit: Bandit, pulls: Tensor, rewards: Tensor) -> Tensor:
    """Return the mean of the values of all arms, (S, A), given rewards (S, n)."""
    rows = bandit.root[pulls]
    kernel = rows @ rows.mT + bandit.noise_std**2 * torch.eye(len(pulls), dtype=torch.float64)
    return torch.linalg.solve(kernel, rewards.mT).mT @ rows @ bandit.root.mT


@dataclass(frozen=True, eq=False)
class Played:
    """The pulls and rewards of a game."""

    bandit: Bandit
    pulls: Tensor  # (T,)
    rewards: Tensor  # (T,)

    @cached_property
    def regret(self) -> Tensor:
        """The difference between the best arm and each pull, (T,), without noise."""
        return self.bandit.value.max() - self.bandit.value[self.pulls]


def play(bandit: Bandit, strategy: Strategy, batch: int, rounds: int, seed: int) -> Played:
    """Pull a random batch, then batches by the strategy."""
    generator = torch.Generator().manual_seed(10_000 + seed)
    noise = bandit.noise_std * torch.randn(rounds, batch, generator=generator, dtype=torch.float64)
    pulls = uniform(bandit, torch.empty(0), torch.empty(0), batch, generator)
    rewards = bandit.value[pulls] + noise[0]
    for errors in noise[1:]:
        more = strategy(bandit, pulls, rewards, batch, generator)
        pulls, rewards = torch.cat([pulls, more]), torch.cat([rewards, bandit.value[more] + errors])
    return Played(bandit, pulls, rewards)


Results = Mapping[str, list[Played]]  # by strategy, a game for each seed


def compared(
    make: Callable[[int], Bandit], strategies: Mapping[str, Strategy], batch: int, rounds: int, seeds: int
) -> Results:
    bandits = [make(seed) for seed in range(seeds)]
    return {
        name: [play(bandit, strategy, batch, rounds, seed) for seed, bandit in enumerate(bandits)]
        for name, strategy in strategies.items()
    }


def table(results: Results, batch: int) -> str:
    """Return a table of the total regret: mean over the bandits, standard error, worst; regret of the last batch.

    The last column counts the bandits on which the regret is above that of Thompson sampling.
    """
    lines = [f"{'':17s}  regret  ± error   worst  last batch, each  above Thompson"]
    thompson = torch.stack([game.regret.sum() for game in results.get("Thompson", results["exact Thompson"])])
    for name, games in results.items():
        regrets = torch.stack([game.regret for game in games])
        total = regrets.sum(1)
        error = float(total.std()) / len(total) ** 0.5 if len(total) > 1 else math.inf
        last, above = float(regrets[:, -batch:].mean()), f"{int((total > thompson).sum())} of {len(total)}"
        numbers = f"{float(total.mean()):6.1f}  {error:7.1f}  {float(total.max()):6.1f}  {last:16.3f}"
        lines.append(f"{name:17s}  {numbers}  {above:>14s}")
    return "\n".join(lines)


@dataclass(frozen=True, eq=False)
class Known:
    """The posterior after a game, by products, and γ and evidence exactly, from the kernel of its features."""

    posterior: lw.linear.LinearPosterior
    gamma: float
    log_evidence: float


def known(game: Played) -> Known:
    bandit, pulls = game.bandit, game.pulls
    posterior = bandit.posterior(pulls, game.rewards, 64, torch.Generator().manual_seed(0))
    eye = torch.eye(len(pulls), dtype=torch.float64)
    design = bandit.features(pulls)
    rows = design if isinstance(design, Tensor) else design.back(eye)
    kernel = (rows @ rows.mT).double()
    covariance = kernel + bandit.noise_std**2 * eye
    gamma = float(torch.linalg.solve(covariance, kernel).trace())
    exactly = torch.distributions.MultivariateNormal(torch.zeros_like(game.rewards), covariance)
    return Known(posterior, gamma, float(exactly.log_prob(game.rewards)))


def learned_at_the_end(games: list[Played]) -> str:
    """Return precision and noise learned from all rewards of a game: mean and standard deviation over the games."""
    generator, given = torch.Generator().manual_seed(0), {"precision": None, "noise_std": None}
    posteriors = [game.bandit.posterior(game.pulls, game.rewards, 16, generator, **given) for game in games]
    precision = torch.tensor([posterior.precision for posterior in posteriors])
    noise = torch.tensor([posterior.noise_variance**0.5 for posterior in posteriors])
    parts = [f"{float(values.mean()):.2f} ± {float(values.std(correction=0)):.2f}" for values in (precision, noise)]
    return f"learned at the end: precision {parts[0]} (true: 1), noise {parts[1]} (true: {games[0].bandit.noise_std})"


def picture(small: Results, large: Results, columns: int, path: Path) -> None:
    """Draw the regret against pulls for both bandits, and the pulls of two strategies in the square."""
    figure = Figure(figsize=(11.6, 10.0), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(2, 2).flatten()
    titles = ("20 features, 500 arms", f"{columns:,} features, points of a square")
    for axis, results, title in zip(axes, (small, large), titles, strict=False):
        _regret(axis, results)
        axis.set_title(f"{title}\nmean over {len(results['greedy'])} bandits, and two standard errors", fontsize=10.5)
    for axis, name in zip(axes[2:], ("greedy", "Thompson"), strict=True):
        game = large[name][0]
        marks = _pulled(axis, game, STYLES[name][0])
        note = f"first bandit of the square, {name}: regret {float(game.regret.sum()):.1f}"
        axis.set_title(f"{note}\nrings: pulls, larger where there are more; star: the best arm", fontsize=10.5)
    figure.colorbar(marks, ax=axes[3], label="reward of the arm, without noise", shrink=0.9)
    save(figure, path)


def _regret(axis: Any, results: Results) -> None:
    """Draw cumulative regrets. The curve of uniform pulls leaves the panel; otherwise the others would look flat."""
    for name, games in results.items():
        colour, line = STYLES[name]
        sums = torch.stack([game.regret for game in games]).cumsum(1)
        mean, error = sums.mean(0), 2 * sums.std(0, correction=min(1, len(sums) - 1)) / len(sums) ** 0.5
        places, low, high = range(1, len(mean) + 1), (mean - error).tolist(), (mean + error).tolist()
        axis.fill_between(places, low, high, color=colour, alpha=0.15, linewidth=0)
        axis.plot(places, mean.tolist(), color=colour, linestyle=line, linewidth=2, label=name)
    top = 1.4 * max(float(game.regret.sum()) for game in results["Thompson"])
    others = torch.stack([game.regret.sum() for game in results["greedy"]]).mean()
    axis.set(xlabel="pulls", ylabel="cumulative regret", xlim=(0, len(mean)), ylim=(0, max(top, 1.3 * float(others))))
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, fontsize=9)


def _pulled(axis: Any, game: Played, colour: str) -> Any:
    places, value = game.bandit.places, game.bandit.value
    if places is None:
        raise ValueError("these arms have no places; expected a bandit of points.")
    x, y = places.mT.tolist()
    low = float(value.quantile(0.02))
    shade: dict[str, Any] = {"cmap": "Greys", "vmin": low, "edgecolors": PALE, "linewidths": 0.4}
    marks = axis.scatter(x, y, c=value.tolist(), s=18, **shade)
    for arm, count in zip(*(part.tolist() for part in game.pulls.unique(return_counts=True)), strict=True):
        size = 45 * count**0.6
        axis.scatter(x[arm], y[arm], s=size, facecolors="none", edgecolors=colour, linewidths=1.6, zorder=3)
    best = int(value.argmax())
    axis.plot(x[best], y[best], "*", color="#e69f00", markersize=15, markeredgecolor="white", zorder=4)
    axis.set(xlabel="$x_1$", ylabel="$x_2$", xlim=(-0.04, 1.04), ylim=(-0.04, 1.04), aspect="equal")
    return marks


def main(
    out: Path,
    seeds: tuple[int, int, int] = (20, 4, 100),
    rounds: tuple[int, int] = (30, 9),
    batches: tuple[int, int] = (10, 16),
    columns: int = 100_000,
) -> tuple[Results, Results, Known]:
    """Print the regrets, draw the picture, return the games of both bandits and what is known after one of them.

    ``seeds``: how many bandits of either kind, and how many of the second for the Gaussian process alone.
    """
    strategies: dict[str, Strategy] = {
        "uniform": uniform, "greedy": greedy, "Thompson": thompson, "exact Thompson": exact,
    }  # fmt: skip
    small = compared(linear, {**strategies, "Thompson, learned": learned}, batches[0], rounds[0], seeds[0])
    print(f"20 features, 500 arms: {rounds[0]} batches of {batches[0]} pulls, {seeds[0]} bandits")
    print(table(small, batches[0]))
    print(learned_at_the_end(small["Thompson, learned"]))
    square = lambda seed: smooth(seed, columns=columns)
    large = compared(square, strategies, batches[1], rounds[1], seeds[1])
    print(f"\n{columns:,} features, 1,000 arms: {rounds[1]} batches of {batches[1]} pulls, {seeds[1]} bandits")
    print(table(large, batches[1]))
    many = compared(square, {"exact greedy": exact_greedy, "exact Thompson": exact}, batches[1], rounds[1], seeds[2])
    print(f"\nthe same by the Gaussian process alone, {seeds[2]} bandits")
    print(table(many, batches[1]))
    exactly = known(large["Thompson"][0])
    (gamma, gamma_error), (evidence, evidence_error) = exactly.posterior.gamma, exactly.posterior.log_evidence()
    print(f"\nafter the {len(large['Thompson'][0].pulls)} pulls of Thompson on the first")
    print("              by products  ± error   exact")
    print(f"gamma         {gamma:11.2f}  {gamma_error:7.2f}  {exactly.gamma:6.2f}")
    print(f"log evidence  {evidence:11.2f}  {evidence_error:7.2f}  {exactly.log_evidence:6.2f}")
    out.mkdir(parents=True, exist_ok=True)
    picture(small, large, columns, out / "bandit.png")
    return small, large, exactly


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="A linear bandit with Thompson sampling.")
    parser.add_argument("out", type=Path, nargs="?", default=Path("docs/images"), help="folder for the picture")
    main(parser.parse_args().out)
