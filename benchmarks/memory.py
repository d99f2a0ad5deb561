"""The byte budget against what calls take, method by method: python -m benchmarks.memory [--out FILE] [--networks NAME]

For every registered method, with the quick settings that it declares for tests, and every network: the most bytes of
tensors that a fit with a given prior, the probabilities of a prediction and function samples hold at once, without a
limit and under a byte budget. "answer" is what the call leaves behind: the posterior, a predictive, draws, and what the
posterior keeps for the next call. "excess" is the peak under the budget less the budget and the answer: at most zero,
or what the method declares to hold beside the budget ("held"). Bytes are those of PyTorch's allocator on the CPU.
"""

from __future__ import annotations

import argparse
import gc
import platform
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import lapwing as lw
from benchmarks.peak import held
from benchmarks.spine import cpu_name
from lapwing.errors import UnsupportedError
from lapwing.methods.protocol import Conformance
from lapwing.networks.network import Network
from lapwing.registry import METHODS

CPU = torch.device("cpu")
PRIOR = 1e3
SLOW = {"kernel_space": 1, "hfl": 0}  # methods that take few rows, by the number of rows of a case
DRAWS = 2


class Tokens(nn.Module):
    """Outputs for every token of a sequence."""

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.table, self.drop = nn.Embedding(vocabulary, width), nn.Dropout(0.1)
        self.hidden, self.head = nn.Linear(width, 2 * width), nn.Linear(2 * width, vocabulary)

    def forward(self, x: Tensor) -> Tensor:
        h = self.table(x)
        return self.head(self.drop(self.hidden(h + h.mean(1, keepdim=True)).tanh()))


@dataclass(frozen=True, eq=False)
class Case:
    """A network, data for it, and the byte budget."""

    model: nn.Module
    x: Tensor
    y: Tensor
    budget: int
