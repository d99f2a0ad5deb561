"""The operations of a computation, counted while it runs: the same numbers on every machine."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry


class OperationCount(TorchDispatchMode):
    """Counts the operations inside a ``with`` block: those of matrix products and convolutions, and numbers written.

    The operations of a backward pass count as well. Each costs some microseconds more.

    >>> x = torch.ones(4, 3)
    >>> with OperationCount() as count:
    ...     y = (x @ torch.ones(3, 2)).relu()
    >>> count.products, count.numbers
    (24, 8)
    """

    def __init__(self) -> None:
        super().__init__()
        self.products = 0  # multiplications in matrix products and convolutions
        self.numbers = 0  # numbers that other operations wrote; views write none

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        packet = func._overloadpacket
        if packet in flop_registry:
            self.products += flop_registry[packet](*args, **kwargs, out_val=result) // 2  # it counts additions too
        elif not func.is_view:
            self.numbers += sum(leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, Tensor))
        return result
