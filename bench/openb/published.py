"""How far our peers are from what their authors published, in percentage points.

Owns the two files of published results: allocation by policy and seed, and
readings off the figures of PWR; and how near is near enough. Must not know how
our figures were made.

Theory: the orders of arrival differ from theirs, so means over seeds are
compared. The allocation of FGD must agree within 0.2 pp at 100 % and at 130 %
arrived, that of all others within 0.7 pp, a saving within 1 pp: readings off a
figure are good to 0.3 to 0.5 pp.

Source: hkust-adsl/kubernetes-scheduler-simulator (USENIX ATC'23) and
Fr4nz83/PWR-plugin-kubernetes (CCGrid 2025), both Apache-2.0.
"""

import csv
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from bench.openb.traces import csv_folder
from eelgrid_controller.replay.csv_reader import TraceMalformed, TraceMissing
from eelgrid_controller.replay.openb import task_list_name
from eelgrid_controller.replay.run_statistics import ArrivalCurves, saving_share, value_at

__all__ = ["Distance", "Published", "distances", "plain_policy", "read_allocation", "read_readings", "results_folder"]

ALLOCATION, READINGS = "fgd_allocation.csv", "pwr_published_readings.csv"
FGD_PP_MOST, OTHERS_PP_MOST, SAVING_PP_MOST = 0.2, 0.7, 1.0


class Published(NamedTuple):
    """One published number."""

    trace: str
    policy: str  # as plain_policy spells it
    metric: str  # saving_pct or allocation_pct
    x: float
    value: float
    source: str


class Distance(NamedTuple):
    """A published number beside ours."""

    published: Published
    ours: float
    allowed_pp: float

    @property
    def pp(self) -> float:
        """Ours less theirs."""
        return self.ours - self.published.value

    @property
    def near(self) -> bool:
        """Whether that is within what the validation allows."""
        return abs(self.pp) <= self.allowed_pp


def plain_policy(name: str) -> str:
    """One spelling for a policy: 06-FGD is fgd, PWR_200_FGD_800 is pwr200, GpuPacking is gpupacking."""
    name = name.lower()
    if name[:2].isdigit() and name[2:3] == "-":
        name = name[3:]
    parts = name.split("_")
    if len(parts) == 4 and parts[0] == "pwr" and parts[2] == "fgd":
        return parts[0] + parts[1]
    return "".join(character for character in name if character.isalnum())


def results_folder(data: Path) -> Path | None:
    """The folder of published results beside the lists, if there is one."""
    place = csv_folder(data)
    return next((folder for folder in (place.parent / "published", place / "published") if folder.is_dir()), None)


def _rows(path: Path, columns: tuple[str, ...]) -> Iterator[tuple[int, Mapping[str, str]]]:
    """Line number and cells of every row; lines that begin with # are remarks."""
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except OSError as error:
        raise TraceMissing(str(path), error.strerror or "cannot be read", "check the path and its rights") from None
    except UnicodeDecodeError as error:
        raise TraceMalformed(f"{path}, byte {error.start}", "is not UTF-8", "save the file as UTF-8 CSV") from None
    numbered = [(number, line) for number, line in enumerate(lines, 1) if line.strip() and not line.startswith("#")]
    header = next(csv.reader([numbered[0][1]])) if numbered else []
    missing = [column for column in columns if column not in header]
    if missing:
        place = f"{path}, line {numbered[0][0] if numbered else 1}, column {missing[0]}"
        raise TraceMalformed(place, "is missing", f"the columns are {','.join(columns)}")
    for number, line in numbered[1:]:
        cells = next(csv.reader([line]))
        if len(cells) != len(header):
            place = f"{path}, line {number}, column {header[min(len(cells), len(header) - 1)]}"
            raise TraceMalformed(place, f"{len(cells)} cells under {len(header)} columns", "write a cell a column")
        yield number, dict(zip(header, cells, strict=True))


def _number(path: Path, line: int, cells: Mapping[str, str], column: str) -> float:
    try:
        value = float(cells[column])
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise TraceMalformed(f"{path}, line {line}, column {column}", f"holds {cells[column]!r}", "write a number")
    return value


def read_allocation(path: Path) -> list[Published]:
    """Allocation in per cent of capacity at 100 % and 130 % arrived: the mean over the published seeds."""
    before, after = task_list_name("*").removesuffix(".csv").split("*")
    found: dict[tuple[str, str, str], list[float]] = {}
    for line, cells in _rows(path, ("workload", "sc_policy", "seed", "100", "130")):
        trace = cells["workload"].removeprefix(before).removesuffix(after)
        for column in ("100", "130"):
            key = trace, plain_policy(cells["sc_policy"]), column
            found.setdefault(key, []).append(_number(path, line, cells, column))
    return [
        Published(trace, policy, "allocation_pct", int(column) / 100, sum(values) / len(values), path.name)
        for (trace, policy, column), values in found.items()
    ]


def read_readings(path: Path) -> list[Published]:
    """Savings against FGD at a load, and GRAR at x = 1, which is the allocation there."""
    found = []
    for line, cells in _rows(path, ("trace", "policy", "metric", "x", "value")):
        x, value = _number(path, line, cells, "x"), _number(path, line, cells, "value")
        metric, policy = cells["metric"], plain_policy(cells["policy"])
        if metric not in {"saving_pct", "grar"} or not 0.0 <= x <= 1.3:
            place = f"{path}, line {line}, column metric"
            raise TraceMalformed(place, f"holds {metric!r} at x = {x}", "write saving_pct or grar at 0 to 1.3")
        if metric == "grar":
            metric, value = "allocation_pct", 100.0 * value * x
        found.append(Published(cells["trace"], policy, metric, x, value, path.name))
    return found


def _allowed(published: Published) -> float:
    if published.metric == "saving_pct":
        return SAVING_PP_MOST
    # A GRAR read off a figure has 0.2 pp of its own: only the result files bind FGD to the closer bound.
    return FGD_PP_MOST if published.policy == "fgd" and published.source == ALLOCATION else OTHERS_PP_MOST


def distances(folder: Path, ours: Callable[[str, str], ArrivalCurves | None]) -> list[Distance]:
    """Every published number that we have one beside; `ours` gives the mean curves of a trace and a plain policy."""
    readers = ((folder / ALLOCATION, read_allocation), (folder / READINGS, read_readings))
    found = []
    for published in (row for path, read in readers if path.is_file() for row in read(path)):
        mine, reference = ours(published.trace, published.policy), ours(published.trace, "fgd")
        if mine is None or reference is None:
            continue
        if published.metric == "saving_pct":
            value = 100.0 * value_at(saving_share(mine, reference), published.x)
        else:
            value = 100.0 * value_at(mine.allocated, published.x)
        found.append(Distance(published, value, _allowed(published)))
    return found
