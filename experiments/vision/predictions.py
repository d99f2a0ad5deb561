"""Class probabilities in parts that fit a GPU, from networks and from draws of their weights; and their scores."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, vmap

import lapwing as lw
from lapwing import metrics
from lapwing.errors import DataError
from lapwing.predictives.labels import SoftmaxPredictive

Predict = Callable[[Tensor], Tensor]  # from standardised images to the probabilities of the classes, in float64
SMALLEST = torch.finfo(torch.float64).tiny  # a probability of zero would make a mean infinite


def in_parts(predict: Predict, x: Tensor, size: int = 1000) -> Tensor:
    """Return the probabilities of all images, ``size`` at a time."""
    with torch.no_grad():
        return torch.cat([predict(part) for part in x.split(size)])


def softmax_of(model: nn.Module, temperature: float = 1.0) -> Predict:
    """Return the probabilities of the plain network, with logits over the temperature."""
    return lambda x: (model(x).double() / temperature).softmax(-1)


def average_of(models: Sequence[nn.Module]) -> Predict:
    """Return the mean of the probabilities of several networks: a deep ensemble."""
    return lambda x: torch.stack([model(x).double().softmax(-1) for model in models]).mean(0)


def probabilities_of(posterior: lw.Fitted) -> Predict:
    """Return the probabilities of a fitted posterior."""
    return lambda x: posterior.predict(x).log_probs.double().exp()


def drawn_logits(posterior: lw.Fitted, draws: int = 1000) -> Predict:
    """Return the probabilities of a posterior from draws of its logits, in place of a link."""

    def predict(x: Tensor) -> Tensor:
        return SoftmaxPredictive(posterior.functions(x), "mc", draws).log_probs.double().exp()

    return predict


def sampled_network(posterior: lw.Fitted, draws: int, seed: int, together: int = 10) -> Predict:
    """Return the mean of the probabilities of the real network under draws of its weights.

    ``posterior.network_samples`` gives the same outputs one draw after another and draws again at every call; here the
    weights are drawn once, and ``together`` networks run at the same time.
    """
    if draws < 1 or together < 1:
        raise DataError(f"{draws} draws, {together} together; expected at least one of each.")
    model, selection = posterior.network.model, posterior.network.selection
    if selection.index is not None:
        raise DataError("some weights of a layer were selected; expected whole layers.")
    weights = posterior.weight_samples(draws, torch.Generator().manual_seed(seed))
    shapes = {name: model.get_parameter(name).shape for name in selection.names}
    flat = weights.split([shape.numel() for shape in shapes.values()], 1)
    drawn = {name: part.reshape(draws, *shapes[name]) for name, part in zip(shapes, flat, strict=True)}

    def outputs(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(model, parameters, (x,)).double().softmax(-1)

    def predict(x: Tensor) -> Tensor:
        total = torch.zeros((), dtype=torch.float64, device=x.device)
        for first in range(0, draws, together):
            some = {name: part[first : first + together] for name, part in drawn.items()}
            total = total + vmap(outputs, (0, None))(some, x).sum(0)
        return total / draws

    return predict


def best_temperature(logits: Tensor, y: Tensor) -> float:
    """Return the temperature of the logits with the highest likelihood of the classes, by golden sections.

    >>> best_temperature(torch.tensor([[2.0, 0.0], [2.0, 0.0], [2.0, 0.0]]), torch.tensor([0, 0, 1])) > 1
    True
    """
    low, high, ratio = -3.0, 3.0, (math.sqrt(5) - 1) / 2
    cost = lambda t: float(F.cross_entropy(logits / math.exp(t), y))
    for _ in range(40):
        a, b = high - ratio * (high - low), low + ratio * (high - low)
        low, high = (low, b) if cost(a) < cost(b) else (a, high)
    return math.exp(0.5 * (low + high))


def scores_of(probs: Tensor, y: Tensor, strange: Tensor | None = None) -> dict[str, float]:
    """Return accuracy, NLL, ECE and Brier score, and how well the entropy tells strange images apart (OOD AUROC)."""
    probs = probs.double().clamp_min(SMALLEST)
    scores = {
        "accuracy": metrics.accuracy(probs, y),
        "NLL": metrics.categorical_nll(probs, y),
        "ECE": metrics.ece(probs, y),
        "Brier": metrics.brier(probs, y),
    }
    if strange is not None:
        entropies = [torch.special.entr(p.double()).sum(-1) for p in (probs, strange)]
        scores["OOD AUROC"] = metrics.auroc(*entropies)
    return scores
