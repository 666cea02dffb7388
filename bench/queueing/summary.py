"""The table of all sets: a row for each set, policy and metric, and bars that compare policies.

Owns the columns of summary.csv and how a row is written and drawn. `ours` is what this project measured, be it for a
policy of ours or for a peer that is played again; `published` is the peer's own figure; `bound` is what no policy can
pass. Must not know how a figure came about.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.runner import Unusable
from bench.tables import write_csv

COLUMNS = ("set", "policy", "metric", "ours", "published", "bound", "seeds")


@dataclass(frozen=True)
class SummaryRow:
    """One figure; None for what there is not. `seeds` is how many random streams it is the mean of, 0 for none."""

    set_name: str
    policy: str
    metric: str
    ours: float | None
    published: float | None = None
    bound: float | None = None
    seeds: int = 0

    def cells(self) -> list[object]:
        """The row in the order of the columns."""
        return [self.set_name, self.policy, self.metric, self.ours, self.published, self.bound, self.seeds]


@dataclass(frozen=True)
class SetResult:
    """What a set measured: its rows, a line for each target with whether it is met, and values over time by policy."""

    rows: tuple[SummaryRow, ...]
    targets: tuple[tuple[str, bool], ...] = ()
    curves: Mapping[str, Sequence[float]] = field(default_factory=dict)


def write_summary(path: Path, rows: Sequence[SummaryRow]) -> None:
    """Writes summary.csv."""
    write_csv(path, COLUMNS, [row.cells() for row in rows])


def format_rows(rows: Sequence[SummaryRow]) -> str:
    """Lays rows out for a terminal: a line a figure."""
    lines = []
    for row in rows:
        parts = [f"{row.set_name:<22} {row.policy:<28} {row.metric:<22} {_format(row.ours):>14}"]
        parts += [f"published {_format(row.published):>14}"] if row.published is not None else []
        parts += [f"bound {_format(row.bound)}"] if row.bound is not None else []
        lines.append("  ".join(parts))
    return "\n".join(lines)


def _format(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.1f}" if abs(value) >= 1000.0 else f"{value:.4g}"


def find_folder(data: Path, name: str) -> Path:
    """Returns the folder of a set: DATA/NAME, or DATA if that is it. Raises Unusable if there is none."""
    if (data / name).is_dir():
        return data / name
    if any(path.is_file() for path in data.glob("*")):
        return data
    raise Unusable(f"{data / name} is missing; name the folder with the public data sets by --data or EELGRID_DATA")


def draw_bars(
    panel: Any, labels: Sequence[str], ours: Sequence[float | None], published: Sequence[float | None]
) -> None:
    """Draws two bars for each label: what we measured and what is published."""
    for shift, values, name, colour in (
        (-0.2, published, "published", "0.7"),
        (0.2, ours, "measured here", "tab:blue"),
    ):
        known = [(place + shift, value) for place, value in enumerate(values) if value is not None]
        if known:
            panel.barh([place for place, _ in known], [value for _, value in known], 0.38, label=name, color=colour)
    panel.set_yticks(range(len(labels)), labels)
    panel.invert_yaxis()
