"""What every test starts from: a fixed seed and number of threads, and no global state left behind.

``LAPWING_TEST_SEED`` and ``LAPWING_TEST_THREADS`` change the two; ``make test-rounding`` uses them (tests/rounding.py).
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

SEED = int(os.environ.get("LAPWING_TEST_SEED", "0"))
torch.set_num_threads(int(os.environ.get("LAPWING_TEST_THREADS", "1")))


@pytest.fixture(autouse=True)
def _fixed_seed() -> Iterator[None]:
    torch.manual_seed(SEED)
    yield
    assert torch.get_default_dtype() == torch.float32
    assert torch.is_grad_enabled()


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(7)
