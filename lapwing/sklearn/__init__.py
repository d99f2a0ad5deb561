"""Estimators for scikit-learn: a small network that they train themselves, and its Lapwing posterior."""

try:
    import sklearn  # noqa: F401
except ImportError as error:
    raise ImportError(
        "lapwing.sklearn needs scikit-learn, which is not installed: pip install 'lapwing[sklearn]'."
    ) from error

from lapwing.sklearn.estimators import LapwingClassifier, LapwingRegressor

__all__ = ["LapwingClassifier", "LapwingRegressor"]
