"""A counter of operations, for a clock that is the same on every machine."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from lapwing.methods.base import MultiplicationCount

aten = torch.ops.aten
# Operations that write nothing: a view that is not marked as one, and memory that is only reserved.
SILENT = {aten._unsafe_view, aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided}
# Decompositions: each takes a multiple of the cube of its size.
CUBIC = {aten._linalg_eigh, aten._linalg_svd, aten.linalg_cholesky_ex}


class OperationCount(MultiplicationCount):
    """Counts multiplications, decompositions, and numbers that other operations write."""

    def __init__(self) -> None:
        super().__init__()
        self.cubes = 0  # rows × columns × the smaller of both, of matrices that were decomposed
        self.numbers = 0  # views and reserved memory are not written

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result, packet = super().__torch_dispatch__(func, types, args, kwargs), func._overloadpacket
        if packet not in flop_registry and not func.is_view and packet not in SILENT:
            self.cubes += args[0].numel() * min(args[0].shape[-2:]) if packet in CUBIC else 0
            self.numbers += sum(leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, Tensor))
        return result
