"""Whitened and shared designs in several parts, against dense matrices."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lapwing.linalg.operators import MatrixDesign, back_product, forward_product, gram_product
from lapwing.linalg.ridge import Regression, SharedDesign, WhitenedDesign, noise_root, prior_root
from tests.tolerances import assert_close
from tests.unit.linear_problems import D, seed

N, C, P = 11, 3, 5
CPU = torch.device("cpu")


def draw(*shape: int, number: int) -> Tensor:
    return torch.randn(shape, dtype=D, generator=seed(number))


def definite(*shape: int, number: int) -> Tensor:
    root = draw(*shape, shape[-1], number=number)
    return root @ root.mT + torch.eye(shape[-1], dtype=D)


@pytest.mark.parametrize("part", [2 * C, 4 * C, N * C])
@pytest.mark.parametrize("matrices", [False, True])
def test_parts_take_the_noise_of_their_data(part: int, matrices: bool) -> None:
    x, a = draw(N * C, P, number=1), definite(P, number=2)
    noise = definite(N, C, number=3) if matrices else draw(N, C, number=3).exp()
    root = noise_root(noise, N, C, CPU)
    design = WhitenedDesign(MatrixDesign(x, part), prior_root(a, P, CPU), root, C)
    blocks = torch.block_diag(*(noise if matrices else torch.diag_embed(noise)))
    left = torch.linalg.inv(torch.linalg.cholesky(blocks))
    dense = left @ x @ torch.linalg.inv(torch.linalg.cholesky(a)).mT
    v, u = draw(2, P, number=4), draw(2, N * C, number=5)
    assert_close(forward_product(design, v), v @ dense.mT)
    assert_close(back_product(design, u), u @ dense)
    assert_close(gram_product(design, v), v @ dense.mT @ dense)
    assert root.logdet == pytest.approx(float(torch.logdet(blocks)))


@pytest.mark.parametrize("part", [2, 4, N])
def test_shared_features_in_parts(part: int) -> None:
    x = draw(N, P, number=1)
    design = SharedDesign(MatrixDesign(x, part), C)
    w, u = draw(2, C, P, number=2), draw(2, N, C, number=3)
    assert (design.rows, design.size) == (N * C, C * P)
    assert_close(forward_product(design, w.flatten(1)), torch.einsum("np,kcp->knc", x, w).flatten(1))
    assert_close(back_product(design, u.flatten(1)), torch.einsum("np,knc->kcp", x, u).flatten(1))


def test_no_datum_is_split_between_parts() -> None:
    """4,096 rows in a part are not a multiple of three."""
    x = draw(1500, C, 2, number=1)
    noise = definite(1500, C, number=2)
    white = Regression.build(x, draw(1500, C, number=3), None, noise)
    sizes = [part.rows for part in white.design]
    assert sizes == [4095, 405]
    inverse = torch.linalg.inv(torch.linalg.cholesky(noise))
    v = draw(2, 2, number=4)
    assert_close(forward_product(white.design, v), torch.einsum("ncd,ndp,kp->knc", inverse, x, v).flatten(1))
