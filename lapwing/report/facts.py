"""How a posterior came about: configuration, findings, versions, as rows of tables."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from lapwing.errors import LapwingError

PACKAGES = ("lapwing", "torch", "matplotlib", "jinja2")


def configuration(posterior: Any) -> dict[str, str]:
    """Return method, weights, likelihood, prior, noise and tuner in words."""
    selection, base, trace = posterior.network.selection, posterior.base, posterior.trace
    total = sum(p.numel() for p in posterior.network.model.parameters())
    prior, centre = base.problem.prior, "" if posterior.posterior is base else " at the centre of the mixture"
    facts = {
        "model": type(posterior.network.model).__name__,
        "method": posterior.method or type(base).__name__,
        "weights with error bars": f"{selection.size:,} of {total:,}",
        "likelihood": type(posterior.likelihood).__name__,
        "prior": f"{type(getattr(prior, 'given', prior)).__name__}, precision {_numbers(prior.values)}{centre}",
    }
    if posterior.why:
        facts["reason for the method"] = posterior.why
    if posterior.likelihood.noise_variance is not None:
        facts["noise variance"] = _numbers(posterior.likelihood.noise_variance)
    facts["hyperparameters"] = f"by {trace.tuner}" if trace is not None and trace.tuner else "as given, not tuned"
    if posterior.posterior is not base:
        facts["mixture"] = posterior.posterior.described()
    return facts


def findings(posterior: Any) -> list[str]:
    """Return the remarks of the posterior, of its tuner and on the size of its network."""
    return [*posterior.findings, *_advice(posterior)]


def _advice(posterior: Any) -> Iterator[str]:
    try:
        yield from posterior.effective_parameters().findings
    except LapwingError:
        return


def versions() -> dict[str, str]:
    """Return the versions of everything that could change the numbers."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = str(torch.__version__) if name == "torch" else version(name)
        except PackageNotFoundError:
            found[name] = "not installed as a package"
    return found


def _numbers(values: torch.Tensor) -> str:
    """Return up to three numbers as text, and their range if there are more."""
    flat = values.detach().double().flatten()
    if len(flat) <= 3:
        return ", ".join(f"{value:.3g}" for value in flat.tolist())
    return f"{float(flat.min()):.3g} to {float(flat.max()):.3g} ({len(flat):,} of them)"
