"""What power budgets leave of the moves that `eelctl moves` recommends: watts saved where budgets leave nothing.

Owns that measurement. Of one fleet, moves are searched without budgets; with a budget of the whole fleet, and with one of
each node, that are as large as what GPUs may draw there now. Beside the search that knows the budgets stands the simple
way: the moves that are best without budgets, each left out that a budget refuses in its turn.
"""

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from eelgrid_controller.core.core import Core
from eelgrid_controller.core.workloads import MoveRefused, plan_migration
from eelgrid_controller.placement.migration_planner import build_migration_problem, recommend_moves
from eelgrid_controller.placement.power import PowerAdmission
from eelgrid_protos.catalogue import load_catalogue
from eelgrid_protos.messages import BudgetScope, Move, PowerBudget, Recommendation, RecommendMovesRequest

# No fleet draws as much.
_AMPLE_W = 1e9
_LATE_NS = 10**12


class BudgetRow(NamedTuple):
    """Moves found under one set of budgets."""

    budgets: str
    moved: int
    saved_w: float
    filtered_moved: int
    filtered_w: float
    search_s: float


def _set_budgets(core: Core, budgets: tuple[PowerBudget, ...]) -> None:
    core.update_policy(replace(core.state.policy, budgets=budgets), now_ns=_LATE_NS)


def _tight_budgets(core: Core) -> Iterator[tuple[str, tuple[PowerBudget, ...]]]:
    """Budgets that are what GPUs below them may draw now."""
    names = tuple(core.state.nodes)
    ample = (PowerBudget(scope=BudgetScope.CLUSTER, limit_w=_AMPLE_W),)
    _set_budgets(core, ample)
    power = core.survey_moves(RecommendMovesRequest()).power
    assert power is not None
    (left_mw,) = power.left_mw.values()
    yield "none", ()
    yield "of the fleet", (replace(ample[0], limit_w=_AMPLE_W - left_mw / 1000),)
    by_node = zip(names, power.shares, strict=True)
    yield (
        "of each node",
        tuple(
            PowerBudget(scope=BudgetScope.NODE, name=name, limit_w=share.milliwatts / 1000) for name, share in by_node
        ),
    )


def _leave_out_refused(core: Core, moves: tuple[Move, ...]) -> list[Move]:
    """The moves that hold one after another, without those that are refused."""
    kept, allowance = list(moves), PowerAdmission(core.state, load_catalogue())
    while kept:
        try:
            plan_migration(core.state, allowance, kept, now_ns=_LATE_NS)
            break
        except MoveRefused as error:
            del kept[error.number - 1]
    return kept


def measure_power_budgets(core: Core, asked: RecommendMovesRequest) -> list[BudgetRow]:
    """A row for each set of budgets; the core has none afterwards."""
    rows, best = list[BudgetRow](), tuple[Move, ...]()
    for label, budgets in list(_tight_budgets(core)):
        _set_budgets(core, budgets)
        problem = build_migration_problem(core.survey_moves(asked))
        begun_s = time.thread_time()
        found: Recommendation = recommend_moves(problem)
        took_s = time.thread_time() - begun_s
        best = best or found.moves
        kept = _leave_out_refused(core, best)
        rows.append(
            BudgetRow(
                label,
                found.moving,
                found.before.power_w - found.after.power_w,
                sum(len(move.replicas) for move in kept),
                sum(move.power_w for move in kept),
                took_s,
            )
        )
    _set_budgets(core, ())
    return rows
