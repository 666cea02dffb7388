"""One style for all pictures of benchmarks.

Owns size, grid, legend, resolution and a backend without a display. Must not know what is drawn.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import matplotlib as mpl
import numpy as np

mpl.use("Agg")  # before pyplot, which else looks for a screen

from matplotlib import pyplot as plt

_STYLE = {
    "axes.grid": True,
    "axes.titlesize": 10,
    "figure.constrained_layout.use": True,
    "grid.alpha": 0.3,
    "legend.fontsize": 8,
    "savefig.dpi": 120,
}


@contextmanager
def draw_figure(
    path: Path,
    rows: int = 1,
    columns: int = 1,
    *,
    size: tuple[float, float],
    grid: Literal["both", "x", "y"] = "both",
    sharex: bool = False,
) -> Iterator[np.ndarray[Any, Any]]:
    """Yields the panels, row after row in one array; when they are filled, writes the picture. Size in inches."""
    with mpl.rc_context(_STYLE | {"axes.grid.axis": grid}):
        figure, panels = plt.subplots(rows, columns, figsize=size, sharex=sharex, squeeze=False)
        try:
            yield panels.ravel()
            figure.savefig(path)
        finally:
            plt.close(figure)
