"""Settings of the whole process: changed while at least one thread needs it, restored by the last.

Gradient mode and autocast belong to a thread; the settings here do not. If each thread saved and restored them for
itself, one could restore what another has just changed.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch

LOCK = threading.RLock()  # of the settings below, and of models that run themselves instead of a copy
FORWARD_MODE = threading.RLock()  # PyTorch has one level of forward mode for all threads: the first that leaves ends it


class Switch:
    """A context in which ``change`` is in force; threads may be in it together."""

    def __init__(self, change: Callable[[], AbstractContextManager[Any]]) -> None:
        self._change, self._inside, self._undo = change, 0, ExitStack()

    def __enter__(self) -> None:
        with LOCK:
            if self._inside == 0:
                self._undo.enter_context(self._change())
            self._inside += 1

    def __exit__(self, *_: object) -> None:
        with LOCK:
            self._inside -= 1
            if self._inside == 0:
                self._undo.close()


@contextmanager
def _without_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@contextmanager
def _own_kernels() -> Iterator[None]:
    with (
        _without_warnings(),
        torch.backends.mkldnn.flags(enabled=False),
        torch.backends.cudnn.flags(enabled=False),
    ):
        yield


@contextmanager
def _unfused_attention() -> Iterator[None]:
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


@contextmanager
def _math_attention() -> Iterator[None]:
    # Not torch.nn.attention.sdpa_kernel: what one thread enters there, another cannot leave.
    cuda = torch.backends.cuda
    kernels = {
        cuda.enable_flash_sdp: cuda.flash_sdp_enabled(),
        cuda.enable_mem_efficient_sdp: cuda.mem_efficient_sdp_enabled(),
        cuda.enable_cudnn_sdp: cuda.cudnn_sdp_enabled(),
        cuda.enable_math_sdp: cuda.math_sdp_enabled(),
    }
    for enable in kernels:
        enable(enable is cuda.enable_math_sdp)
    try:
        yield
    finally:
        for enable, before in kernels.items():
            enable(before)


quiet = Switch(_without_warnings)  # no warnings of PyTorch about its internals: no batching rule, no TF32
own_kernels = Switch(_own_kernels)  # PyTorch's own kernels instead of those of cuDNN and oneDNN
math_attention = Switch(_math_attention)  # attention that has all derivatives
# Not the fused path of nn.TransformerEncoder, which PyTorch takes where it records no gradients: it gives padded
# positions other outputs, so the mean would not be that of the network whose Jacobian is taken.
unfused_attention = Switch(_unfused_attention)
