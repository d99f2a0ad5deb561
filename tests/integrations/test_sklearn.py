"""scikit-learn's own checks of estimators, all of them, and the estimators in a pipeline and a grid search.

No check is expected to fail. scikit-learn itself skips two: one needs pandas, one the array API of SciPy.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from sklearn.base import clone
from sklearn.datasets import load_diabetes, load_iris
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

from lapwing.sklearn import LapwingClassifier, LapwingRegressor


@pytest.mark.filterwarnings("default")  # some checks look at the warnings that they cause
@parametrize_with_checks([LapwingRegressor(), LapwingClassifier()])
def test_every_check_of_scikit_learn(estimator: Any, check: Any) -> None:
    check(estimator)


def test_pipeline_with_error_bars() -> None:
    x, y = load_diabetes(return_X_y=True)
    pipeline = make_pipeline(StandardScaler(), LapwingRegressor((10,), max_iter=30, random_state=0)).fit(x, y)
    mean, std = pipeline.predict(x, return_std=True)
    inside = np.abs(y - mean) < 1.96 * std
    assert 0.9 < inside.mean() < 1


def test_grid_search_over_the_settings() -> None:
    x, y = load_iris(return_X_y=True)
    pipeline = make_pipeline(StandardScaler(), LapwingClassifier((5,), max_iter=20, random_state=0))
    grid = {"lapwingclassifier__hidden_layer_sizes": [(3,), (20,)], "lapwingclassifier__method": ["kron", "full"]}
    search = GridSearchCV(pipeline, grid, cv=2, scoring="neg_log_loss").fit(x, y)
    assert len(search.cv_results_["mean_test_score"]) == 4
    assert np.isfinite(search.cv_results_["mean_test_score"]).all()
    assert search.predict_proba(x).shape == (150, 3)


def test_clones_are_scored_by_cross_validation() -> None:
    x, y = load_iris(return_X_y=True)
    estimator = LapwingClassifier((10,), max_iter=40, learning_rate_init=1e-2, random_state=0)
    assert clone(estimator).get_params() == estimator.get_params()
    assert cross_val_score(estimator, x, y, cv=3).mean() > 0.9
