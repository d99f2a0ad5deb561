"""Weights of samples: how they are given, carried and refused."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import lapwing as lw
from lapwing.data.batches import Data
from lapwing.data.inputs import merge_batches
from lapwing.errors import DataError, UnsupportedError

CPU = torch.device("cpu")
X, Y, W = torch.arange(12.0).reshape(6, 2), torch.arange(6.0)[:, None], torch.tensor([1.0, 0, 2, 0.5, 1, 3])


def weights_of(source, **options):
    return torch.cat([batch.weights for batch in Data(source, CPU, **options).batches("", weighted=True)])


@pytest.mark.parametrize(
    "source",
    [
        lw.samples.weighted((X, Y, W)),
        lw.samples.weighted([(X[:4], Y[:4], W[:4]), [X[4:], Y[4:], W[4:]]]),
        lw.samples.weighted(DataLoader(TensorDataset(X, Y, W), batch_size=4)),
        lw.samples.weighted([{"x": X, "y": Y, "weights": W}]),
        lw.samples.weighted([{"x": X, "answer": Y, "w": W}], key="w", target_key="answer"),
        (X, lw.samples.Weighted(Y, W)),
        [(X, lw.samples.Weighted(Y, W.tolist()))],
        lw.samples.unpacked([(W, Y, X)], lambda item: (item[2], lw.samples.Weighted(item[1], item[0]))),
    ],
)
def test_every_form_gives_the_same_weights(source):
    key = "answer" if "answer" in str(source) else None
    assert torch.equal(weights_of(source, target_key=key), W.double())


def test_joined_batches_keep_their_weights():
    data = Data(lw.samples.weighted([(X[:2], Y[:2], W[:2]), (X[2:], Y[2:], W[2:])]), CPU)
    (batch,) = merge_batches(data.batches("", weighted=True), 6)
    assert torch.equal(batch.weights, W.double())
    assert torch.equal(batch.weights_of(slice(1, 3)), W[1:3].double())


def test_a_pass_that_does_not_take_weights_refuses_them():
    with pytest.raises(UnsupportedError, match=r"the data have weights, which are not taken here \(products\)"):
        next(Data((X, lw.samples.Weighted(Y, W)), CPU).batches("products"))


def test_predictions_leave_weights_out():
    net = torch.nn.Linear(2, 1)
    loader = lw.samples.weighted(DataLoader(TensorDataset(X, Y, W), batch_size=4))
    posterior = lw.fit(net, loader, lw.Gaussian(1.0), prior=1.0)
    assert torch.equal(posterior.predict(loader).mean, posterior.predict(X).mean)


def test_weights_that_change_between_passes_are_noticed():
    class Changing:
        passes = 0

        def __iter__(self):
            self.passes += 1
            return iter([(X, lw.samples.Weighted(Y, W + self.passes))])

    data = Data(Changing(), CPU)
    assert not data.is_repeatable()
    assert data.has_weights


@pytest.mark.parametrize(
    ("weights", "seen"),
    [
        (W[:5], "for 6 samples"),
        (W[:, None], "for 6 samples"),
        (-W, "run from -3 to"),
        (W / 0, "expected finite numbers"),
        ("heavy", "expected a tensor"),
        (W.to(torch.complex64), "expected a real number"),
    ],
)
def test_other_weights_are_refused(weights, seen):
    with pytest.raises(DataError, match=seen):
        weights_of([(X, lw.samples.Weighted(Y, weights))])


def test_batches_without_weights_are_refused():
    with pytest.raises(DataError, match=r"expected .inputs, targets, weights."):
        weights_of(lw.samples.weighted([(X, Y)]))
    with pytest.raises(DataError, match="has no weights under 'weights'"):
        weights_of(lw.samples.weighted([{"x": X, "y": Y}]))
    with pytest.raises(DataError, match="one-shot iterator"):
        lw.samples.weighted(iter([(X, Y, W)]))
    with pytest.raises(DataError, match=r"Wrap it in a DataLoader"):
        lw.samples.weighted(TensorDataset(X, Y, W))
    with pytest.raises(DataError, match=r"lw.samples.weighted"):
        weights_of([(X, Y, W)])


def test_data_of_weight_zero_alone_are_refused():
    with pytest.raises(DataError, match="has the weight zero"):
        lw.fit(torch.nn.Linear(2, 1), lw.samples.weighted((X, Y, 0 * W)), lw.Gaussian(1.0), prior=1.0)
