"""Fair shares of a tree: water filling in two levels, against what Gavel's notebook prints for 18 jobs.

Owns the algorithm and the rows of this set; it needs no data. DATA/gavel has no hierarchical rows, so the 18 figures that
`hierarchical.ipynb` prints (Narayanan et al., OSDI 2020; performance-blind, 9 GPUs, entities of the weights 1, 2 and 3
with six jobs each of the weights 1 and 2 in turn) are stated here. Fewer jobs are left out: while jobs are at their
limit the notebook's shares within an entity are not in the proportion of the weights, as its solver stops early.

Theory: raise the level of all entities in proportion to their weights, and within each entity that of its jobs, until
the GPUs are used up; what has reached its limit stays, and the rest goes on (Bertsekas and Gallager, Data Networks, 6.5).
"""

from collections.abc import Sequence
from pathlib import Path

from bench.queueing.summary import SetResult, SummaryRow, draw_bars

GPUS = 9.0
ENTITY_WEIGHTS = (1.0, 2.0, 3.0)
JOB_WEIGHTS = (1.0, 2.0, 1.0, 2.0, 1.0, 2.0)
# As printed, entity by entity.
PUBLISHED = ((0.167, 0.333) * 3, (0.333, 0.667) * 3, (0.5, 1.0) * 3)
_DIGITS = 0.0005


def fill_level(amount: float, weights: Sequence[float], limits: Sequence[float]) -> list[float]:
    """Returns shares in proportion to the weights, none above its limit, that use the amount or all limits."""
    shares, open_ones, left = [0.0] * len(weights), set(range(len(weights))), amount
    while open_ones:
        level = left / sum(weights[one] for one in open_ones)
        full = {one for one in open_ones if weights[one] * level >= limits[one]}
        for one in full or open_ones:
            shares[one] = limits[one] if full else weights[one] * level
        left -= sum(limits[one] for one in full)
        open_ones = open_ones - full if full else set()
    return shares


def fill_tree(amount: float, weights: Sequence[float], jobs: Sequence[Sequence[float]]) -> list[list[float]]:
    """Returns the share of each job of each entity; a job can use one GPU at the most."""
    entities = fill_level(amount, weights, [float(len(one)) for one in jobs])
    return [fill_level(share, one, [1.0] * len(one)) for share, one in zip(entities, jobs, strict=True)]


def run_set(folder: Path, *, quick: bool) -> SetResult:
    """Runs the set, which takes no time and reads nothing."""
    del folder, quick
    rows, worst = list[SummaryRow](), 0.0
    for entity, (shares, published) in enumerate(
        zip(fill_tree(GPUS, ENTITY_WEIGHTS, [JOB_WEIGHTS] * 3), PUBLISHED, strict=True)
    ):
        for job, (share, theirs) in enumerate(zip(shares, published, strict=True)):
            rows.append(SummaryRow("gavel hierarchy", f"entity {entity}, job {job}", "share", share, theirs))
            worst = max(worst, abs(share - theirs))
    return SetResult(tuple(rows), ((f"18 shares to three digits, worst difference {worst:.5f}", worst <= _DIGITS),))


def draw(path: Path, result: SetResult) -> None:
    """Draws the shares beside the printed ones."""
    from bench.plotting import draw_figure  # a second to import

    rows = result.rows
    with draw_figure(path, size=(8, 6), grid="x") as panels:
        draw_bars(panels[0], [row.policy for row in rows], [row.ours for row in rows], [row.published for row in rows])
        panels[0].set_title("share of a GPU, entities of the weights 1, 2 and 3 on 9 GPUs")
        panels[0].legend()
