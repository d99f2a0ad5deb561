"""Posteriors in files: safetensors with JSON metadata. Nothing in a file is ever executed."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lapwing.core.state import State, class_named
from lapwing.curvature.blockwise import BlockwiseCurvature
from lapwing.curvature.full import FullCurvature
from lapwing.curvature.low_rank import LowRankCurvature
from lapwing.curvature.per_output import PerOutputCurvature
from lapwing.errors import FileError, ModelError, UnsupportedError
from lapwing.likelihoods.bernoulli import Bernoulli
from lapwing.likelihoods.categorical import Categorical
from lapwing.likelihoods.gaussian import Gaussian
from lapwing.likelihoods.heteroscedastic import HeteroscedasticGaussian
from lapwing.likelihoods.poisson import Poisson
from lapwing.likelihoods.protocol import Likelihood
from lapwing.linalg.logdet import Logdet
from lapwing.linalg.solution import Solution
from lapwing.losses import Statistics
from lapwing.methods.dropout import Masks
from lapwing.methods.fmgp.kernels import FreeKernel
from lapwing.methods.fmgp.posterior import FunctionPosterior, Sight
from lapwing.methods.hfl.linearised import LinearisedResponse
from lapwing.methods.hfl.nonlinear import ResponsePosterior
from lapwing.methods.hfl.pushed_weights import PushedWeights
from lapwing.methods.inducing.anchored import AnchoredCurvature
from lapwing.methods.inducing.anchors import Anchors
from lapwing.methods.inducing.bounded import BoundedCurvature
from lapwing.methods.inducing.subspace import SubspaceCurvature
from lapwing.methods.swag.draws import DrawnPosterior, Draws
from lapwing.networks.blocks import Block
from lapwing.networks.budget import Footprint
from lapwing.networks.fingerprint import Fingerprint
from lapwing.networks.forward import refuse_training_mode, unwrapped, working_dtype
from lapwing.networks.network import Network
from lapwing.networks.selection import Selection
from lapwing.posteriors.members import MembersPosterior
from lapwing.posteriors.point import PointPosterior
from lapwing.posteriors.protocols import Posterior
from lapwing.posteriors.sampled import SampledPosterior, StoredSamples
from lapwing.posteriors.weight_space import Mode, WeightPosterior
from lapwing.priors.bound import BoundPrior
from lapwing.problem import Problem

SAVED = (
    WeightPosterior | PointPosterior | SampledPosterior | FunctionPosterior | PushedWeights | MembersPosterior
    | DrawnPosterior
)  # fmt: skip
FORMAT = "lapwing-posterior-1"
NETWORK_FIELDS = ("output_shape", "forward_mode", "recurrent")
# These are float64 whatever the model is.
WIDE = ("FullCurvature", "LowRankCurvature", "SubspaceCurvature", "AnchoredCurvature", "BoundedCurvature")
LIKELIHOODS = {c.__name__: c for c in (Gaussian, Categorical, Bernoulli, Poisson, HeteroscedasticGaussian)}


def save(posterior: Posterior, fingerprint: Fingerprint, method: str, path: str | Path) -> None:
    """Write the posterior; the model itself is not written."""
    save_file = _safetensors().torch.save_file
    if isinstance(posterior, ResponsePosterior | LinearisedResponse):
        raise UnsupportedError(
            "this HFL posterior re-optimises on its data at every prediction, and a file does not hold those; fit it "
            "again where it is needed, or save HFL(mode='pretrained')."
        )
    if not isinstance(posterior, SAVED):
        raise UnsupportedError(f"{type(posterior).__name__} cannot be saved; fit it again where it is needed.")
    problem = posterior.problem
    network, likelihood = problem.network, problem.likelihood
    if type(likelihood).__name__ not in LIKELIHOODS:
        raise UnsupportedError(
            f"the likelihood {type(likelihood).__name__} is not one of Lapwing's and has no file form."
        )
    tensors: dict[str, Tensor] = {"theta": posterior.theta}
    prior = problem.prior.state()
    tensors.update({"prior." + key: t for key, t in prior.tensors.items()})
    if network.shift is not None:
        tensors["network.shift"] = network.shift
    tensors["likelihood.dispersion"] = likelihood.dispersion.detach()
    ratios = getattr(likelihood, "ratios", None)
    if ratios is not None:
        tensors["likelihood.ratios"] = ratios
    if network.selection.index is not None:
        tensors["selection.index"] = network.selection.index
    kind: dict[str, Any] = {"name": "none"}
    if isinstance(posterior, WeightPosterior):
        tensors.update({"curvature." + key: t for key, t in posterior.curvature.tensors().items()})
        kind = _kind(posterior.curvature)
        if posterior.mode is not None:
            tensors["mode.theta"] = posterior.mode.theta
            tensors["mode.loss"] = torch.tensor(posterior.mode.loss, dtype=torch.float64)
    if isinstance(posterior, SampledPosterior):
        kind = {
            "name": "samples",
            "iterations": posterior.solution.iterations,
            "tolerance": posterior.solution.tolerance,
        }
        logdet = posterior.solver.logdet(problem)
        tensors["samples.x"], tensors["samples.residuals"] = posterior.solution.x, posterior.solution.residuals
        tensors["samples.logdet"] = logdet.value.detach()
        kind["error"] = logdet.error
    if isinstance(posterior, PushedWeights):
        kind = {"name": "pushed weights", "variant": posterior.variant, "scale": posterior.scale}
        kind["findings"] = posterior.findings
        tensors["pushed.moved"], tensors["pushed.strength"] = posterior.moved, posterior.strength
    if isinstance(posterior, MembersPosterior):
        kind = {"name": "dropout", **posterior.members.state().settings}
    if isinstance(posterior, DrawnPosterior):
        draws = posterior.draws
        kind = {"name": "draws", "count": draws.count, "seed": draws.seed, "learning_rate": posterior.learning_rate}
        own = {"mean": draws.mean, "variance": draws.variance, "deviations": draws.deviations}
        tensors.update({"draws." + key: t for key, t in own.items()})
    if isinstance(posterior, FunctionPosterior):
        kind = {"name": "function space", **posterior.settings}
        own = {"points": posterior.points, "numbers": posterior.numbers, "mix": posterior.mix}
        tensors.update({"process." + key: t for key, t in (own | posterior.kernel.tensors()).items()})
        if posterior.sight.last is not None:
            kind["last"] = _described(posterior.sight.last)
    meta = {
        "format": FORMAT,
        "method": method,
        "likelihood": {"name": type(likelihood).__name__, "settings": likelihood.settings()},
        "prior": {"name": prior.name, "settings": prior.settings},
        **_described(network),
        "statistics": asdict(posterior.statistics),
        "curvature": kind,
        "fingerprint": {**asdict(fingerprint), "quick": ()},
    }  # fmt: skip
    plain = {key: t.detach().cpu().contiguous().clone() for key, t in tensors.items()}
    text = json.dumps(meta)
    if not Path(path).parent.is_dir():
        raise FileError(f"the folder {Path(path).parent} does not exist; create it first.")
    save_file(plain, str(path), metadata={"lapwing": text, "sha256": _digest(text, plain)})


def _described(network: Network) -> dict[str, Any]:
    """What is needed besides the model to have the network again."""
    return {
        "selection": {"names": network.selection.names, "shapes": network.selection.shapes},
        "layout": [asdict(block) for block in network.layout],
        "network": {name: getattr(network, name) for name in (*NETWORK_FIELDS, "known")},
        "footprint": asdict(network.footprint),
    }


def _network(model: nn.Module, meta: dict[str, Any], index: Tensor | None) -> Network:
    """The inverse of ``_described``."""
    stored = meta["selection"]
    selection = Selection(tuple(stored["names"]), tuple(tuple(s) for s in stored["shapes"]), index)
    layout = tuple(Block(**{**block, "shape": tuple(block["shape"])}) for block in meta["layout"])
    fields = {name: meta["network"][name] for name in NETWORK_FIELDS}
    fields["output_shape"] = tuple(fields["output_shape"])
    known = meta["network"].get("known", {})  # earlier files have none
    return Network(model, selection, layout, footprint=Footprint(**meta["footprint"]), known=known, **fields)


def _kind(curvature: Any) -> dict[str, Any]:
    """What is needed besides the tensors to build a curvature again."""
    found: dict[str, Any] = {"name": type(curvature).__name__}
    if isinstance(curvature, PerOutputCurvature):
        found["part"] = _kind(curvature.parts[0])
        found["outputs"] = len(curvature.parts)
    if isinstance(curvature, BlockwiseCurvature):
        found["structures"] = curvature.structures()
    if isinstance(curvature, FullCurvature):
        found["definite"] = curvature.definite
    return found


def load(path: str | Path, model: nn.Module) -> tuple[Posterior, Fingerprint, str]:
    """Read a posterior for this model, onto the model's device and in its dtype."""
    meta, tensors = _read(Path(path))
    model = unwrapped(model)
    refuse_training_mode(model)
    try:
        return *_assembled(meta, tensors, model), str(meta["method"])
    except (KeyError, TypeError, IndexError, RuntimeError) as error:
        raise FileError(f"{path} is damaged: {type(error).__name__}: {error}. Save the posterior again.") from error


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
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


def _digest(text: str, tensors: dict[str, Tensor]) -> str:
    """Over the metadata and every tensor: a damaged disk changes numbers, not names."""
    digest = hashlib.sha256(text.encode())
    for key in sorted(tensors):
        tensor = tensors[key].contiguous()
        digest.update(f"{key}{tensor.dtype}{tuple(tensor.shape)}".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _assembled(meta: dict[str, Any], tensors: dict[str, Tensor], model: nn.Module) -> tuple[Posterior, Fingerprint]:
    stored = meta["fingerprint"]
    fingerprint = Fingerprint(
        tuple(stored["names"]),
        tuple(tuple(s) for s in stored["shapes"]),
        tuple(stored["marks"]),
        tuple(stored["norms"]),
    )
    narrow = min((p.dtype for p in model.parameters()), key=lambda d: -torch.finfo(d).eps)
    try:
        fingerprint.refuse_other(model, tolerance=4 * torch.finfo(narrow).eps if narrow != torch.float64 else 1e-6)
    except ModelError as error:
        raise FileError(f"the file belongs to another model: {error}") from error
    chosen = dict(model.named_parameters())
    like = chosen[meta["selection"]["names"][0]]
    dtype, device = working_dtype(like.dtype), like.device

    def moved(t: Tensor) -> Tensor:
        return t.to(device, dtype if t.is_floating_point() and t.ndim else t.dtype)

    network = _network(model, meta, tensors.get("selection.index"))
    network = network.shifted(tensors.get("network.shift"))
    problem = Problem(network, _likelihood(meta, tensors, device), _prior(meta["prior"], tensors, network))
    statistics = Statistics(**{**meta["statistics"], "losses": tuple(meta["statistics"]["losses"])})
    kept = meta["curvature"].get("part", meta["curvature"])["name"] in WIDE
    parts = {
        key.removeprefix("curvature."): t.to(device) if kept else moved(t)
        for key, t in tensors.items()
        if key.startswith("curvature.")
    }
    theta = tensors["theta"].to(device, dtype)
    current = Fingerprint.of(model)
    if meta["curvature"]["name"] == "none":
        return PointPosterior(problem, statistics, theta), current
    if meta["curvature"]["name"] == "dropout":
        masks = Masks.of(model, meta["curvature"]["count"], meta["curvature"]["seed"])
        return MembersPosterior(problem, masks, statistics, theta), current
    if meta["curvature"]["name"] == "draws":
        kind = meta["curvature"]
        mean, variance, deviations = (tensors["draws." + key].to(theta) for key in ("mean", "variance", "deviations"))
        draws = Draws(network, mean, variance, deviations, kind["count"], kind["seed"])
        return DrawnPosterior(problem, draws, statistics, theta, kind["learning_rate"]), current
    if meta["curvature"]["name"] == "pushed weights":
        kind = meta["curvature"]
        moved_weights, strength = tensors["pushed.moved"].to(theta), tensors["pushed.strength"].to(theta)
        found = tuple(kind.get("findings", ()))
        pushed = PushedWeights(
            problem, moved_weights, strength, kind["variant"], statistics, theta, kind["scale"], found
        )
        return pushed, current
    if meta["curvature"]["name"] == "function space":
        return _function_space(meta["curvature"], tensors, problem, statistics, theta), current
    if meta["curvature"]["name"] == "samples":
        stored = _samples(meta["curvature"], tensors, problem, device)
        return SampledPosterior(problem, stored, statistics, theta), current
    mode = None
    if "mode.theta" in tensors:
        mode = Mode(tensors["mode.theta"].to(device), float(tensors["mode.loss"]))
    curvature = _curvature(meta["curvature"], parts, network)
    return WeightPosterior(problem, curvature, statistics, theta, mode), current


def _function_space(
    kind: dict[str, Any], tensors: dict[str, Tensor], problem: Problem, statistics: Statistics, theta: Tensor
) -> FunctionPosterior:
    own = {key.removeprefix("process."): t.to(theta.device) for key, t in tensors.items() if key.startswith("process.")}
    last = _network(problem.network.model, kind["last"], None) if kind["features"] else None
    kernel = FreeKernel(kind["kind"], own["log_lengths"], own["mixing"])
    sight = Sight(problem.network, last)
    return FunctionPosterior(problem, sight, kernel, own["points"], own["numbers"], own["mix"], statistics, theta)


def _samples(kind: dict[str, Any], tensors: dict[str, Tensor], problem: Problem, device: torch.device) -> StoredSamples:
    x, residuals = tensors["samples.x"].to(device), tensors["samples.residuals"].to(device)
    solution = Solution(x, residuals, kind["iterations"], kind["tolerance"])
    logdet = Logdet(tensors["samples.logdet"].to(device), kind["error"])
    return StoredSamples(problem.prior.vector, problem.likelihood.dispersion, solution, logdet)


def _prior(stored: dict[str, Any], tensors: dict[str, Tensor], network: Network) -> BoundPrior:
    parts = {key.removeprefix("prior."): t for key, t in tensors.items() if key.startswith("prior.")}
    prior: BoundPrior = class_named(stored["name"]).from_state(
        State(stored["name"], stored["settings"], parts), network
    )
    return prior


def _likelihood(meta: dict[str, Any], tensors: dict[str, Tensor], device: torch.device) -> Likelihood:
    name = meta["likelihood"]["name"]
    if name not in LIKELIHOODS:
        raise FileError(f"the file names the likelihood {name!r}, which this version does not have.")
    settings = {k: tuple(v) if isinstance(v, list) else v for k, v in meta["likelihood"]["settings"].items()}
    if name == "Gaussian" and "likelihood.ratios" in tensors:
        settings["ratios"] = tensors["likelihood.ratios"].to(device)
    build: Any = LIKELIHOODS[name]
    built: Likelihood = build(**settings)
    return built.with_dispersion(tensors["likelihood.dispersion"].to(device))


def _curvature(kind: dict[str, Any], parts: dict[str, Tensor], network: Network) -> Any:
    name, layout, selection = kind["name"], network.layout, network.selection
    if name == "PerOutputCurvature":
        each = (_curvature(kind["part"], _under(parts, i), network) for i in range(kind["outputs"]))
        return PerOutputCurvature(tuple(each), parts["start"])
    if name == "BlockwiseCurvature":
        states = [State(name, tensors=_under(parts, i)) for i, name in enumerate(kind["structures"])]
        blocks = tuple(class_named(state.name).from_state(state, network) for state in states)
        return BlockwiseCurvature(blocks, layout, selection)
    if name == "FullCurvature":
        return FullCurvature(parts["matrix"], selection, kind["definite"])
    if name == "LowRankCurvature":
        return LowRankCurvature(parts["values"], parts["vectors"], layout, selection, float(parts["residual"]))
    if name == "BoundedCurvature":
        known = (parts["values"], parts["vectors"], layout, selection, float(parts["residual"]))
        return BoundedCurvature(LowRankCurvature(*known), parts["own"])
    if name == "SubspaceCurvature":
        return SubspaceCurvature(parts["directions"], parts["gram"], selection)
    if name == "AnchoredCurvature":
        inputs = parts["inputs"]
        if inputs.is_floating_point():  # as the model takes them, which may be narrower or wider than it was
            inputs = inputs.to(next(network.model.parameters()).dtype)
        anchors = Anchors(network, inputs, parts["outputs"])
        return AnchoredCurvature(anchors, parts["mix"], parts.get("own"))
    raise FileError(f"the file holds the curvature {name!r}, which this version does not have.")


def _under(parts: dict[str, Tensor], number: int) -> dict[str, Tensor]:
    """The tensors whose name starts with this number, without it."""
    start = f"{number}."
    return {key.removeprefix(start): t for key, t in parts.items() if key.startswith(start)}


def _safetensors() -> Any:
    try:
        import safetensors
        import safetensors.torch
    except ImportError as error:
        raise UnsupportedError("saving and loading needs safetensors: pip install lapwing[files].") from error
    return safetensors
