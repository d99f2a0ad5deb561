"""Models with gradient checkpointing have the posterior of the same models without."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.utils.checkpoint as source
from torch import Tensor, nn

import lapwing as lw
from lapwing.runtime.threads import without_checkpoints
from tests.tolerances import assert_close

D = torch.float64


class Net(nn.Module):
    """Three layers, the middle one in a checkpoint: none, "reentrant", "other" or "sequential"."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.first, self.middle, self.last, self.form = nn.Linear(4, 5), nn.Linear(5, 6), nn.Linear(6, 3), form

    def _middle(self, h: Tensor) -> Tensor:
        return torch.tanh(self.middle(torch.tanh(h)))

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        if self.form == "none":
            h = self._middle(h)
        elif self.form == "sequential":
            parts = nn.Sequential(nn.Tanh(), self.middle, nn.Tanh())
            h = source.checkpoint_sequential(parts, 2, h, use_reentrant=False)
        elif self.form == "applied":
            h = source.CheckpointFunction.apply(self._middle, True, h)
        else:
            h = source.checkpoint(self._middle, h, use_reentrant=self.form == "reentrant")
        return self.last(h)


def fitted(form: str, method: Any) -> tuple[lw.Fitted, Tensor]:
    torch.manual_seed(0)
    model, x = Net(form).double(), torch.randn(9, 4, dtype=D)
    return lw.fit(model, [(x, torch.arange(9) % 3)], "classification", method=method, prior=1.0), x


@pytest.mark.parametrize("method", [lw.Kron(), lw.Diagonal()])
@pytest.mark.parametrize("form", ["reentrant", "other", "sequential", "applied"])
def test_a_checkpoint_changes_nothing(form: str, method: Any) -> None:
    before = (source.CheckpointFunction, source._checkpoint_without_reentrant_generator)
    (posterior, x), (plain, _) = fitted(form, method), fitted("none", method)
    assert [block.kind for block in posterior.network.layout] == ["rows"] * 3
    assert_close(posterior.functions(x).cov, plain.functions(x).cov)
    draws = [p.function_samples(x, 5, torch.Generator().manual_seed(1)) for p in (posterior, plain)]
    assert_close(*draws)
    assert (source.CheckpointFunction, source._checkpoint_without_reentrant_generator) == before


def test_other_threads_keep_their_checkpoints() -> None:
    """Training in another thread meanwhile: its graph has the node of the checkpoint, and its gradient is right."""
    x = torch.randn(3, 4, dtype=D, requires_grad=True)
    names: dict[str, str] = {}

    def train() -> None:
        out = source.checkpoint(torch.sin, x, use_reentrant=True)
        names["thread"] = out.grad_fn.name()
        out.sum().backward()
        other = source.checkpoint(lambda h: h.exp().sin(), x, use_reentrant=False)
        (grad,) = torch.autograd.grad(other.sum(), x)
        assert_close(grad, (x.exp().cos() * x.exp()).detach())

    with without_checkpoints():
        thread = threading.Thread(target=train)
        thread.start()
        thread.join()
        names["here"] = source.checkpoint(torch.sin, x, use_reentrant=True).grad_fn.name()
    assert names == {"thread": "CheckpointFunctionBackward", "here": "SinBackward0"}
    assert_close(x.grad, x.detach().cos())
    assert source.checkpoint(torch.sin, x, use_reentrant=True).grad_fn.name() == "CheckpointFunctionBackward"


def test_an_error_in_a_checkpoint_is_that_of_the_model() -> None:
    def fail(h: Tensor) -> Tensor:
        raise ZeroDivisionError("by the model")

    for reentrant in (True, False):
        with without_checkpoints(), pytest.raises(ZeroDivisionError, match="by the model"):
            source.checkpoint(fail, torch.ones(2, requires_grad=True), use_reentrant=reentrant)
        with pytest.raises(ZeroDivisionError):
            source.checkpoint(fail, torch.ones(2, requires_grad=True), use_reentrant=reentrant)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # of PyTorch, where nothing is recorded
def test_a_checkpoint_of_another_make_is_refused() -> None:
    """A class that was imported beforehand by its name is not found: its node hides what is inside."""
    function = source.CheckpointFunction

    class Other(Net):
        def forward(self, x: Tensor) -> Tensor:
            return self.last(function.apply(self._middle, True, self.first(x)))

    with pytest.raises(lw.errors.ModelError, match=r"reentrant gradient checkpointing, which hides.*Switch it off"):
        lw.fit(Other("none").double(), [(torch.randn(6, 4, dtype=D), torch.arange(6) % 3)], "classification", prior=1.0)
