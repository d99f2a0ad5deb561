"""Which rows belong to which sample."""

from __future__ import annotations

import pytest
import torch

from lapwing.networks.passes import _with_bits


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rounding_of_terms_that_cancel_is_no_shared_row(dtype: torch.dtype) -> None:
    """A row whose gradient is the small sum of large terms carries their rounding, and still has one sample."""
    grads = torch.tensor([[[0.02, -0.01], [3.0, 1.0]]] * 2, dtype=dtype)
    grads[1, 0] *= 2  # the first row belongs to a sample with the bit
    grads[1] += 20 * torch.finfo(dtype).eps  # large terms were rounded
    owner = _with_bits(torch.zeros(2, dtype=torch.long), grads, grads[0].abs().amax(1), 0)
    assert owner is not None
    assert owner.tolist() == [1, 0]


def test_a_row_of_several_samples_is_seen() -> None:
    grads = torch.tensor([[[1.0, 2.0]], [[1.4, 2.9]]])
    assert _with_bits(torch.zeros(1, dtype=torch.long), grads, grads[0].abs().amax(1), 0) is None
