"""Which tensors of a batch have a row for each sample, and which all samples share (a context beside x).

Most batches tell by their numbers of rows, and what one batch has told holds for all: a shared tensor has as many rows
as some batches by chance. One that is met with as many rows as there are samples before anything is known of it is
tried: no output may depend on a row of another sample. What fails is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from lapwing.core.data import Inputs, map_tensors, picked
from lapwing.errors import DataError
from lapwing.networks.fallback import swapped
from lapwing.networks.forward import (
    needs_plain_kernels,
    plain_kernels,
    raw_output,
    recording,
    refuse_mixed_samples,
    spread,
)

Known = Mapping[str, bool]  # by place and number of dimensions: whether there is a row for each sample


def placed(inputs: Inputs, place: str = "inputs") -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a nesting in order, with a name for its place. The same tensor with a dimension more or less is
    another: a context for each sample has one more than a context for all."""
    if isinstance(inputs, Tensor):
        yield f"{place}: {inputs.ndim}", inputs
    elif isinstance(inputs, Mapping):
        for key, value in inputs.items():
            yield from placed(value, f"{place}[{key!r}]")
    elif isinstance(inputs, tuple | list):
        for number, value in enumerate(inputs):
            yield from placed(value, f"{place}[{number}]")


def height(tensor: Tensor) -> int:
    return tensor.shape[0] if tensor.ndim else 0


def counted(inputs: Inputs, known: Known) -> int | None:
    """How many samples there are, as far as that is known without running the model."""
    if isinstance(inputs, Tensor):
        return height(inputs)
    found = {key: height(t) for key, t in placed(inputs)}
    sizes = {n for key, n in found.items() if known.get(key)} or {
        n for key, n in found.items() if n and key not in known
    }
    return sizes.pop() if len(sizes) == 1 else None


def owned(inputs: Inputs, known: Known, batch: int) -> tuple[bool, ...] | None:
    """For each tensor, whether it has a row for each sample; None where that has to be tried."""
    leaves = list(placed(inputs))
    own = tuple(height(t) == batch and known.get(key, True) for key, t in leaves)
    untold = any(mine and key not in known for mine, (key, _) in zip(own, leaves, strict=True))
    for key, t in leaves:
        if known.get(key) and height(t) not in (1, batch):  # one row is spread over all samples
            raise DataError(
                f"{_named(key)} has {height(t)} rows for {batch} samples and had one for each sample in an earlier "
                "batch; expected the same kind of tensor in all. Use another batch size for the first batch if all "
                "samples share it, or give each sample its row."
            )
    return None if untold and batch > 1 and sum(own) > 1 else own


def learned(model: nn.Module, inputs: Inputs, raw: Tensor, known: Known, copied: bool = False) -> dict[str, bool]:
    """What is known after this batch, with the outputs ``raw``; refused where samples mix.

    A batch that is one sample ``copied`` tells nothing new.
    """
    batch = raw.shape[0]
    leaves = list(placed(inputs))
    own = owned(inputs, known, batch)
    tried = own is None and not copied
    if own is None:
        own = tuple(height(t) == batch and known.get(key, True) for key, t in leaves)
    if tried:
        _refuse_shared(model, inputs, own, batch)
    refuse_mixed_samples(model, inputs, raw, own)
    if tried:
        _refuse_pooled(model, inputs, own, batch)
    if copied or batch == 1 or len(leaves) == 1:
        return dict(known)
    told = {key: mine for (key, t), mine in zip(leaves, own, strict=True) if mine or height(t) != 1}
    return {**known, **told}


def _refuse_shared(model: nn.Module, inputs: Inputs, own: tuple[bool, ...], batch: int) -> None:
    """No output of one half of the batch may have a slope in rows of the other half."""
    try:
        crossed = _crossed(model, inputs, own, batch)
    except (RuntimeError, NotImplementedError):  # no slope in the inputs: running parts of the batch must do
        return
    keys = [key for key, _ in placed(inputs)]
    named = ", ".join(_named(key) for key, mixed in zip(keys, crossed, strict=True) if mixed)
    if named and sum(crossed) < sum(own):  # all of them: the model itself mixes samples, which is told elsewhere
        raise DataError(
            f"{named} has as many rows as there are samples, {batch}, but every sample depends on all; expected "
            "a row for each sample, or another number of rows where all samples share the tensor. Use another batch "
            "size, or expand it to one for each sample."
        )


def _crossed(model: nn.Module, inputs: Inputs, own: tuple[bool, ...], batch: int) -> list[bool]:
    """For each tensor whether outputs of one half of the batch have slopes in its rows of the other half."""
    leaves: dict[int, Tensor] = {}
    numbers = iter(range(len(own)))

    def followed(t: Tensor) -> Tensor:
        number = next(numbers)
        if not own[number] or not t.is_floating_point():
            return t
        leaves[number] = t.detach().clone().requires_grad_()
        return leaves[number].clone()  # a model may write into what it is given

    with recording(dict(model.named_parameters()), (), needs_plain_kernels(model)):
        raw = _stirred(model, map_tensors(inputs, followed))
        crossed = [False] * len(own)
        for mine, others in (
            (slice(0, batch // 2), slice(batch // 2, batch)),
            (slice(batch // 2, batch), slice(0, batch // 2)),
        ):
            if not leaves or not raw.requires_grad:
                break
            seed = torch.randn(raw[mine].shape, generator=torch.Generator().manual_seed(0)).to(raw)
            grads = torch.autograd.grad(raw[mine], list(leaves.values()), seed, retain_graph=True, allow_unused=True)
            for number, grad in zip(leaves, grads, strict=True):
                limit = 0.0 if grad is None else 64 * torch.finfo(grad.dtype).eps * float(grad.abs().max())
                crossed[number] |= grad is not None and float(grad[others].abs().max()) > limit
    return crossed


def _refuse_pooled(model: nn.Module, inputs: Inputs, own: tuple[bool, ...], batch: int) -> None:
    """Some samples alone, in another order, must have the outputs that they have in the batch."""
    some = torch.randperm(batch, generator=torch.Generator().manual_seed(0))[: max(2, (batch + 2) // 3)]
    with torch.no_grad(), plain_kernels(needs_plain_kernels(model)):
        whole, alone = _stirred(model, inputs), _stirred(model, picked(inputs, own, some))
    if alone.shape[1:] != whole.shape[1:]:
        return  # dynamic padding: lengths follow the batch
    gap, most = spread(alone, whole[some.to(whole.device)], whole)
    if not bool(gap < most):
        keys = [key for key, _ in placed(inputs)]
        named = ", ".join(_named(key) for key, mine in zip(keys, own, strict=True) if mine)
        raise DataError(
            f"of {named}, each with as many rows as there are samples, {batch}, one is shared: the output for a sample "
            f"changes by {gap.item():.2g} (relative) where rows of the others are left out; expected a row for each "
            "sample. Use another batch size, or expand what all samples share to one for each."
        )


def _stirred(model: nn.Module, inputs: Inputs) -> Tensor:
    """The output with weights that are nought moved a little: behind a closed gate nothing would be seen."""
    closed = {name: p.detach() for name, p in model.named_parameters() if bool((p == 0).any())}
    opened = {name: p.masked_fill(p == 0, 0.01) for name, p in closed.items()}
    found = swapped(model, opened, lambda: raw_output(model, inputs))
    return found if bool(found.isfinite().all()) else raw_output(model, inputs)


def _named(key: str) -> str:
    return key.rpartition(":")[0]
