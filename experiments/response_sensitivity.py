"""How the variance of HFL depends on the strength of the push and on the length of fine-tuning."""

from __future__ import annotations

import torch

import lapwing as lw
from experiments.minimum import exact_variance
from experiments.response_task import Problem
from lapwing.data.batches import Data
from lapwing.methods.hfl import ResponsePosterior
from lapwing.methods.hfl_response import Hessian, Objective, Pushes, Responder

STRENGTHS = tuple(10.0 ** (1 - k / 2) for k in range(21))  # ten decades


def strengths(problem: Problem) -> dict[str, list[float]]:
    """Return the relative error of the variance against the strength of the push times the standard deviation."""
    settings = problem.settings
    x = torch.linspace(-1.5 * settings.reach, 1.5 * settings.reach, 25, dtype=torch.float64).unsqueeze(1)
    arrays = {"strengths": list(STRENGTHS)}
    for dtype, label in ((torch.float64, "float64"), (torch.float32, "float32")):
        responder, posterior = _responder(problem, dtype)
        exact = exact_variance(posterior, x)
        inputs, seeds = x.to(dtype), torch.ones(len(x), 1, dtype=dtype)
        push = lambda d, o=responder.objective, i=inputs, s=seeds: o.slopes(d, i, s)
        read = lambda d, o=responder.objective, i=inputs: o.each_output(d.expand(len(i), -1), i)
        start = torch.zeros(len(x), responder.objective.size, dtype=dtype)
        pushes = Pushes.of(push, read, start, value=lambda outputs: outputs[:, 0])
        median, worst = [], []
        for strength in STRENGTHS:
            variance = responder.at(pushes, (strength / exact.sqrt()).to(dtype)).cov
            error = (variance[:, 0].double() / exact - 1).abs().nan_to_num(1e6).clamp(1e-16, 1e6)
            median.append(float(error.median()))
            worst.append(float(error.max()))
        arrays[f"median/{label}"], arrays[f"worst/{label}"] = median, worst
    return arrays


def _responder(problem: Problem, dtype: torch.dtype) -> tuple[Responder, ResponsePosterior]:
    """Return a responder in a dtype, around the minimum that was computed in float64."""
    posterior = problem.responses()
    exact = posterior.responder
    assert isinstance(exact, Responder)
    if dtype == torch.float64:
        return exact, posterior
    start = Objective.build(
        posterior.problem.network, posterior.problem.likelihood, posterior.problem.prior,
        Data([(problem.x, problem.y)], torch.device("cpu")), dtype,
    )  # fmt: skip
    objective = start.move_centre((exact.objective.centre - exact.objective.start).to(dtype))
    return Responder(objective, Hessian(objective), 1e-2), posterior


def fine_tuned(problem: Problem) -> tuple[dict[str, list[float]], list[str]]:
    """Return the share of the variance that Adam recovers, at the data, in the gap and outside, and notes about it."""
    settings = problem.settings
    places = {"data": 1.3, "gap": 0.2, "outside": 1.4 * settings.reach}
    x = torch.tensor(list(places.values()), dtype=torch.float64).unsqueeze(1)
    exact = exact_variance(problem.responses(), x)
    posteriors = [
        problem.responses(lw.HFL(solver="adam", steps=steps, batch_size=settings.data)) for steps in settings.steps
    ]
    shares = torch.stack([posterior.respond(x).cov[:, 0] / exact for posterior in posteriors])
    arrays = {"steps": [float(s) for s in settings.steps]}
    arrays |= {f"recovered/{name}": shares[:, i].tolist() for i, name in enumerate(places)}
    in_words = lambda row: ", ".join(f"{share:.0%} {name}" for share, name in zip(row.tolist(), places, strict=True))
    lines = [f"Adam, {steps} steps: {in_words(row)}" for steps, row in zip(settings.steps, shares, strict=True)]
    return arrays, lines


def cost(problem: Problem) -> str:
    """Say how many gradients over all data one prediction takes."""
    x = torch.linspace(-2, 2, 20, dtype=torch.float64).unsqueeze(1)
    steps = problem.responses().respond(x).steps
    return f"HFL, each point: {2 * steps} gradients over all data for each point (both signs, every strength)"
