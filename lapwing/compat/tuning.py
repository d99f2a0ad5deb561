"""The ways of laplace-torch to choose a prior precision: gradient steps on the evidence, and a grid search."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from lapwing.compat.names import LinkApprox, PriorStructure, TuningMethod, option
from lapwing.core.data import Data
from lapwing.core.progress import ProgressBar
from lapwing.core.settings import DATA, FLAG, NONE, POSITIVE, Rule, integer, is_real, nearest, require
from lapwing.errors import DataError, NumericalError, UnsupportedError
from lapwing.networks.forward import arithmetic_of

NUMBER = Rule("a finite number", lambda v: is_real(v) and math.isfinite(v))

LOSS = Rule(
    "a function, a metric with update() and compute(), or None",
    lambda v: v is None or callable(v) or (hasattr(v, "update") and hasattr(v, "compute")),
)


@dataclass(frozen=True, eq=False)
class Search:
    """The arguments of ``optimize_prior_precision`` besides ``pred_type`` and ``method``."""

    n_steps: int = 100
    lr: float = 1e-1
    init_prior_prec: Any = 1.0
    prior_structure: Any = "scalar"
    val_loader: Any = None
    loss: Any = None
    log_prior_prec_min: float = -4
    log_prior_prec_max: float = 4
    grid_size: int = 100
    link_approx: Any = "probit"
    n_samples: int = 100
    verbose: bool = False
    progress_bar: bool = False
    log_prior_prec_base: float = 10.0

    def __post_init__(self) -> None:
        require(
            self, n_steps=integer(1), lr=POSITIVE, val_loader=DATA | NONE, log_prior_prec_min=NUMBER,
            log_prior_prec_max=NUMBER, grid_size=integer(1), n_samples=integer(1), progress_bar=FLAG,
            log_prior_prec_base=POSITIVE, loss=LOSS,
        )  # fmt: skip
        option("prior_structure", self.prior_structure, PriorStructure)
        option("link_approx", self.link_approx, LinkApprox)

    @property
    def grid(self) -> Tensor:
        """The precisions of the grid search."""
        low, high = self.log_prior_prec_min, self.log_prior_prec_max
        return torch.logspace(low, high, self.grid_size, base=self.log_prior_prec_base, dtype=torch.float64)


def optimised(la: Any, pred_type: str, method: Any, more: Mapping[str, Any]) -> Tensor:
    """Return the prior precision that a method of laplace-torch chooses; raise for arguments that do not exist."""
    names = [field.name for field in fields(Search)]
    for name in more:
        if name not in names:
            raise UnsupportedError(f"optimize_prior_precision() has no argument {name!r}.{nearest(name, names)}")
    search = Search(**more)
    if option("method", method, TuningMethod) == "marglik":
        return by_evidence(la, search)
    if search.val_loader is None:
        raise DataError("val_loader is None; expected held-out data for the method 'gridsearch'.")
    return by_grid(la, search, pred_type)


def by_evidence(la: Any, search: Search) -> Tensor:
    """Return the precision after ``n_steps`` steps of Adam on its logarithm, as laplace-torch takes them."""
    start = torch.as_tensor(search.init_prior_prec, dtype=torch.float64).reshape(-1)
    sizes = {"scalar": 1, "layerwise": la.n_layers, "diag": la.n_params}
    structure = option("prior_structure", search.prior_structure, PriorStructure)
    start = start.repeat(sizes[structure]) if len(start) == 1 else start
    logs = start.to(la.mean.device).log().requires_grad_()
    optimiser = torch.optim.Adam([logs], search.lr)
    with torch.enable_grad():
        for _ in ProgressBar(range(search.n_steps), "marginal likelihood", search.progress_bar):
            optimiser.zero_grad()
            (-la.log_marginal_likelihood(prior_precision=logs.exp())).backward()
            optimiser.step()
    return logs.detach().exp()


def by_grid(la: Any, search: Search, pred_type: str) -> Tensor:
    """Return the precision of the grid with the lowest loss on the held-out data; the first of equal ones."""
    before, losses = la.prior_precision, []
    link = "mc" if pred_type == "nn" else search.link_approx
    dtype = arithmetic_of(la.model)
    source = Data(search.val_loader, la.mean.device, la.target_key, name="val_loader", dtype=dtype)
    batches = list(source.batches(""))
    try:
        for precision in ProgressBar(search.grid, "grid search", search.progress_bar):
            la.prior_precision = precision
            call = lambda x: la(x, pred_type=pred_type, link_approx=link, n_samples=search.n_samples)
            try:
                losses.append(_loss(la, search.loss, [(call(b.inputs), b.targets) for b in batches]))
            except NumericalError:  # a precision at which Λ cannot be factorised
                losses.append(math.inf)
    finally:
        la.prior_precision = before
    best = min(range(len(losses)), key=lambda i: math.inf if math.isnan(losses[i]) else losses[i])
    return search.grid[best]


def _loss(la: Any, loss: Any, pairs: list[tuple[Any, Tensor]]) -> float:
    """Return the loss of predictions, given as laplace-torch gives them to a loss or to a metric of torchmetrics."""
    outputs = [output if isinstance(output, tuple) else (output,) for output, _ in pairs]
    parts = [torch.cat(part) for part in zip(*outputs, strict=True)]
    targets = torch.cat([y for _, y in pairs])
    if loss is None:
        return _negative_log_likelihood(la, parts, targets)
    if hasattr(loss, "update") and hasattr(loss, "compute"):
        loss.reset()
        try:
            loss.update(*parts, targets)
        except TypeError:  # a metric of the means alone
            loss.update(parts[0], targets)
        return float(loss.compute().sum())
    return float(loss(*parts, targets))


def _negative_log_likelihood(la: Any, parts: list[Tensor], targets: Tensor) -> float:
    """Return the mean of minus the log-density of the targets: with the noise, which laplace-torch leaves out."""
    if len(parts) == 1:
        return float(-parts[0].gather(-1, targets.long().reshape(-1, 1)).log().mean())
    mean, variance = parts
    variance = variance.diagonal(dim1=-2, dim2=-1) if variance.ndim == 3 else variance
    total = variance + la.sigma_noise.detach().square()
    return float((0.5 * ((targets - mean).square() / total + (2 * math.pi * total).log())).sum(-1).mean())
