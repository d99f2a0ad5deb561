"""What every test starts from: one thread, a fixed seed, nothing left behind."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _fixed_seed() -> Iterator[None]:
    torch.manual_seed(0)
    yield
    assert torch.get_default_dtype() == torch.float32
    assert torch.is_grad_enabled()


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(7)
