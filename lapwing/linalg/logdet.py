"""The log-determinant of an operator that is never formed."""

from __future__ import annotations

import torch
from torch import Tensor

from lapwing.errors import NumericalError
from lapwing.linalg.estimators import Estimate, averaged, signs
from lapwing.linalg.krylov import Eigenpairs
from lapwing.linalg.operators import Product, applied, refuse_asymmetric
from lapwing.linalg.quadrature import lanczos_quadrature


def log_determinant(
    product: Product,
    size: int,
    shift: float | Tensor,
    *,
    probes: int,
    steps: int,
    generator: torch.Generator | None = None,
    deflate: Eigenpairs | None = None,
    device: torch.device | None = None,
) -> Estimate:
    r"""log det(I + A/shift) by stochastic Lanczos quadrature, for one shift or for many (n,) from one run.

    $$ \sum_i \log(1 + \lambda_i/a) + \frac{1}{S} \sum_s z_s^\top \log(I + A/a) z_s $$

    with the sum over the pairs in ``deflate``, Ritz pairs, and the rest, z and A, within their complement. Deflate,
    rather than add probes: what the leading pairs hold is exact. The value lies in the middle between two quadratures
    that hold it from above and below; ``bias`` is half their distance and a bound for the residuals of the pairs,
    which should be small against the shift.
    A is positive semi-definite. Products: ``steps``, of ``probes`` rows, and before them two, of two rows, which see
    that the operator is symmetric and stays the same.
    Reference: Ubaru, Chen & Saad 2017; Golub & Meurant 1994 for the ends.

    >>> a = torch.diag(torch.tensor([1.0, 3.0], dtype=torch.float64))
    >>> found = log_determinant(lambda v: v @ a, 2, torch.tensor([1.0, 0.5]), probes=2, steps=2)
    >>> found.value  # log 2 + log 4, log 3 + log 7
    tensor([2.0794, 3.0445], dtype=torch.float64)
    """
    if steps < 1:
        raise ValueError(f"a log-determinant needs at least one step, not {steps}.")
    rows = signs(probes, size, generator, device)
    shifts = torch.as_tensor(shift, dtype=torch.float64, device=rows.device)
    if not bool((shifts > 0).all()):
        raise NumericalError(f"a log-determinant got a shift of {float(shifts.min()):g}; expected above zero.")
    refuse_asymmetric(product, size, generator=torch.Generator().manual_seed(0), device=device)
    if deflate is not None:
        product, rows = _beside(product, deflate.vectors.to(rows), rows)
    seen = lanczos_quadrature(product, rows, steps)
    _refuse_indefinite(float(seen.nodes.min()), float(shifts.min()))
    ends = [seen.ends(lambda nodes, a=a: torch.log1p(nodes / a)) for a in shifts.reshape(-1)]  # type: ignore[misc]
    low, high = (torch.stack(end, 1).reshape(probes, *shifts.shape) for end in zip(*ends))
    exact, doubt = _deflated(deflate, shifts)
    return averaged(0.5 * (low + high), seen.products, exact=exact, bias=0.5 * (high - low).mean(0).abs() + doubt)


def _beside(product: Product, vectors: Tensor, rows: Tensor) -> tuple[Product, Tensor]:
    """The operator and the rows within the complement of orthonormal vectors."""

    def outside(v: Tensor) -> Tensor:
        for _ in range(2):
            v = v - (v @ vectors.mT) @ vectors
        return v

    return lambda v: outside(applied(product, v)), outside(rows)


def _deflated(pairs: Eigenpairs | None, shifts: Tensor) -> tuple[Tensor, Tensor]:
    """What the pairs contribute, and by how much at most the whole is too high for it.

    With M = I + A/a ≥ I, one pair after the other is cut off from the rest: log det M falls short of the sum of both
    by -log(1 - e/m), m = 1 + λ/a, and e at most ρ²/a² for a residual ρ, and at most m - 1.
    """
    if pairs is None or len(pairs.values) == 0:
        return torch.zeros_like(shifts), torch.zeros_like(shifts)
    values, a = pairs.values.to(shifts).clamp_min(0), shifts[..., None]
    lengths = pairs.residuals.to(shifts) * values.max()
    short = torch.minimum(lengths.square() / (a * (a + values)), values / (a + values))
    return torch.log1p(values / a).sum(-1), -torch.log1p(-short).sum(-1)


def _refuse_indefinite(smallest: float, shift: float) -> None:
    if smallest <= -shift:
        raise NumericalError(
            f"a log-determinant met an eigenvalue of {smallest:.3g} with a shift of {shift:.3g}; expected a positive "
            "semi-definite operator. Raise the prior precision, or compute in float64."
        )
