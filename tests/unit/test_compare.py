"""Models compared by their evidence: the ranking, what it is made of, and what must not be compared."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lapwing as lw
from lapwing.posteriors.mixture import MixturePosterior
from tests import problems
from tests.cases import BY_NAME
from tests.references.linear_regression import regress
from tests.tolerances import assert_close

D = torch.float64
MLP = BY_NAME["mlp"]
N = 24


def inputs() -> Tensor:
    return torch.linspace(-2, 2, N, dtype=D)[:, None]


def noisy(f: Tensor, std: float = 0.1) -> Tensor:
    return f + std * torch.randn(f.shape, dtype=D, generator=torch.Generator().manual_seed(1))


def polynomial(degree: int, y: Tensor, prior: float = 1.0, std: float = 0.1) -> lw.Fitted:
    """A linear model of powers of x at its posterior mean, where its evidence is exact."""
    powers = torch.cat([inputs() ** k for k in range(degree + 1)], 1)
    exact = regress(powers, y[:, 0], torch.full((degree + 1,), prior, dtype=D), torch.full((N,), std**2, dtype=D))
    model = nn.Linear(degree + 1, 1, bias=False).double()
    model.weight.data = exact.mean[None].clone()
    return lw.fit(model, [(powers, y)], lw.Gaussian(noise_std=std), method=lw.Full(), prior=prior)


def marginal(degree: int, y: Tensor, prior: float = 1.0, std: float = 0.1) -> float:
    powers = torch.cat([inputs() ** k for k in range(degree + 1)], 1)
    given = torch.full((degree + 1,), prior, dtype=D), torch.full((N,), std**2, dtype=D)
    return float(regress(powers, y[:, 0], *given).log_evidence)


def classifier(method: Any = None, prior: Any = 1.0, likelihood: Any = "classification", size: int = 6) -> lw.Fitted:
    data = problems.split(MLP.batch(6), problems.targets(MLP, 6), (3, 1, 2))[: 3 if size == 6 else 2]
    return lw.fit(MLP.build(), data, likelihood, method=method, prior=prior)


def test_ranked_by_the_exact_marginal_likelihood() -> None:
    """Polynomials for a cubic: the evidence prefers neither the line nor the seventh degree."""
    x = inputs()
    y = noisy(0.5 * x**3 - x)
    degrees = (1, 7, 3, 2)
    comparison = lw.compare({str(d): polynomial(d, y) for d in degrees})
    expected = {str(d): marginal(d, y) for d in degrees}
    assert comparison.best == "3"
    assert [c.name for c in comparison.candidates] == sorted(expected, key=lambda name: -expected[name])
    for candidate in comparison.candidates:
        assert candidate.log_evidence == pytest.approx(expected[candidate.name], rel=1e-9)
        assert candidate.weights == int(candidate.name) + 1
    by_name = {c.name: c for c in comparison.candidates}
    assert by_name["7"].fit > by_name["3"].fit > by_name["1"].fit  # the fit alone would take the largest
    assert by_name["7"].complexity > by_name["3"].complexity > by_name["1"].complexity


def test_fit_less_complexity_is_the_evidence() -> None:
    y = noisy(inputs().sin())
    models = {str(d): polynomial(d, y) for d in (1, 3, 5)}
    for candidate in lw.compare(models).candidates:
        assert candidate.fit - candidate.complexity == pytest.approx(candidate.log_evidence, abs=1e-10)
        powers = torch.cat([inputs() ** k for k in range(int(candidate.name) + 1)], 1)
        weights = models[candidate.name].network.model.weight.detach()
        normal = torch.distributions.Normal(powers @ weights.T, 0.1)
        assert candidate.fit == pytest.approx(float(normal.log_prob(y).sum()), rel=1e-10)
        assert candidate.complexity > 0
        values = torch.linalg.eigvalsh(powers.T @ powers / 0.01)
        assert candidate.gamma == pytest.approx(float((values / (values + 1)).sum()), rel=1e-9)
        occam = 0.5 * float((1 + values).log().sum() + weights.square().sum())
        assert candidate.complexity == pytest.approx(occam, rel=1e-9)


def test_probabilities_are_odds_by_the_evidence() -> None:
    y = noisy(0.2 * inputs(), std=1.0)
    comparison = lw.compare({str(d): polynomial(d, y, std=1.0) for d in (0, 1, 2)})
    probabilities = torch.tensor([c.probability for c in comparison.candidates], dtype=D)
    evidences = torch.tensor([c.log_evidence for c in comparison.candidates], dtype=D)
    assert float(probabilities.sum()) == pytest.approx(1, abs=1e-14)
    assert_close(probabilities, evidences.softmax(0))
    assert float(probabilities.min()) > 1e-3  # near enough for the odds to say something
    assert probabilities.tolist() == sorted(probabilities.tolist(), reverse=True)


def test_hopeless_candidates_have_no_probability_and_no_overflow() -> None:
    comparison = lw.compare({"good": classifier(), "bad": classifier(prior=1e7)})
    assert comparison.candidates[1].log_evidence < comparison.candidates[0].log_evidence - 1e6
    assert [c.probability for c in comparison.candidates] == [1.0, 0.0]


@pytest.mark.parametrize("method", [lw.Full(), lw.Kron(), lw.EKron(), lw.Diagonal(), lw.LowRank(rank=7)])
def test_of_every_method(method: Any) -> None:
    fitted = classifier(method)
    comparison = lw.compare({"one": fitted, "tuned": fitted.tuned()})
    assert comparison.best == "tuned"
    one = comparison.candidates[1]
    assert one.gamma == pytest.approx(fitted.effective_parameters().total)
    nll = nn.functional.cross_entropy(MLP.build()(MLP.batch(6)), problems.targets(MLP, 6), reduction="sum")
    assert one.fit == pytest.approx(-float(nll.detach()), rel=1e-9)
    assert one.weights == 83


# Evidences that are estimated.


def sampled(seed: int, probes: int = 4, prior: float = 1.0) -> lw.Fitted:
    """A hundred and some weights of which a narrow basis sees little: the log-determinant is mostly an estimate."""
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(3, 30), nn.Tanh(), nn.Linear(30, 1)).double()
    x = torch.randn(80, 3, dtype=D)
    method = lw.Sampled(num_samples=2, width=2, probes=probes, steps=3, tolerance=0.3)
    generator = torch.Generator().manual_seed(seed)
    return lw.fit(model, [(x, x[:, :1].sin())], lw.Gaussian(noise_std=0.1), method=method, prior=prior,
                  generator=generator)  # fmt: skip


def stated(value: float, error: float) -> Any:
    """A fitted posterior that states this evidence and error."""

    class Stated(lw.Fitted):
        evidence_error = error

        def log_evidence(self) -> Tensor:
            return torch.tensor(value, dtype=D)

    fitted = classifier()
    return Stated(fitted.posterior, fitted.fingerprint)


def test_the_same_network_under_other_seeds_is_not_ranked() -> None:
    """However far apart the estimates are, they are within their errors."""
    fits = {f"seed {seed}": sampled(seed) for seed in range(4)}
    comparison = lw.compare(fits)
    errors = {name: fitted.evidence_error for name, fitted in fits.items()}
    assert {c.name: c.error for c in comparison.candidates} == errors
    assert min(errors.values()) > 0
    evidences = torch.tensor([c.log_evidence for c in comparison.candidates], dtype=D)
    assert comparison.candidates[0].probability != pytest.approx(float(evidences.softmax(0)[0]), abs=1e-3)
    assert comparison.candidates[0].probability < 0.9
    assert sum(c.probability for c in comparison.candidates) == pytest.approx(1, abs=1e-12)
    assert comparison.findings[0].startswith(f"{comparison.best} leads ")
    assert comparison.findings[0].endswith("Raise probes= and steps= of Sampled(), or use an exact method.")


def test_a_lead_within_the_errors_is_not_certain() -> None:
    """Estimates of one network by four seeds, as found: from them alone the first would have all of the odds."""
    values = (-100.2, 38.8), (-125.8, 38.5), (-134.1, 38.8), (-150.5, 36.8)
    comparison = lw.compare({str(i): stated(*pair) for i, pair in enumerate(values)})
    assert all(0.02 < c.probability < 0.6 for c in comparison.candidates)
    exact = lw.compare({str(i): stated(value, 0.0) for i, (value, _) in enumerate(values)})
    first = 1 / sum(math.exp(value + 100.2) for value, _ in values)
    assert exact.candidates[0].probability == pytest.approx(first, rel=1e-12)
    assert "error" not in str(exact)


def test_probabilities_are_averaged_over_gaussian_errors() -> None:
    """Of two: the mean of a sigmoid under a Gaussian, by quadrature."""
    comparison = lw.compare({"a": stated(-3.0, 3.0), "b": stated(-5.0, 4.0)})
    gap = torch.linspace(2 - 60, 2 + 60, 20_001, dtype=D)
    density = torch.distributions.Normal(torch.tensor(2.0, dtype=D), 5.0).log_prob(gap).exp()
    expected = float(torch.trapezoid(gap.sigmoid() * density, gap))
    assert [c.name for c in comparison.candidates] == ["a", "b"]
    assert comparison.candidates[0].probability == pytest.approx(expected, abs=5e-3)


def test_the_order_of_the_mapping_does_not_matter() -> None:
    fits = {"a": stated(-3.0, 3.0), "b": stated(-5.0, 4.0), "c": stated(-4.0, 0.0)}
    one, other = lw.compare(fits), lw.compare(dict(reversed(fits.items())))
    assert one.candidates == other.candidates
    assert one.findings[0] == other.findings[0]


def test_what_the_errors_leave_open_is_said() -> None:
    comparison = lw.compare(
        {"a": stated(-3.0, 3.0), "b": stated(-17.9, 4.0), "c": stated(-18.1, 4.0), "d": stated(-9.0, 0.0)}
    )
    assert comparison.findings[0].startswith(
        "a leads d by 6 +- 3 nats, b by 15 +- 5 nats: within 3 standard errors of the estimated evidences, so this "
        "order is not decided."
    )
    assert lw.compare({"a": stated(-3.0, 3.0), "c": stated(-18.1, 4.0)}).findings == ()


# What γ says.


def test_the_smaller_network_suffices_where_gamma_is_the_same() -> None:
    """A feature that is zero on all data adds a weight, of which the data decide nothing."""
    x, y = torch.randn(N, 3, dtype=D), torch.randn(N, 1, dtype=D)
    wide = torch.cat([x, torch.zeros(N, 2, dtype=D)], 1)
    small = lw.fit(nn.Linear(3, 1).double(), [(x, y)], lw.Gaussian(noise_std=3.0), method=lw.Full(), prior=5.0)
    large = lw.fit(nn.Linear(5, 1).double(), [(wide, y)], lw.Gaussian(noise_std=3.0), method=lw.Full(), prior=5.0)
    assert small.effective_parameters().total < 0.8 * 4
    (finding,) = lw.compare({"large": large, "small": small}).findings
    gamma = small.effective_parameters().total
    assert finding == (
        f"large has 6 weights and gamma {gamma:.1f}, small 4 and {gamma:.1f}: the data decide no more of the larger, "
        "so the smaller one suffices."
    )


def test_a_network_may_be_too_small() -> None:
    y = noisy(0.5 * inputs() ** 3 - inputs())
    comparison = lw.compare({"line": polynomial(1, y), "cubic": polynomial(3, y)})
    small = [text for text in comparison.findings if text.startswith("line: gamma is 2.0 of 2 weights")]
    assert len(small) == 1
    assert "too small" in small[0]


def test_nothing_is_said_without_reason() -> None:
    """γ well below P, and growing with the network; two of one size are not compared by it."""
    x = torch.randn(N, 6, dtype=D)
    y = torch.randn(N, 1, dtype=D)
    models = {}
    for name, size in (("two", 2), ("six", 6), ("again", 6)):
        models[name] = lw.fit(nn.Linear(size, 1).double(), [(x[:, :size], y)], lw.Gaussian(noise_std=2.0),
                              method=lw.Full(), prior=6.0)  # fmt: skip
        assert models[name].effective_parameters().total < 0.7 * (size + 1)
    comparison = lw.compare(models)
    assert comparison.findings == ()
    assert len(str(comparison).splitlines()) == 5


# What must not be compared.


def test_nothing_to_compare_is_refused() -> None:
    with pytest.raises(lw.errors.DataError, match=r"posteriors is {}; expected a mapping from names"):
        lw.compare({})
    with pytest.raises(lw.errors.DataError, match=r"expected a mapping from names to fitted"):
        lw.compare([classifier()])  # type: ignore[arg-type]


def test_different_data_are_refused() -> None:
    with pytest.raises(
        lw.errors.DataError, match=r"different numbers of data: \{'six': 6, 'four': 4\}.*Fit all of them"
    ):
        lw.compare({"six": classifier(), "four": classifier(size=4)})


def test_different_likelihoods_are_refused() -> None:
    other = lw.fit(MLP.build(), [(MLP.batch(6), torch.randn(6, 3, dtype=D))], "regression", prior=1.0)
    with pytest.raises(lw.errors.DataError, match=r"different likelihoods: \{'a': 'Categorical', 'b': 'Gaussian'\}"):
        lw.compare({"a": classifier(), "b": other})


def test_without_an_evidence_it_is_refused() -> None:
    with pytest.raises(lw.errors.UnsupportedError, match="MapOnly has no evidence"):
        lw.compare({"plain": classifier(lw.baselines.MapOnly()), "kron": classifier()})


def test_a_model_that_changed_is_refused() -> None:
    fitted = classifier()
    fitted.network.model[0].weight.data += 1
    with pytest.raises(lw.errors.ModelError):
        lw.compare({"changed": fitted})


# Printing.


def test_as_a_table() -> None:
    y = noisy(0.5 * inputs() ** 3 - inputs())
    comparison = lw.compare({"a line": polynomial(1, y), "a rather long name": polynomial(3, y)})
    head, *rows = str(comparison).splitlines()
    assert head.split() == ["model", "log", "evidence", "fit", "complexity", "weights", "gamma", "probability"]
    assert rows[0].startswith("a rather long name ")
    assert rows[1].startswith("a line ")
    best = comparison.candidates[0]
    assert rows[0].removeprefix("a rather long name").split() == [
        f"{best.log_evidence:.2f}", f"{best.fit:.2f}", f"{best.complexity:.2f}", "4", f"{best.gamma:.1f}", "1.000",
    ]  # fmt: skip
    assert len({len(row) for row in (head, *rows[:2])}) == 1  # columns line up
    assert rows[2].startswith("The log evidence is the fit less the complexity; gamma is ")
    assert rows[3:] == list(comparison.findings)
    assert math.isclose(sum(c.probability for c in comparison.candidates), 1)


@pytest.mark.parametrize("method", [lw.Kron(), lw.Sampled(num_samples=2, width=2, probes=4, steps=3, tolerance=0.3)])
def test_mixtures_are_compared_by_the_posterior_that_they_vary(method: Any) -> None:
    x = torch.randn(80, 3, dtype=D)
    model = nn.Sequential(nn.Linear(3, 10), nn.Tanh(), nn.Linear(10, 1)).double()
    mixture = lw.fit(model, [(x, x[:, :1].sin())], "regression", method=method)
    assert isinstance(mixture.posterior, MixturePosterior)
    row = lw.compare({"mixture": mixture}).candidates[0]
    alone = lw.compare({"base": lw.Fitted(mixture.base, mixture.fingerprint)}).candidates[0]
    assert replace(row, name="base") == alone
    assert row.error == mixture.evidence_error == lw.Fitted(mixture.base, mixture.fingerprint).evidence_error
    assert (row.error > 0) == isinstance(method, lw.Sampled)
