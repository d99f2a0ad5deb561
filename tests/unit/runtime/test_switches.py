"""Settings of the process that several threads need at once."""

from __future__ import annotations

import threading
import warnings

import torch

from lapwing.runtime.threads import math_attention, own_kernels, quiet
from tests.attack.surroundings import settings


def test_the_last_thread_restores() -> None:
    """Threads that save and restore each for itself leave oneDNN off here."""
    before = settings()
    entered, leave = threading.Event(), threading.Event()

    def first() -> None:
        with own_kernels, quiet, math_attention:
            entered.set()
            leave.wait()

    thread = threading.Thread(target=first)
    thread.start()
    entered.wait()
    with own_kernels, quiet, math_attention:
        leave.set()
        thread.join()
        assert not torch._C._get_mkldnn_enabled()
        assert not torch.backends.cuda.flash_sdp_enabled()
        assert warnings.filters[0][0] == "ignore"
    after = settings()
    assert {key for key in before if before[key] != after[key]} == set()
