"""A backward pass for all seeds at once.

Autograd takes one gradient at a time; ``vmap`` over it loops inside convolutions and norms. Here the seeds are folded
into the batch, so that K seeds cost one large operation for each node. A graph with an operation whose entry in the
table has no gradient is left to autograd.
"""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from lapwing.networks.forms import Node, output_shape
from lapwing.networks.forward import quiet
from lapwing.networks.graph import Graph
from lapwing.networks.ops.operation import NoRuleError, operation


def gradients(raw: Tensor, graph: Graph, nodes: list[Node], seeds: Tensor, recurrent: bool) -> list[Tensor]:
    """Return the gradients (K, ...) of seeds · raw at the outputs of the nodes; zero where there is no path."""
    grads: list[Tensor | None] | None = None
    leading = _leading_to(graph, nodes)
    if not recurrent and _has_rules(graph, leading, seeds.dtype):
        with contextlib.suppress(NoRuleError), torch.no_grad():
            grads = _folded(graph, nodes, leading, seeds)
    if grads is None:
        grads = _by_autograd(raw, nodes, seeds, seed_by_seed(graph, seeds, recurrent))
    return [
        grad if grad is not None else seeds.new_zeros(seeds.shape[0], *output_shape(node))
        for grad, node in zip(grads, nodes, strict=True)
    ]


def differentiable_gradients(raw: Tensor, nodes: list[Node], seeds: Tensor) -> list[Tensor]:
    """Return the gradients by autograd, seed by seed, as part of a graph that leads back to the inputs."""
    edges = [GradientEdge(node, 0) for node in nodes]
    each = [torch.autograd.grad(raw, edges, seed, create_graph=True, allow_unused=True) for seed in seeds]
    return [
        seeds.new_zeros(len(seeds), *output_shape(node)) if each[0][i] is None else torch.stack([g[i] for g in each])
        for i, node in enumerate(nodes)
    ]


def seed_by_seed(graph: Graph, seeds: Tensor, recurrent: bool) -> bool:
    """Return whether autograd must take one seed at a time.

    It cannot batch recurrent, attention or sparse kernels, and batches convolutions on a CPU only slowly.
    """
    if recurrent:
        return True
    rules = ((node, operation(node).seed_by_seed) for node in graph.nodes)
    return any(rule is not None and rule(node, seeds.is_cpu) for node, rule in rules)


def _by_autograd(raw: Tensor, nodes: list[Node], seeds: Tensor, looped: bool) -> list[Tensor | None]:
    edges = [GradientEdge(node, 0) for node in nodes]
    if looped or seeds.shape[0] == 1:
        each = [torch.autograd.grad(raw, edges, seed, retain_graph=True, allow_unused=True) for seed in seeds]
        return [None if each[0][i] is None else torch.stack([g[i] for g in each]) for i in range(len(nodes))]
    with quiet():
        return list(torch.autograd.grad(raw, edges, seeds, retain_graph=True, allow_unused=True, is_grads_batched=True))


def _folded(graph: Graph, targets: list[Node], leading: set[Node], seeds: Tensor) -> list[Tensor | None]:
    """Return the gradients (K, *output) at the targets for seeds (K, *output of the root); None where no path leads.

    ``leading`` are the nodes that lead to the targets.
    """
    grads: dict[Node, Tensor] = {graph.nodes[0]: seeds}
    owned: dict[Node, bool] = {}  # whether nobody else holds the gradient, so that it may be changed in place
    at_targets: dict[Node, Tensor] = {}
    remaining = set(targets)
    for node in graph.nodes:
        grad = grads.pop(node, None)
        if grad is None:
            continue
        may_change = owned.pop(node, False)
        if node in remaining:
            at_targets[node] = grad
            remaining.discard(node)
            may_change = False
        if not remaining:
            break
        gradient = operation(node).gradient
        for operand, (child, number) in enumerate(node.next_functions):
            if child is None or child not in leading:
                continue
            if number != 0 or gradient is None:
                raise NoRuleError(node.name())
            part, new = gradient.pull(node, grad, operand, may_change)
            if part.shape[1:] != output_shape(child):
                raise NoRuleError(node.name())
            owned[child] = new and child not in grads
            grads[child] = grads[child] + part if child in grads else part
    return [at_targets.get(node) for node in targets]


def _has_rules(graph: Graph, leading: set[Node], dtype: torch.dtype) -> bool:
    """Return whether every node on the way to the targets has a rule and one dtype; casts are left to autograd."""
    return all(
        operation(node).gradient is not None and node._input_metadata[0].dtype == dtype
        for node in graph.nodes
        if node in leading and any(child in leading for child, _ in node.next_functions)
    )


def _leading_to(graph: Graph, targets: list[Node]) -> set[Node]:
    """Return the targets and every node from which one of them is reached."""
    leading = set(targets)
    for node in reversed(graph.nodes):  # producers before consumers
        if node not in leading and any(child in leading for child, _ in node.next_functions):
            leading.add(node)
    return leading
