"""The machine and the versions that numbers come from, in words."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from pathlib import Path

import torch

from lapwing.demo.result import VERSIONS


@dataclass(frozen=True)
class Machine:
    """The machine, versions and command of a run."""

    hardware: str
    versions: dict[str, str]
    threads: int  # of each process
    command: str

    @classmethod
    def here(cls, command: str = "") -> Machine:
        """Describe this machine; its GPU is named once PyTorch has used it."""
        return cls(hardware(), dict(VERSIONS), torch.get_num_threads(), command)


def hardware() -> str:
    """Return the name of the GPU if this process uses one, else that of the processor with its number of cores."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        return torch.cuda.get_device_name()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{processor()}, {cores} cores"


def processor() -> str:
    """Return the name of the processor."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
