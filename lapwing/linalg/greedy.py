"""The greedy choice of coordinates that explain most variance, with those already chosen accounted for."""

from __future__ import annotations

import torch
from torch import Tensor

from lapwing.core.progress import ProgressBar


def most_explaining(precision: Tensor, gram: Tensor, count: int, least: float, visible: bool = False) -> Tensor:
    r"""Return ``count`` coordinates, in the order in which they are chosen: each adds most to the explained variance.

    For chosen coordinates S that is

    $$ v(S) = \mathrm{tr}\, J_S (\Lambda_{SS})^{-1} J_S^\top, \qquad
       v(S + i) - v(S) = \frac{|J_i - J_S \Lambda_{SS}^{-1} \Lambda_{Si}|^2}
                              {\Lambda_{ii} - \Lambda_{iS} \Lambda_{SS}^{-1} \Lambda_{Si}} . $$

    Both the Schur complement below and the products of residuals above change by matrices of rank one and two with each
    choice. Their diagonals are kept, and of the rest only the column of each choice is computed, as in a pivoted
    Cholesky factorisation. Equal gains go to the first coordinate.

    Args:
        precision: Λ of all coordinates, (M, M), float64.
        gram: JᵀJ, (M, M), float64.
        count: How many to choose, at most M.
        least: A lower bound of the eigenvalues of Λ, such as the smallest prior precision.
        visible: Whether to show a progress bar.

    Cost: 3 M k multiplications for choice number k; memory for 2 M ``count`` numbers besides the matrices.

    >>> most_explaining(torch.tensor([[2.0, 1.9], [1.9, 2.1]]), torch.tensor([[4.0, 3.9], [3.9, 4.1]]), 1, 0.1)
    tensor([0])
    """
    complement, residuals = precision.diagonal().clone(), gram.diagonal().clone()
    first, second = (precision.new_zeros(count, len(precision)) for _ in range(2))
    free = torch.ones_like(complement, dtype=torch.bool)
    order = []
    for k in ProgressBar(range(count), "greedy choice", visible):
        complement, residuals = complement.clamp_min(least), residuals.clamp_min(0)
        best = int(torch.where(free, residuals / complement, -1.0).argmax())
        order.append(best)
        free[best] = False
        u, v = first[:k, best], second[:k, best]
        across = precision[best] - u @ first[:k]
        products = gram[best] - u @ second[:k] - v @ first[:k]
        pivot = across[best].clamp_min(least)
        first[k] = across * pivot.rsqrt()
        second[k] = products * pivot.rsqrt() - 0.5 * (products[best] / pivot) * first[k]
        complement = complement - first[k].square()
        residuals = residuals - 2 * first[k] * second[k]
    return torch.tensor(order, device=precision.device)
