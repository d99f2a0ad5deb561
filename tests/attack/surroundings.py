"""What a call must leave as it was outside the model: PyTorch's modes, settings and random numbers."""

from __future__ import annotations

import signal
import warnings
from typing import Any

import torch


def settings() -> dict[str, Any]:
    """Return the modes and settings of this thread and of the process, in a form that can be compared."""
    cuda = torch.backends.cuda
    return {
        "gradient mode": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "default dtype": torch.get_default_dtype(),
        "oneDNN": torch._C._get_mkldnn_enabled(),
        "cuDNN": torch._C._get_cudnn_enabled(),
        "attention": (cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled()),
        "fused encoder": torch.backends.mha.get_fastpath_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "random numbers": torch.get_rng_state().numpy().tobytes(),
        "function modes": torch._C._len_torch_function_stack(),
        "function transforms": torch._C._functorch.peek_interpreter_stack() is None,
        "warnings": [entry for entry in warnings.filters if "sympy" not in str(entry[2])],  # which PyTorch may import
        "handler of Ctrl-C": signal.getsignal(signal.SIGINT),
    }
