"""Posteriors in files (``lapwing.runtime.files``). Nothing in a file is ever executed.

A file holds the states (``lapwing.runtime.settings``) of the network's description, the likelihood, the prior and the
posterior. This module knows none of their classes: each value takes itself apart and builds itself again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch
from torch import nn

from lapwing.data.known_rows import KnownRows
from lapwing.errors import FileError, LapwingError, ModelError
from lapwing.likelihoods.base import Likelihood
from lapwing.networks.fingerprint import Fingerprint, OtherFunctionError, settings_in, structure_of
from lapwing.networks.forward import refuse_training_mode, unwrap
from lapwing.networks.network import Network
from lapwing.posteriors.base import Posterior
from lapwing.priors import Prior
from lapwing.problem import Problem
from lapwing.runtime.files import read, write
from lapwing.runtime.states import UNLIMITED, Known, Later, ListOf, MapOf, PartOf, Record, State, Text, Unread, Whole

FORMAT = "lapwing-posterior-4"
PARTS = ("network", "likelihood", "prior", "posterior")


@dataclass(frozen=True)
class About:
    """Facts in a file beside the posterior: its method and why it was chosen, the rows it knows, names of columns."""

    method: str
    why: str
    rows: KnownRows = KnownRows()
    columns: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


def save(posterior: Posterior, fingerprint: Fingerprint, about: About, path: str | Path) -> None:
    """Write the posterior and what there is to say about it; the model itself is not written.

    The file is written only if ``load`` would read it, and whole or not at all.
    """
    problem = posterior.problem
    parts = {
        "network": problem.network.state(), "likelihood": problem.likelihood.state(), "prior": problem.prior.state(),
        "posterior": posterior.state(), "rows": about.rows.state(),
    }  # fmt: skip
    marks = {**asdict(fingerprint), "quick": ()}
    del marks["structure"]
    settings = {
        "method": about.method, "why": about.why, "fingerprint": marks, "modules": fingerprint.modules,
        "columns": {name: list(names) for name, names in about.columns.items()},
    }  # fmt: skip
    settings["settings"] = fingerprint.settings
    state = State(FORMAT, settings, parts=parts)
    try:
        _restore(state, problem.network.model)
    except FileError as error:
        raise FileError(f"this posterior is not saved, since its file would be refused: {error}.") from error
    write(path, state)


def load(path: str | Path, model: nn.Module) -> tuple[Posterior, Fingerprint, About]:
    """Read a posterior for this model, onto its device and in its dtype; return it with its method and the reason."""
    state = read(path, FORMAT, "posterior")
    model = unwrap(model)
    refuse_training_mode(model)
    try:
        return _restore(_move_to(state, next(model.parameters()).device), model)
    except (_OtherModelError, OtherFunctionError) as error:
        raise FileError(f"the file belongs to another model: {error}") from error
    except LapwingError as error:
        raise FileError(f"{path} is damaged: {str(error).rstrip('.')}. Save the posterior again.") from error
    except Exception as error:  # from a class of the user, whose from_state does not use State.read
        raise FileError(f"{path} is damaged: {type(error).__name__}: {error}. Save the posterior again.") from error


def _restore(state: State, model: nn.Module) -> tuple[Posterior, Fingerprint, About]:
    """Build the posterior from a state, each part after its values were checked."""
    numbers = ListOf(UNLIMITED, "n")
    fields = state.read(
        method=Text(), why=Text(), modules=MapOf(Text()), settings=Later(MapOf(Text())),
        **{name: Unread() for name in PARTS}, rows=Later(PartOf(KnownRows)),
        columns=Later(MapOf(ListOf(Text()))),
        fingerprint=Record(
            Fingerprint, names=ListOf(Text(), "n"), shapes=ListOf(ListOf(Whole()), "n"), marks=numbers, norms=numbers,
            quick=ListOf(Text(), 0),
        ),
    )  # fmt: skip
    modules = {(name, ""): kind for name, kind in fields["modules"].items()}
    _refuse_other_model(replace(fields["fingerprint"], structure=modules), model)
    before = structure_of(model)
    network = PartOf(Network, model).read(fields["network"], Known())
    _refuse_other_settings(fields.get("settings", {}), before, network)
    known = Known({"P": network.selection.size, "C": network.output_shape[-1]}, network.dtype)
    likelihood = PartOf(Likelihood).read(fields["likelihood"], known)
    prior = PartOf(Prior, network).read(fields["prior"], known)
    posterior = PartOf(Posterior, Problem(network, likelihood, prior)).read(fields["posterior"], known)
    about = About(**{name: fields[name] for name in ("method", "why", "rows", "columns") if name in fields})
    return posterior, Fingerprint.of(model, before), about


def _move_to(state: State, device: torch.device) -> State:
    """Return the state with its tensors on a device."""
    tensors = {name: tensor.to(device) for name, tensor in state.tensors.items()}
    return replace(state, tensors=tensors, parts={name: _move_to(part, device) for name, part in state.parts.items()})


class _OtherModelError(ModelError):
    """The fingerprint of the file is not that of the model."""


def _refuse_other_model(fingerprint: Fingerprint, model: nn.Module) -> None:
    """Raise unless the model has the weights of the fingerprint, up to the rounding of its dtype."""
    eps = max(torch.finfo(p.dtype).eps for p in model.parameters())
    try:
        fingerprint.refuse_other(model, tolerance=1e-6 if eps == torch.finfo(torch.float64).eps else 4 * eps)
    except ModelError as error:
        raise _OtherModelError(str(error)) from error


def _refuse_other_settings(
    stored: Mapping[str, str], structure: Mapping[tuple[str, str], object], network: Network
) -> None:
    """Raise if a setting of a module is another one, unless outputs at the probe are the same; without one, always.

    Settings that only one version of a module has are not compared.
    """
    for name, now in settings_in(structure).items():
        if stored.get(name, now) != now and not network.is_as_probed:
            module, setting = name.rsplit(" ", 1)
            raise _OtherModelError(
                f"{setting} of the module {module!r} is {now:.60} and was {stored[name]:.60} at the fit. Build the "
                "model as it was."
            )
