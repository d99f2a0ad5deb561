"""skorch nets as ``lw.fit`` takes them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from skorch import NeuralNetClassifier, NeuralNetRegressor
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lapwing as lw
from lapwing.errors import DataError, ModelError

X = np.random.RandomState(0).randn(120, 3).astype(np.float32)
LABELS = (X[:, 0] > 0).astype(np.int64) + (X[:, 1] > 1)
TARGETS = np.sin(X[:, :2])


@pytest.fixture(scope="module")
def classifier() -> NeuralNetClassifier:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Dropout(0.2), nn.Linear(6, 3))
    net = NeuralNetClassifier(network, criterion=nn.CrossEntropyLoss, max_epochs=3, train_split=None, verbose=0)
    return net.fit(X, LABELS)


def test_classifier_with_arrays(classifier: NeuralNetClassifier) -> None:
    classifier.module_.train()  # as skorch leaves it
    posterior = lw.fit(classifier, (X, LABELS), "classification")
    tensors = torch.as_tensor(X), torch.as_tensor(LABELS)
    expected = lw.fit(classifier.module_.eval(), tensors, "classification")
    torch.testing.assert_close(posterior.predict(tensors[0]).probs, expected.predict(tensors[0]).probs)
    assert posterior.network.model is classifier.module_


def test_classifier_with_datasets_and_loaders(classifier: NeuralNetClassifier) -> None:
    tensors = torch.as_tensor(X), torch.as_tensor(LABELS)
    rows = TensorDataset(*tensors)
    forms = [tensors, rows, DataLoader(rows, 50), classifier.get_dataset(X, LABELS), [tensors]]
    stds = [lw.fit(classifier, data, "classification", prior=1.0).functions(tensors[0]).std for data in forms]
    for std in stds[1:]:
        torch.testing.assert_close(std, stds[0], rtol=1e-4, atol=1e-6)


def test_regressor() -> None:
    torch.manual_seed(0)
    net = NeuralNetRegressor(nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 2)), max_epochs=3, verbose=0)
    net.fit(X, TARGETS)
    posterior = lw.fit(net, (X, TARGETS), "regression")
    predictive = posterior.predict(torch.as_tensor(X[:5]))
    np.testing.assert_allclose(predictive.mean.detach(), net.predict(X[:5]), rtol=1e-5, atol=1e-6)
    assert predictive.std.shape == (5, 2)


def test_further_training_is_noticed(classifier: NeuralNetClassifier) -> None:
    posterior = lw.fit(classifier, (X, LABELS), "classification", prior=1.0)
    classifier.partial_fit(X, LABELS)
    classifier.module_.eval()
    with pytest.raises(ModelError, match="changed"):
        posterior.predict(torch.as_tensor(X))


def test_refusals(classifier: NeuralNetClassifier) -> None:
    with pytest.raises(ModelError, match=r"net\.fit"):
        lw.fit(NeuralNetClassifier(nn.Linear(3, 3)), (X, LABELS), "classification")
    with pytest.raises(DataError, match="data is None"):
        lw.fit(classifier, None, "classification")
    probabilities = NeuralNetClassifier(nn.Sequential(nn.Linear(3, 3), nn.Softmax(-1)), max_epochs=1, verbose=0)
    with pytest.raises(ModelError, match="Leave"):
        lw.fit(probabilities.fit(X, LABELS), (X, LABELS), "classification")


def test_a_recipe_of_crossfit() -> None:
    def train_fn(rows: torch.Tensor, seed: int) -> NeuralNetClassifier:
        network = nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 3))
        return NeuralNetClassifier(network, criterion=nn.CrossEntropyLoss, train_split=None, verbose=0).fit(
            X[rows], LABELS[rows]
        )

    crossed = lw.crossfit(train_fn, (X, LABELS), "classification", folds=2, method=lw.Diagonal())
    assert crossed.out_of_fold.probs.shape == (120, 3)
    assert not any("another network" in finding for finding in crossed.findings)  # one seed, one network
