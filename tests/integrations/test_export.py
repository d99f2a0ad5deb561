"""Last-layer posteriors by torch.export and by ONNX: probabilities and variances of other batches equal predict's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lapwing as lw
from tests.tolerances import assert_near

ort = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

ROWS, INPUTS, CLASSES, NEW = 30, 4, 3, 13
LIMIT = 1e-5
pytestmark = pytest.mark.filterwarnings("ignore")  # of the exporters, about themselves


def generated(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


X, Z = generated(ROWS, INPUTS), generated(NEW, INPUTS, seed=1)
LABELS, NUMBERS = torch.arange(ROWS) % CLASSES, generated(ROWS, 2, seed=2)


def net(outputs: int) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(INPUTS, 7), nn.ReLU(), nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, outputs))


def fitted(name: str) -> lw.Fitted:
    last: dict[str, Any] = {"weights": lw.last_layer}
    classes = net(CLASSES), [(X, LABELS)], "classification"
    # Few cells, since the exporters' time grows with them.
    if name == "regression":
        few = lw.tuners.Integrate((Z, generated(NEW, 2, seed=4)), ratios=(0.5, 2.0))
        return lw.fit(net(2), [(X, NUMBERS)], "regression", tuner=few, **last)
    if name == "mixture":
        few = lw.tuners.Integrate((Z, LABELS[:NEW]), ratios=(0.5, 2.0), temperatures=(1.0, 1.5))
        return lw.fit(*classes, tuner=few, **last)
    methods = {"kron": lw.Kron(), "full": lw.Full(), "diagonal": lw.Diagonal(), "ekron": lw.EKron()}
    return lw.fit(*classes, method=methods[name], prior=0.5, **last)


def expected(posterior: lw.Fitted, x: Tensor) -> tuple[Tensor, Tensor]:
    predictive = posterior.predict(x)
    if hasattr(predictive, "probs"):
        return predictive.probs, posterior.functions(x).variance
    return predictive.mean, predictive.variance


def both_equal(module: nn.Module, theirs: tuple[Tensor, Tensor], path: Path) -> None:
    """Export the module in both ways, and compare what they return for another batch with ``theirs``."""
    dynamic = (({0: torch.export.Dim("batch")},),)
    exported = torch.export.export(module, (X[:5],), dynamic_shapes=dynamic)
    for ours, value in zip(exported.module()(Z), theirs, strict=True):
        assert_near(ours, value, LIMIT)
    torch.onnx.export(module, (X[:5],), str(path), dynamo=True, dynamic_shapes=dynamic, verbose=False)
    session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    answers = session.run(None, {session.get_inputs()[0].name: Z.numpy()})
    for answer, value in zip(answers, theirs, strict=True):
        assert_near(torch.from_numpy(answer), value, LIMIT)


@pytest.mark.parametrize("name", ["kron", "full", "diagonal", "ekron", "mixture", "regression"])
def test_another_batch_through_both(name: str, tmp_path: Path) -> None:
    posterior = fitted(name)
    both_equal(posterior.as_module("moments"), expected(posterior, Z), tmp_path / "net.onnx")


@pytest.mark.parametrize("name", ["kron", "full", "mixture", "regression"])
def test_after_loading(name: str, tmp_path: Path) -> None:
    posterior, path = fitted(name), tmp_path / "net.lapwing"
    posterior.save(path)
    loaded = lw.load(path, net(2 if name == "regression" else CLASSES))
    both_equal(loaded.as_module("moments"), expected(posterior, Z), tmp_path / "net.onnx")


def test_all_weights_are_refused_with_the_reason() -> None:
    module = lw.fit(net(CLASSES), [(X, LABELS)], "classification", prior=0.5).as_module()
    with pytest.raises(Exception, match=r"needs a closed form.*weights=lw\.last_layer"):
        torch.onnx.export(module, (X[:5],), dynamo=True, verbose=False)
