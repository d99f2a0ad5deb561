"""Estimators for scikit-learn."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
from sklearn.datasets import make_classification
from sklearn.exceptions import NotFittedError
from torch import nn
from torch.nn.functional import mse_loss

import lapwing as lw
from lapwing.errors import DataError, ModelError, NumericalError, UnsupportedError
from lapwing.sklearn import (
    InUnitsOfTargets,
    LapwingClassifier,
    LapwingRegressor,
    Schedule,
    Standardised,
    column_scales,
    place,
    small_network,
)

# The estimators: their predictions are those of the posterior, in the units and labels of the targets.

RANDOM = np.random.RandomState(3)
X = RANDOM.randn(90, 3) * [1, 10, 0.1] + 5
Y = 1e4 + 500 * np.sin(X[:, 0]) + 20 * X[:, 1] + 10 * RANDOM.randn(90)


@pytest.fixture(scope="module")
def regressor() -> LapwingRegressor:
    return LapwingRegressor((9,), max_iter=60, learning_rate_init=2e-2, random_state=0).fit(X, Y)


@pytest.fixture(scope="module")
def classifier() -> LapwingClassifier:
    labels = np.array(["few", "many", "none"])[(X[:, 1] > 2).astype(int) + (X[:, 1] > 9)]
    return LapwingClassifier((9,), max_iter=30, random_state=0).fit(X, labels)


def test_regressor_predicts_in_the_units_of_the_targets(regressor: LapwingRegressor) -> None:
    mean, std = regressor.predict(X, return_std=True)
    predictive = regressor.posterior_.predict(torch.as_tensor(X))
    np.testing.assert_allclose(mean, predictive.mean[:, 0].detach())
    np.testing.assert_allclose(std, predictive.std[:, 0].detach())
    assert regressor.score(X, Y) > 0.9
    assert 10 < std.mean() < 200  # the noise is 10, the targets vary by 450
    np.testing.assert_array_equal(regressor.predict(X), mean)


def test_regression_follows_a_change_of_units(regressor: LapwingRegressor) -> None:
    other = LapwingRegressor((9,), max_iter=60, learning_rate_init=2e-2, random_state=0).fit(X, 3 * Y - 1e4)
    mean, std = regressor.predict(X, return_std=True)
    changed, changed_std = other.predict(X, return_std=True)
    np.testing.assert_allclose(changed, 3 * mean - 1e4, rtol=1e-4)  # rounding grows over the steps of the training
    np.testing.assert_allclose(changed_std, 3 * std, rtol=1e-2)


def test_several_targets_keep_their_shape() -> None:
    y = np.stack([Y, -3 * X[:, 2]], 1)
    mean, std = LapwingRegressor((5,), max_iter=5, random_state=1).fit(X, y).predict(X[:4], return_std=True)
    assert mean.shape == std.shape == (4, 2)


def test_classifier_has_the_labels_and_probabilities_of_the_posterior(classifier: LapwingClassifier) -> None:
    probs = classifier.predict_proba(X)
    np.testing.assert_allclose(probs, classifier.posterior_.predict(torch.as_tensor(X)).probs)
    np.testing.assert_allclose(probs.sum(1), 1)
    assert list(classifier.classes_) == ["few", "many", "none"]
    np.testing.assert_array_equal(classifier.predict(X), classifier.classes_[probs.argmax(1)])


def test_equal_seeds_give_equal_predictions_and_leave_the_global_generator(classifier: LapwingClassifier) -> None:
    before = torch.get_rng_state()
    fits = [LapwingClassifier((4,), max_iter=3, random_state=s).fit(X, X[:, 0] > 5) for s in (1, 1, 2)]
    first, second, third = (each.predict_proba(X) for each in fits)
    np.testing.assert_array_equal(first, second)
    assert np.abs(first - third).max() > 1e-3
    assert torch.equal(before, torch.get_rng_state())


def test_pickled_estimators_predict_the_same(regressor: LapwingRegressor) -> None:
    again = pickle.loads(pickle.dumps(regressor))
    np.testing.assert_array_equal(again.predict(X), regressor.predict(X))


def image_network() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(12, 3))


def test_module_of_the_user_takes_images_in_its_dtype() -> None:
    images = RANDOM.rand(40, 1, 4, 5)
    y = np.arange(40) % 3
    classifier = LapwingClassifier(module=image_network, max_iter=2, weights="last_layer", random_state=0)
    assert classifier.fit(images, y).predict_proba(images).shape == (40, 3)
    assert classifier.posterior_.network.dtype == torch.float32
    assert classifier.posterior_.network.selection.size == 39


def test_settings_reach_the_posterior() -> None:
    regressor = LapwingRegressor((4,), max_iter=2, method=lw.Diagonal(), prior=3.0, random_state=0).fit(X, Y)
    assert regressor.posterior_.method == "Diagonal"
    assert float(regressor.posterior_.prior.values) == 3


def test_many_held_out_rows_calibrate_and_folds_if_they_are_fewer() -> None:
    x, y = make_classification(700, 5, random_state=0)
    classifier = LapwingClassifier((4,), max_iter=3, random_state=0).fit(x, y)
    assert "Integrate" in classifier.posterior_.summary()
    fewer = LapwingClassifier((4,), max_iter=3, random_state=0).fit(x[:300], y[:300])
    assert "Tuned by crossfit" in fewer.posterior_.summary()  # all rows train, and five folds calibrate
    assert len(fewer.crossfit_.folds) == 5
    for none in fewer.set_params(cv=None).fit(x[:300], y[:300]), fewer.set_params(cv="auto").fit(x[:90], y[:90]):
        assert "Tuned by Budget" in none.posterior_.summary()
        assert not hasattr(none, "crossfit_")


def test_rare_classes_and_few_rows_can_be_fitted() -> None:
    y = np.zeros(60, int)
    y[7] = 1
    assert LapwingClassifier((3,), max_iter=2).fit(X[:60], y).predict_proba(X[:2]).shape == (2, 2)
    assert LapwingRegressor((3,), max_iter=2).fit(X[:6], Y[:6]).predict(X[:2]).shape == (2,)


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"hidden_layer_sizes": (0,)}, "hidden_layer_sizes"),
        ({"hidden_layer_sizes": 10}, "hidden_layer_sizes"),
        ({"activation": "softmax"}, "activation"),
        ({"module": nn.Linear(3, 1)}, "module"),
        ({"alpha": -1.0}, "alpha"),
        ({"learning_rate_init": 0.0}, "learning_rate_init"),
        ({"batch_size": 0}, "batch_size"),
        ({"max_iter": 0}, "max_iter"),
        ({"n_iter_no_change": 0}, "n_iter_no_change"),
        ({"validation_fraction": 1.0}, "validation_fraction"),
    ],
)
def test_bad_settings_are_refused_by_name(settings: dict[str, object], word: str) -> None:
    with pytest.raises((UnsupportedError, DataError), match=word):
        LapwingRegressor(**settings).fit(X, Y)


def test_bad_modules_are_refused() -> None:
    with pytest.raises(ModelError, match=r"returned a int"):
        LapwingRegressor(module=lambda: 3).fit(X, Y)
    with pytest.raises(ModelError, match=r"\(2, 2\).*\(2, 1\)"):
        LapwingRegressor(module=lambda: nn.Linear(3, 2)).fit(X, Y)


def test_one_class_and_unfitted_estimators_are_refused() -> None:
    with pytest.raises(DataError, match="one class"):
        LapwingClassifier().fit(X, np.ones(90))
    with pytest.raises(NotFittedError):
        LapwingRegressor().predict(X)
    with pytest.raises(NotFittedError):
        LapwingClassifier().predict(X)


# Training of the estimators' networks: scales, shapes, early stopping at the best epoch.

TRAINING_X = torch.tensor([[1.0, 5.0, 1e8], [2.0, 5.0, 3e8], [6.0, 5.0, 5e8]], dtype=torch.float64)


def test_inputs_are_standardised_and_constant_columns_only_shifted() -> None:
    z = Standardised(TRAINING_X)(TRAINING_X)
    expected = (TRAINING_X - TRAINING_X.mean(0)) / TRAINING_X.std(0, correction=0)
    torch.testing.assert_close(z[:, ::2], expected[:, ::2])
    assert not z[:, 1].any()


def test_nearly_constant_columns_are_not_scaled_by_rounding_errors() -> None:
    x = torch.full((5, 1), 0.1, dtype=torch.float64)
    x[2] += 1e-17
    assert column_scales(x)[1] == 1


def test_network_has_the_layers_and_the_dtype() -> None:
    network = small_network(TRAINING_X, 4, (7, 2), "tanh")
    assert [tuple(p.shape) for p in network.parameters()] == [(7, 3), (7,), (2, 7), (2,), (4, 2), (4,)]
    assert network(TRAINING_X).dtype == torch.float64
    with pytest.raises(UnsupportedError, match="activation"):
        small_network(TRAINING_X, 4, (7,), "swish")


def test_outputs_are_in_the_units_of_the_targets() -> None:
    inner = nn.Linear(3, 2).double()
    mean, scale = torch.tensor([3.0, -1.0], dtype=torch.float64), torch.tensor([10.0, 0.1], dtype=torch.float64)
    torch.testing.assert_close(InUnitsOfTargets(inner, mean, scale)(TRAINING_X), inner(TRAINING_X) * scale + mean)


def test_module_without_parameters_is_refused() -> None:
    with pytest.raises(ModelError, match="without parameters"):
        place(nn.Tanh(), torch.zeros(2, 1), torch.zeros(2))


def test_training_keeps_the_epoch_that_is_best_on_held_out_rows() -> None:
    # One weight moves from 0 towards 2; the held-out rows say 1, so the best epoch is neither the first nor the last.
    network = nn.Linear(1, 1, bias=False).double()
    nn.init.zeros_(network.weight)
    x = torch.ones(8, 1, dtype=torch.float64)
    epochs, best = Schedule(0.1, 0.0, 8, 100, 5, 0).train(network, mse_loss, x, 2 * x, (x, x))
    assert abs(network.weight.item() - 1) < 0.1  # within one step of Adam
    assert 10 < epochs < 30
    assert best == epochs - 5
    assert not network.training


@pytest.mark.parametrize("kind", ["classes", "numbers"])
def test_folds_calibrate_a_network_of_all_rows(kind: str) -> None:
    x = np.random.default_rng(0).normal(size=(90, 3))
    noise = np.random.default_rng(1).normal(size=90)
    y = x[:, 0] + noise if kind == "numbers" else x[:, 0] + noise > 0
    make = LapwingRegressor if kind == "numbers" else LapwingClassifier
    estimator = make((8,), cv=3, max_iter=6, random_state=0).fit(x, y)
    crossed = estimator.crossfit_
    assert estimator.posterior_ is crossed.posterior
    assert estimator.posterior_.base.statistics.data == 90
    assert sorted(crossed.rows.tolist()) == list(range(90))
    for fold in crossed.folds:  # nothing that is left out was looked at, not even by the scales
        module = fold.posterior.network.model
        scales = (module.module if kind == "numbers" else module)[0]
        np.testing.assert_allclose(scales.mean.numpy(), x[fold.training.numpy()].mean(0))
    again = make((8,), cv=3, max_iter=6, random_state=0).fit(x, y)
    np.testing.assert_allclose(again.predict(x[:5]), estimator.predict(x[:5]))


def test_diverged_training_is_refused() -> None:
    network = nn.Linear(1, 1).double()
    x = torch.ones(4, 1, dtype=torch.float64)
    nan = lambda f, y: (f * torch.nan).sum()
    with pytest.raises(NumericalError, match="learning_rate_init"):
        Schedule(1.0, 0.0, 4, 3, 5, 0).train(network, nan, x, x, (x, x))
