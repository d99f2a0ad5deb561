"""Embeddings: how they use their table, and where autograd's gradient is special."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor

from lapwing.networks.forms import Lookup, Use
from lapwing.networks.nodes import Node
from lapwing.networks.ops.entry import Sources


def use_table(node: Node, sources: Sources, tensors: Mapping[str, Tensor]) -> Iterator[tuple[int, Use]]:
    """Yield the use of the table."""
    name, moves, _ = sources[0]
    if not moves and not node._saved_sparse:
        yield 0, Use(node, name, Lookup(tensors[name].shape[0]))


def seed_by_seed(node: Node, on_cpu: bool) -> bool:
    """Return whether the gradient is sparse, which autograd cannot batch."""
    return bool(node._saved_sparse)


def not_derivative(node: Node) -> str:
    """Return why the gradient is not the derivative, or ""."""
    if not node._saved_scale_grad_by_freq:
        return ""
    return (
        "an embedding has scale_grad_by_freq=True, which divides its gradient by counts; expected the derivative. "
        "Set scale_grad_by_freq to False: the network stays the same."
    )


def forward_differs(node: Node) -> bool:
    """Return whether there is a padding row: its gradient is zero, but forward mode does not skip it."""
    return 0 <= node._saved_padding_idx < 2**63
