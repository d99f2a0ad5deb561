"""The operations and the sizes of a computation, counted while it runs: the same numbers on every machine."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

aten = torch.ops.aten
# Operations that write nothing: a view that is not marked as one, and memory that is only reserved.
SILENT = {aten._unsafe_view, aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided}

# Decompositions: each takes a multiple of the cube of its size.
CUBIC = {aten._linalg_eigh, aten._linalg_svd, aten.linalg_cholesky_ex}


class OperationCount(TorchDispatchMode):
    """Counts the operations inside a ``with`` block: products and convolutions, decompositions, numbers written.

    The operations of a backward pass count as well. Each costs some microseconds more.

    >>> x, w = torch.ones(4, 3), torch.ones(3, 2)
    >>> with OperationCount() as count:
    ...     y = (x @ w).relu()
    >>> count.products, count.cubes, count.numbers
    (24, 0, 8)
    """

    def __init__(self) -> None:
        super().__init__()
        self.products = 0  # multiplications in matrix products and convolutions
        self.cubes = 0  # rows × columns × the smaller of both, of matrices that were decomposed
        self.numbers = 0  # numbers that other operations wrote; views and reserved memory are not written

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        packet = func._overloadpacket
        if packet in flop_registry:
            self.products += flop_registry[packet](*args, **kwargs, out_val=result) // 2  # it counts additions too
        elif not func.is_view and packet not in SILENT:
            self.cubes += args[0].numel() * min(args[0].shape[-2:]) if packet in CUBIC else 0
            self.numbers += sum(leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, Tensor))
        return result


class LargestResult(TorchDispatchMode):
    """Notes how many numbers the largest result inside a ``with`` block has.

    >>> x, w = torch.ones(4, 3), torch.ones(3, 2)
    >>> with LargestResult() as largest:
    ...     y = (x @ w).sum()
    >>> largest.numbers
    8
    """

    def __init__(self) -> None:
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not func.is_view:
            sizes = [leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, Tensor) and not leaf.is_nested]
            self.numbers = max(self.numbers, *sizes, 0)
        return result
