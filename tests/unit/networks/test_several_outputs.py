"""One output of several: the posterior is that of a model which returns this output alone."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lapwing as lw
from lapwing.errors import ModelError, UnsupportedError
from lapwing.networks.forward import path_of, pick_output
from tests.tolerances import assert_close

Pair = namedtuple("Pair", ["small", "large"])


@dataclass
class Outputs:
    logits: Tensor
    heads: Pair


class Heads(nn.Module):
    """A body with two heads of 2 and 4 outputs, returned in a form of choice."""

    def __init__(self, form: Any) -> None:
        super().__init__()
        self.body, self.small, self.large, self.form = nn.Linear(3, 5), nn.Linear(5, 2), nn.Linear(5, 4), form

    def forward(self, x: Tensor) -> Any:
        h = self.body(x).tanh()
        return self.form(self.small(h), self.large(h))


class Alone(nn.Module):
    """The small head of another model."""

    def __init__(self, heads: Heads) -> None:
        super().__init__()
        self.body, self.small = heads.body, heads.small

    def forward(self, x: Tensor) -> Tensor:
        return self.small(self.body(x).tanh())


FORMS = {
    "key": (lambda small, large: {"large": large, "small": small}, "small"),
    "other than logits": (lambda small, large: {"logits": large, "small": small}, "small"),
    "position": (lambda small, large: (large, small), -1),
    "field": (Pair, "small"),
    "inside": (lambda small, large: {"logits": large, "heads": [large, {"small": small}]}, ("heads", 1, "small")),
    "object": (lambda small, large: Outputs(large, Pair(small, large)), ("heads", "small")),
}
X = torch.randn(8, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
Y = X[:, :2].sin()


def model(form: str) -> Heads:
    torch.manual_seed(1)
    return Heads(FORMS[form][0]).double()


@pytest.mark.parametrize("form", FORMS)
def test_posterior_is_that_of_the_head_alone(form):
    net = model(form)
    one = lw.fit(net, [(X, Y)], lw.Gaussian(0.1), output=FORMS[form][1], prior=2.0)
    other = lw.fit(Alone(net), [(X, Y)], lw.Gaussian(0.1), prior=2.0)
    assert one.network.selection.names == other.network.selection.names  # not the weights of the other head
    assert_close(one.functions(X).cov, other.functions(X).cov)
    assert_close(one.log_evidence(), other.log_evidence())
    assert isinstance(net(X), dict | tuple | Outputs)  # the model is as it was


def test_files_hold_the_choice(tmp_path):
    net = model("inside")
    fitted = lw.fit(net, [(X, Y)], "regression", output=("heads", 1, "small"))
    fitted.save(tmp_path / "net")
    again = lw.load(tmp_path / "net", net)
    assert again.network.output == ("heads", 1, "small")
    assert_close(again.predict(X).std, fitted.predict(X).std)


def test_without_a_choice_logits_are_taken():
    net = model("other than logits")
    assert lw.check(net, X).outputs == (4,)
    assert lw.check(net, X, output="small").outputs == (2,)


def test_train_learns_the_chosen_head_alone():
    net = model("other than logits")
    trained = lw.train(net, [(X, Y)], "regression", output="small", recipe=lw.recipes.online(epochs=2))
    assert torch.equal(trained.model.large.weight, net.large.weight)
    assert not torch.equal(trained.model.small.weight, net.small.weight)
    assert trained.posterior.predict(X).mean.shape == (8, 2)


def test_members_of_an_ensemble_take_the_same_head():
    net, other = model("other than logits"), Heads(FORMS["other than logits"][0]).double()
    method = lw.baselines.Ensemble([other])
    fitted = lw.fit(net, [(X, Y)], lw.Gaussian(0.1), method=method, output="small")
    with torch.no_grad():
        expected = 0.5 * (net(X)["small"] + other(X)["small"])
    assert_close(fitted.functions(X).mean, expected)


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ("smal", "expected one of 'logits', 'heads'"),
        (("heads", 2), "expected one of 0, 1"),
        (("logits", 0), "expected no output="),
        (("heads", 1), r"returns a dict at \['heads'\]\[1\]"),
    ],
)
def test_parts_that_do_not_exist_are_refused_with_those_that_do(output, message):
    with pytest.raises(ModelError, match=message):
        lw.fit(model("inside"), [(X, Y)], lw.Gaussian(0.1), output=output)


def test_a_model_with_several_outputs_is_told_of_the_choice():
    with pytest.raises(ModelError, match=r"by output=\.\.\. \('large', 'small'\)"):
        lw.fit(model("key"), [(X, Y)], lw.Gaussian(0.1))


@pytest.mark.parametrize("output", [2.5, "", (), ("heads", None), True])
def test_other_choices_are_refused(output):
    with pytest.raises(UnsupportedError, match="output is"):
        path_of(output)


def test_weights_of_another_head_alone_are_refused():
    with pytest.raises(ModelError, match="does not depend on any selected parameter"):
        lw.fit(model("key"), [(X, Y)], lw.Gaussian(0.1), output="small", weights=lw.named("large.*"))


def test_a_model_that_cannot_be_copied_is_refused():
    hidden = nn.Linear(3, 2).double()

    class Bypassing(nn.Module):
        """A model that uses its layer through a variable of its own, not through its modules."""

        def __init__(self) -> None:
            super().__init__()
            self.layer = hidden

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"small": hidden(x)}

    with pytest.raises(ModelError, match="no copy of it can run"):
        lw.fit(Bypassing(), [(X, Y)], lw.Gaussian(0.1), output="small", prior=1.0)


def test_a_tensor_needs_no_choice():
    assert pick_output(X, ()) is X
