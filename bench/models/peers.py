"""What others would do: nearest point, linear interpolation, boosted trees, a Gaussian process for each workload.

Owns the peers. Must not know how they are judged.

Each is fitted on the same points as ours, to the logarithm of the quantity, with the same coordinates,
names and facts about workloads. Peers without intervals of their own get one from their errors in
five-fold cross-validation on what they were fitted on (90 % of them lie within).

    nearest        the nearest measured configuration of the workload, or of any if it has none
    linear         scipy's RBFInterpolator with the kernel |r|: piecewise linear in one dimension
    gbm            scikit-learn's HistGradientBoostingRegressor over all workloads; quantile loss for the ends
    gbm_monotone   the same, rising (falling) in compute and limit, ends by cross-validation
    gp             scikit-learn's GaussianProcessRegressor for each workload: Matern, a length a coordinate
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bench.models.tables import Cell, DataSet
from eelgrid_controller.profiles.features import FeaturePoint, locate_configuration
from eelgrid_controller.profiles.prediction import monotone_direction
from eelgrid_kernels.arrays import Floats, Ints
from eelgrid_protos.catalogue.loader import load_catalogue

_FOLDS = 5
_GBM = {"max_iter": 400, "learning_rate": 0.08, "min_samples_leaf": 3, "l2_regularization": 0.1}
_NORMAL_90 = 1.6448536269514722
_OTHER_NAME = 4.0  # distance between two names, in spreads of a coordinate


class Table(NamedTuple):
    """Cells as arrays that every peer takes."""

    columns: tuple[str, ...]
    numbers: Floats  # (N, Q) coordinates, unit spread
    names: Ints  # (N, C) codes
    traits: Floats  # (N, T)
    workload: Ints  # (N,)

    def take(self, rows: NDArray[np.bool_] | Ints) -> "Table":
        """Those rows."""
        return Table(self.columns, self.numbers[rows], self.names[rows], self.traits[rows], self.workload[rows])

    @property
    def width(self) -> int:
        """How many rows."""
        return len(self.workload)


class Answers(NamedTuple):
    """Log units, (M,)."""

    median: Floats
    lower: Floats
    upper: Floats


def table(data_set: DataSet, cells: Sequence[Cell]) -> Table:
    """All cells of a data set, or of a split, on one scale."""
    catalogue = load_catalogue()
    places = [locate_configuration(cell.point.configuration, catalogue) for cell in cells]
    columns = sorted({name for one in places for name in one.numbers})
    numbers = np.array([[one.numbers.get(name, 0.0) for name in columns] for one in places])
    varied = np.ptp(numbers, axis=0) > 1e-9
    numbers = (numbers - numbers.mean(0))[:, varied] / numbers.std(0)[varied]
    keys = sorted({name for one in places for name in one.names})
    facts = sorted({name for traits in data_set.traits.values() for name in traits})
    traits = [[data_set.traits.get(cell.point.workload, {}).get(name, 0.0) for name in facts] for cell in cells]
    return Table(
        tuple(name for name, kept in zip(columns, varied, strict=True) if kept),
        numbers,
        np.stack([_codes([_name(one, key) for one in places]) for key in keys], axis=1),
        np.array(traits, dtype=np.float64).reshape(len(cells), len(facts)),
        _codes([cell.point.workload for cell in cells]),
    )


def _name(one: FeaturePoint, key: str) -> str:
    return one.names.get(key, "")


def _codes(values: Sequence[str]) -> Ints:
    return np.unique(np.array(values), return_inverse=True)[1].astype(np.int64)


_Fit = Callable[[Table, Floats, Table, str], Floats]


def _distances(asked: Table, known: Table) -> Floats:
    numbers = ((asked.numbers[:, None, :] - known.numbers[None, :, :]) ** 2).sum(2)
    apart = (asked.names[:, None, :] != known.names[None, :, :]).sum(2)
    return np.asarray(numbers + _OTHER_NAME**2 * apart, dtype=np.float64)


def _nearest(known: Table, values: Floats, asked: Table, _: str) -> Floats:
    found = np.empty(asked.width)
    for workload in np.unique(asked.workload):
        rows = asked.workload == workload
        mine = known.workload == workload
        mine = mine if mine.any() else np.ones(known.width, dtype=np.bool_)
        found[rows] = values[mine][_distances(asked.take(rows), known.take(mine)).argmin(1)]
    return found


def _wide(one: Table) -> Floats:
    """Coordinates beside one column a name's value."""
    hot = [
        (column[:, None] == np.arange(column.max() + 1)[None, :]) * _OTHER_NAME / np.sqrt(2) for column in one.names.T
    ]
    return np.hstack([one.numbers, *hot])


def _linear(known: Table, values: Floats, asked: Table, quantity: str) -> Floats:
    from scipy.interpolate import RBFInterpolator

    found = _nearest(known, values, asked, quantity)
    both = _wide(Table(known.columns, *(np.concatenate(pair) for pair in zip(known[1:], asked[1:], strict=True))))
    for workload in np.unique(asked.workload):
        mine, rows = known.workload == workload, asked.workload == workload
        points, index = np.unique(both[: known.width][mine], axis=0, return_index=True)
        used = np.ptp(points, axis=0) > 1e-9 if len(points) else np.zeros(0, dtype=np.bool_)
        if len(points) > 2 and used.any():
            one = RBFInterpolator(points[:, used], values[mine][index], kernel="linear", degree=0)
            found[rows] = one(both[known.width :][rows][:, used])
    return found


def _features(one: Table) -> Floats:
    return np.hstack([one.numbers, one.traits, one.names, one.workload[:, None]]).astype(np.float64)


def _boosted(known: Table, values: Floats, asked: Table, **options: object) -> Floats:
    from sklearn.ensemble import HistGradientBoostingRegressor

    plain = known.numbers.shape[1] + known.traits.shape[1]
    words = list(range(plain, plain + known.names.shape[1] + 1))
    level = {workload: values[known.workload == workload].mean() for workload in np.unique(known.workload)}
    mean = float(values.mean())
    model = HistGradientBoostingRegressor(categorical_features=words, random_state=0, **_GBM, **options)
    base = np.array([level[workload] for workload in known.workload])
    model.fit(_features(known), values - base)
    return np.asarray(model.predict(_features(asked)) + [level.get(workload, mean) for workload in asked.workload])


def _monotone(known: Table, values: Floats, asked: Table, quantity: str) -> Floats:
    way = monotone_direction(quantity)
    signs = [way if name in ("compute", "limit") else 0 for name in known.columns]
    others = known.traits.shape[1] + known.names.shape[1] + 1
    return _boosted(known, values, asked, monotonic_cst=signs + [0] * others)


def _cross_validated(fit: _Fit) -> Callable[[Table, Floats, Table, str], Answers]:
    def answer(known: Table, values: Floats, asked: Table, quantity: str) -> Answers:
        median = fit(known, values, asked, quantity)
        folds = np.random.default_rng(0).permutation(known.width) % _FOLDS
        errors = np.empty(known.width)
        for fold in range(_FOLDS):
            out = folds == fold
            errors[out] = values[out] - fit(known.take(~out), values[~out], known.take(out), quantity)
        half = np.quantile(np.abs(errors), 0.9)
        return Answers(median, median - half, median + half)

    return answer


def _gbm(known: Table, values: Floats, asked: Table, _: str) -> Answers:
    ends = [_boosted(known, values, asked, loss="quantile", quantile=end) for end in (0.05, 0.95)]
    return Answers(_boosted(known, values, asked), np.minimum(*ends), np.maximum(*ends))


def _process(known: Table, values: Floats, asked: Table, quantity: str) -> Answers:
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.gaussian_process import GaussianProcessRegressor
    from sklearn.gaussian_process.kernels import ConstantKernel, Matern, WhiteKernel

    median = _nearest(known, values, asked, quantity)
    spread = np.full(asked.width, float(values.std()))
    both = _wide(Table(known.columns, *(np.concatenate(pair) for pair in zip(known[1:], asked[1:], strict=True))))
    for workload in np.unique(asked.workload):
        mine, rows = known.workload == workload, asked.workload == workload
        points = both[: known.width][mine]
        used = np.ptp(points, axis=0) > 1e-9 if len(points) else np.zeros(0, dtype=np.bool_)
        if len(points) < 3 or not used.any():
            continue
        shape = ConstantKernel() * Matern(np.ones(int(used.sum())), (1e-2, 1e3), nu=2.5) + WhiteKernel(
            1e-3, (1e-6, 1.0)
        )
        model = GaussianProcessRegressor(shape, normalize_y=True, random_state=0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)  # a length at its bound is a coordinate without effect
            model.fit(points[:, used], values[mine])
        median[rows], spread[rows] = model.predict(both[known.width :][rows][:, used], return_std=True)
    return Answers(median, median - _NORMAL_90 * spread, median + _NORMAL_90 * spread)


PEERS: Mapping[str, Callable[[Table, Floats, Table, str], Answers]] = {
    "nearest": _cross_validated(_nearest),
    "linear": _cross_validated(_linear),
    "gbm": _gbm,
    "gbm_monotone": _cross_validated(_monotone),
    "gp": _process,
}
