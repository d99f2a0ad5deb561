"""Posteriors in files: safetensors with JSON metadata. Nothing in a file is ever executed.

A file holds the states (``lapwing.core.state``) of the network's description, the likelihood, the prior and the
posterior. This module knows none of their classes: each value takes itself apart and builds itself again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from lapwing.core.state import State, class_named
from lapwing.errors import FileError, ModelError, UnsupportedError
from lapwing.networks.fingerprint import Fingerprint
from lapwing.networks.forward import refuse_training_mode, unwrapped
from lapwing.networks.network import Network
from lapwing.posteriors.protocols import Posterior
from lapwing.problem import Problem

FORMAT = "lapwing-posterior-3"
PARTS = ("network", "likelihood", "prior", "posterior")


@runtime_checkable
class Savable(Protocol):
    """A value that can take itself apart."""

    def state(self) -> State: ...


def save(posterior: Posterior, fingerprint: Fingerprint, method: str, why: str, path: str | Path) -> None:
    """Write the posterior, its method and why that was chosen; the model itself is not written."""
    save_file = _safetensors().torch.save_file
    problem = posterior.problem
    values = (problem.network, problem.likelihood, problem.prior, posterior)
    marks = {**asdict(fingerprint), "quick": ()}
    meta: dict[str, Any] = {"format": FORMAT, "method": method, "why": why, "fingerprint": marks}
    tensors: dict[str, Tensor] = {}
    for name, value in zip(PARTS, values, strict=True):
        if not isinstance(value, Savable):
            raise UnsupportedError(
                f"the {name} {type(value).__name__} has no file form, a method state(); fit again where it is needed."
            )
        meta[name] = _flattened(value.state(), name, tensors)
    text = json.dumps(meta)
    if not Path(path).parent.is_dir():
        raise FileError(f"the folder {Path(path).parent} does not exist; create it first.")
    save_file(tensors, str(path), metadata={"lapwing": text, "sha256": _digest(text, tensors)})


def _flattened(state: State, prefix: str, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Return the state without its tensors, which are added to ``tensors`` under dotted names."""
    for key, tensor in state.tensors.items():
        tensors[f"{prefix}.{key}"] = tensor.detach().cpu().contiguous().clone()
    parts = {key: _flattened(part, f"{prefix}.{key}", tensors) for key, part in state.parts.items()}
    return {"name": state.name, "settings": dict(state.settings), "tensors": list(state.tensors), "parts": parts}


def load(path: str | Path, model: nn.Module) -> tuple[Posterior, Fingerprint, str, str]:
    """Read a posterior for this model, onto its device and in its dtype; return it with its method and the reason."""
    meta, tensors = _read(Path(path))
    model = unwrapped(model)
    refuse_training_mode(model)
    try:
        _refuse_other_model(meta["fingerprint"], model)
        device = next(model.parameters()).device
        tensors = {key: tensor.to(device) for key, tensor in tensors.items()}
        states = {name: _unflattened(meta[name], name, tensors) for name in PARTS}
        network = Network.from_state(states["network"], model)
        likelihood = class_named(states["likelihood"].name).from_state(states["likelihood"])
        prior = class_named(states["prior"].name).from_state(states["prior"], network)
        problem = Problem(network, likelihood, prior)
        posterior = class_named(states["posterior"].name).from_state(states["posterior"], problem)
        return posterior, Fingerprint.of(model), str(meta["method"]), str(meta["why"])
    except (KeyError, TypeError, IndexError, AttributeError, RuntimeError) as error:
        raise FileError(f"{path} is damaged: {type(error).__name__}: {error}. Save the posterior again.") from error


def _unflattened(meta: Mapping[str, Any], prefix: str, tensors: Mapping[str, Tensor]) -> State:
    named = {key: tensors[f"{prefix}.{key}"] for key in meta["tensors"]}
    parts = {key: _unflattened(part, f"{prefix}.{key}", tensors) for key, part in meta["parts"].items()}
    return State(meta["name"], meta["settings"], named, parts)


def _refuse_other_model(stored: Mapping[str, Any], model: nn.Module) -> None:
    """Raise unless the model has the weights of the fingerprint, up to the rounding of its dtype."""
    fingerprint = Fingerprint(
        tuple(stored["names"]), tuple(tuple(shape) for shape in stored["shapes"]), tuple(stored["marks"]),
        tuple(stored["norms"]),
    )  # fmt: skip
    eps = max(torch.finfo(p.dtype).eps for p in model.parameters())
    try:
        fingerprint.refuse_other(model, tolerance=1e-6 if eps == torch.finfo(torch.float64).eps else 4 * eps)
    except ModelError as error:
        raise FileError(f"the file belongs to another model: {error}") from error


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return metadata and tensors; raise if the file is foreign, of another format or damaged."""
    safetensors = _safetensors()
    try:
        with safetensors.safe_open(str(path), framework="pt") as file:
            header = file.metadata() or {}
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    except FileNotFoundError:
        raise
    except (safetensors.SafetensorError, OSError) as error:
        raise FileError(f"{path} cannot be read: {error}. Expected a file written by posterior.save().") from error
    try:
        meta = json.loads(header["lapwing"])
    except (KeyError, json.JSONDecodeError) as error:
        raise FileError(f"{path} holds no Lapwing posterior; expected a file written by posterior.save().") from error
    if not isinstance(meta, dict) or meta.get("format") != FORMAT:
        seen = meta.get("format") if isinstance(meta, dict) else type(meta).__name__
        raise FileError(f"{path} has the format {seen!r}; this version reads {FORMAT!r}.")
    if header.get("sha256") != _digest(header["lapwing"], tensors):
        raise FileError(f"{path} is damaged: its contents do not match their checksum. Save the posterior again.")
    return meta, tensors


def _digest(text: str, tensors: Mapping[str, Tensor]) -> str:
    """Return a checksum over the metadata and every tensor: a damaged disk changes numbers, not names."""
    digest = hashlib.sha256(text.encode())
    for key in sorted(tensors):
        tensor = tensors[key].contiguous()
        digest.update(f"{key}{tensor.dtype}{tuple(tensor.shape)}".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _safetensors() -> Any:
    try:
        import safetensors
        import safetensors.torch
    except ImportError as error:
        raise UnsupportedError("saving and loading needs safetensors: pip install lapwing[files].") from error
    return safetensors
