"""What tests and examples in docstrings start from: a fixed seed and number of threads, no global state left behind.

``LAPWING_TEST_SEED`` and ``LAPWING_TEST_THREADS`` change the two; ``make test-rounding`` uses them (tests/rounding.py).
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from importlib.util import find_spec

import pytest
import torch

SEED = int(os.environ.get("LAPWING_TEST_SEED", "0"))
torch.set_num_threads(int(os.environ.get("LAPWING_TEST_THREADS", "1")))

for accelerator in (torch.cuda, torch.xpu, torch.mtia):
    if not accelerator.is_available():  # torch.manual_seed would keep a call for it, with its stack as text: half a ms
        accelerator.manual_seed_all = lambda seed: None

# Examples of modules that need a package of the integrations run where it is installed.
modules = {"lightning": "lapwing/lightning.py", "botorch": "lapwing/botorch.py"}
collect_ignore = [path for package, path in modules.items() if find_spec(package) is None]

gc.disable()  # while tests are collected: all that is made then stays


def pytest_collection_finish() -> None:
    gc.freeze()  # no later collection looks at the tests themselves
    gc.enable()


@pytest.fixture(autouse=True)
def _fixed_seed() -> Iterator[None]:
    torch.manual_seed(SEED)
    yield
    assert torch.get_default_dtype() == torch.float32
    assert torch.is_grad_enabled()


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(7)
