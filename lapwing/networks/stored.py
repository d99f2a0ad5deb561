"""The network in a file: the facts about it, without the model, and how they are read again."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from lapwing.core.images import DIMS
from lapwing.core.schema import MOST, Array, Either, Flag, Later, ListOf, MapOf, Maybe, Record, Text, Whole, distinct
from lapwing.core.state import Part, State
from lapwing.errors import FileError
from lapwing.networks.budget import Footprint
from lapwing.networks.forward import is_recurrent
from lapwing.networks.jacobians import KINDS, Block
from lapwing.networks.layout import refuse_other_parameters
from lapwing.networks.probe import Probe
from lapwing.networks.selection import Selection

if TYPE_CHECKING:
    from lapwing.networks.network import Network

LARGEST = 2**40  # of the numbers of a footprint


def written(network: Network) -> State:
    """Return what a file needs, besides the model, to build the network again."""
    settings = {
        "names": network.selection.names, "shapes": network.selection.shapes,
        "layout": [asdict(block) for block in network.layout], "footprint": network.footprint.numbers,
        "output_shape": network.output_shape, "forward_mode": network.forward_mode, "recurrent": network.recurrent,
        "normalised": network.normalised, "private": network.private, "known": dict(network.known),
        **{name: value for name in ("image", "output", "head") if (value := getattr(network, name))},
    }  # fmt: skip
    tensors = {"index": network.selection.index, "shift": network.shift}
    parts = {} if network.probed is None else {"probe": network.probed.state()}
    return State("Network", settings, {name: t for name, t in tensors.items() if t is not None}, parts)


def read_facts(state: State, model: nn.Module) -> tuple[dict[str, Any], Tensor | None]:
    """Return the fields of the network of this model, and its shift; raise ``FileError`` if they do not fit it."""
    sizes, most = ListOf(Whole()), Whole(0, LARGEST)
    layout = Record(
        Block, kind=Text(KINDS), weight=Text(), shape=sizes, bias=Maybe(Text()), groups=Whole(1), why=Text()
    )
    later = Later(most)
    fields = state.read(
        names=ListOf(Text()), shapes=ListOf(sizes), layout=ListOf(layout), output_shape=ListOf(Whole(1)),
        footprint=Record(
            Footprint, width=Whole(1, LARGEST), patches=most, whole=most, graph=later, live=later, widest=later
        ),
        forward_mode=Flag(), recurrent=Flag(), normalised=Flag(), private=Flag(), known=MapOf(Flag()),
        shift=Maybe(Array((None,))), image=Later(ListOf(Whole(1))),
        output=Later(ListOf(Either(Text(), Whole(-MOST)))), head=Later(Text()),
        index=Maybe(Array((None,), 0, whole=True, also=distinct)), probe=Later(Part(Probe)),
    )  # fmt: skip
    names, shapes, shift = fields.pop("names"), fields.pop("shapes"), fields.pop("shift")
    selection = Selection(names, shapes, fields.pop("index"))
    refuse_other_parameters(selection, fields["layout"], model)
    if fields["recurrent"] != is_recurrent(model) or len(fields["output_shape"]) not in (1, 2):
        raise FileError("the file has other facts about the network than the model: recurrent layers, output shape")
    head = fields.get("head", "")
    if head and head not in [block.weight for block in fields["layout"] if block.linear]:
        raise FileError(f"the file has {head!r} as the last linear map; expected the weight of one of its blocks")
    image = fields.get("image", ())
    if image and (len(image) not in DIMS or (math.prod(image),) != fields["output_shape"][:-1]):
        raise FileError(f"the file has images {image} and outputs {fields['output_shape']}; expected their pixels")
    if shift is not None and len(shift) != selection.size:
        raise FileError(f"the file shifts {len(shift)} weights; expected {selection.size}")
    return {"selection": selection, **fields}, shift
