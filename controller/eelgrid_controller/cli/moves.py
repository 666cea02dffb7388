"""eelctl moves: recommends moves of running workloads, and executes them.

Owns the options, the table of moves and the summary below it. Must not know how
moves are found. Only `apply` executes moves: those of a recommendation by its id,
or those of a new one.
"""

import threading
from collections.abc import Iterator
from typing import Any

import click

from eelgrid_controller.cli.confirmation import confirm_change, list_names, yes_option
from eelgrid_controller.cli.connection import (
    CliSettings,
    FiniteRange,
    connect_operators,
    output_option,
    remedy_if_not_found,
)
from eelgrid_controller.cli.output import TableColumn, echo, print_document, table_lines
from eelgrid_controller.formatting import count_noun, format_gpu, format_power
from eelgrid_protos.messages import (
    MOVES_MOST,
    ApplyMovesRequest,
    ClassFit,
    Move,
    MoveGoal,
    Placement,
    Recommendation,
    RecommendMovesRequest,
)

_GOALS = [goal.name.lower() for goal in MoveGoal if goal]
# A search takes longer than other calls: seconds for a thousand nodes.
_SEARCH_S = 300.0
# After which a line says what is waited for.
_SILENT_S = 2.0


def _format_placement(placement: Placement) -> str:
    return placement.node_name + (f":{','.join(map(str, placement.gpu_indexes))}" if placement.gpu_indexes else "")


def _format_signed_watts(power_w: float) -> str:
    return f"{power_w:+,.1f} W"


class _Line:
    """One replica of a move; the first line of a move has its number and the sum so far."""

    def __init__(self, number: int, move: Move, index: int, total_w: float) -> None:
        self.move, self.replica, self.is_first = move, move.replicas[index], index == 0
        self.number, self.total_w = number, total_w

    def once(self, text: str) -> str:
        """Returns a text about the whole move, on its first line only."""
        return text if self.is_first else " "


_COLUMNS: tuple[TableColumn[_Line], ...] = (
    TableColumn("#", lambda line: line.once(str(line.number)), right=True),
    TableColumn("WORKLOAD", lambda line: line.move.workload_id),
    TableColumn("NAME", lambda line: line.move.name, wide=True),
    TableColumn("REPLICA", lambda line: str(line.replica.source.replica), right=True, wide=True),
    TableColumn("FROM", lambda line: _format_placement(line.replica.source)),
    TableColumn("TO", lambda line: _format_placement(line.replica.target)),
    TableColumn("POWER", lambda line: line.once(_format_signed_watts(-line.move.power_w)), right=True),
    TableColumn("RESTART", lambda line: line.once(f"{line.move.restart_w:,.1f} W"), right=True, wide=True),
    TableColumn("GAIN", lambda line: line.once(_format_signed_watts(line.move.gain_w)), right=True),
    TableColumn("GAIN SO FAR", lambda line: line.once(_format_signed_watts(line.total_w)), right=True),
)


def _lines(found: Recommendation) -> Iterator[_Line]:
    total_w = 0.0
    for number, move in enumerate(found.moves, start=1):
        total_w += move.gain_w
        for index in range(len(move.replicas)):
            yield _Line(number, move, index, total_w)


def _class_text(task: ClassFit) -> str:
    models = f" ({'|'.join(task.gpu_models)})" if task.gpu_models else ""
    return f"tasks of {format_gpu(task.gpu_count * task.gpu_milli)} GPU{models}, {task.cpu_milli / 1000:g} CPU"


def _standings(found: Recommendation) -> Iterator[tuple[str, str, str, str]]:
    """Yields quantity, before, after and change."""

    def row(what: str, before: float, after: float, unit: str = "", digits: int = 0) -> tuple[str, str, str, str]:
        form = f",.{digits}f"
        return what, f"{before:{form}}{unit}", f"{after:{form}}{unit}", f"{after - before:+{form}}{unit}"

    one, two = found.before, found.after
    yield row("modelled power", one.power_w, two.power_w, " W")
    yield row("fragmented GPUs", one.fragmented_gpus, two.fragmented_gpus, digits=1)
    yield row("stranded GPUs", one.stranded_gpus, two.stranded_gpus, digits=1)
    yield row("free GPUs in blocks of 8 or more", one.block_gpus, two.block_gpus)
    yield row(f"room: of {found.typical_asked_tasks:,} typical tasks", one.typical_tasks, two.typical_tasks)
    yield row(
        f"room: of their {format_gpu(found.typical_asked_gpu_milli)} GPUs",
        one.typical_gpu_milli / 1000,
        two.typical_gpu_milli / 1000,
        digits=1,
    )
    for before, after in zip(one.largest, two.largest, strict=True):
        yield row(f"room: {_class_text(before)}", before.tasks, after.tasks)


def _bound_text(most_w: float) -> str:
    return (
        f"No moves within the budget save more than {format_power(most_w)}: an upper bound, which does not ask whether "
        "there is room, and is loose where work was placed recently."
    )


def _table(found: Recommendation, settings: CliSettings) -> Iterator[str]:
    if not found.moves:
        yield (
            f"No move within the budget is worth its restart: of {count_noun(found.running, 'running replica')} "
            f"{found.movable:,} may move, at most {found.moves_most:,} at once."
        )
        if found.saved_most_w is not None:
            yield _bound_text(found.saved_most_w)
        return
    budget = f"{found.moving:,} of {count_noun(found.running, 'replica')} to move (at most {found.moves_most:,})"
    yield f"{budget}, with {format_gpu(found.moving_gpu_milli)} GPUs."
    yield (
        f"Net gain {format_power(found.gain_w)}-equivalent for the goal {found.goal.name.lower()}, after "
        f"{format_power(found.restart_w)} for restarts ({found.restart_s:g} s each, to be recovered within {found.horizon_s:g} s)."
    )
    if found.gain_most_w is not None:
        yield "Every sequence of moves within the budget was tried: none gains more."
    saved_w = found.before.power_w - found.after.power_w
    yield f"{'Saves' if saved_w >= 0.0 else 'Draws'} {format_power(abs(saved_w))}{'' if saved_w >= 0.0 else ' more'} by the model."
    if found.saved_most_w is not None:
        yield _bound_text(found.saved_most_w)
    yield ""
    columns: list[TableColumn[tuple[str, str, str, str]]] = [
        TableColumn("THE CLUSTER", lambda row: row[0]),
        TableColumn("BEFORE", lambda row: row[1], right=True),
        TableColumn("AFTER", lambda row: row[2], right=True),
        TableColumn("CHANGE", lambda row: row[3], right=True),
    ]
    yield from table_lines(settings, columns, list(_standings(found)))
    yield ""
    yield from table_lines(settings, _COLUMNS, list(_lines(found)))
    yield ""
    yield f"Nothing was moved. To execute the moves: eelctl moves apply {found.recommendation_id}"


def _build_request(goal: str, budget: str, gpu_budget: str, restart_s: float | None, horizon_s: float | None) -> Any:
    count, ratio = _budget(budget, "--budget")
    gpus, gpu_ratio = _budget(gpu_budget, "--gpu-budget")
    if gpus:
        raise click.BadParameter(f"{gpu_budget!r}; write a percentage such as 10%", param_hint="--gpu-budget")
    return RecommendMovesRequest(
        goal=MoveGoal[goal.upper()],
        moves_most=count,
        moves_ratio=ratio,
        gpu_ratio=gpu_ratio,
        restart_s=restart_s,
        horizon_s=horizon_s,
    )


def _budget(text: str, option: str) -> tuple[int, float]:
    """Parses a count or a share; returns both, the other as 0. Raises BadParameter."""
    try:
        if text.endswith("%"):
            ratio = float(text[:-1]) / 100
            if 0.0 < ratio <= 1.0:
                return 0, ratio
        elif 0 < int(text) <= MOVES_MOST:
            return int(text), 0.0
    except ValueError:
        pass
    raise click.BadParameter(
        f"{text!r}; write a number from 1 to {MOVES_MOST}, or a percentage such as 5%", param_hint=option
    )


def _search(client: Any, settings: CliSettings, asked: RecommendMovesRequest) -> Recommendation:
    waiting = threading.Timer(_SILENT_S, echo, args=("searching for moves ...",), kwargs={"err": True})
    waiting.daemon = True
    waiting.start()
    try:
        found: Recommendation = client.recommend_moves(asked, timeout=max(settings.timeout_s, _SEARCH_S)).recommendation
    finally:
        waiting.cancel()
    return found


def _options(command: Any) -> Any:
    for option in (
        click.option("--horizon", "horizon_s", type=FiniteRange(1.0), help="Seconds within which a move must pay off."),
        click.option("--restart", "restart_s", type=FiniteRange(0.0), help="Seconds that a restart takes."),
        click.option(
            "--gpu-budget",
            default="100%",
            show_default=True,
            help="Most GPUs to move, as a share of the allocated GPUs.",
        ),
        click.option(
            "--budget", default="5%", show_default=True, help="Most replicas to move, as a number or a share."
        ),
        click.option(
            "--goal",
            type=click.Choice(_GOALS),
            default="balanced",
            show_default=True,
            help="What the moves should improve.",
        ),
    ):
        command = option(command)
    return command


@click.group(invoke_without_command=True)
@_options
@output_option
@click.pass_context
def moves(context: click.Context, /, **asked: Any) -> None:
    """Recommend moves of running workloads, each with its target and gain; `apply` executes them.

    Moves empty GPUs, CPU packages and nodes and join free capacity. They are listed in an order in which each is
    possible.

    \b
    eelctl moves --goal power --budget 10
    """  # noqa: D301
    if context.invoked_subcommand:
        return
    settings: CliSettings = context.obj
    with connect_operators(settings) as client:
        found = _search(client, settings, _build_request(**asked))
        print_document(settings, found, _table(found, settings))


@moves.command()
@click.argument("recommendation", default="")
@yes_option
@_options
@output_option
@click.pass_obj
def apply(settings: CliSettings, /, recommendation: str, yes: bool, **asked: Any) -> None:
    """Execute all moves of RECOMMENDATION, or none, after a question; without it, compute moves now."""
    with connect_operators(settings) as client:
        what = f"Executing all moves of {recommendation}"
        effects: tuple[str, ...] = ("each moved replica restarts on its new place",)
        if not recommendation:
            found = _search(client, settings, _build_request(**asked))
            if not found.moves:
                print_document(settings, found, _table(found, settings))
                return
            recommendation = found.recommendation_id
            names = list_names([move.workload_id for move in found.moves])
            what = (
                f"Executing {count_noun(len(found.moves), 'move')} of {count_noun(found.moving, 'replica')} ({names})"
            )
        confirm_change(what, yes=yes, effects=effects, remedy="see the moves with `eelctl moves`")
        with remedy_if_not_found("compute new moves with `eelctl moves`, and apply their recommendation"):
            answer = client.apply_moves(ApplyMovesRequest(recommendation_id=recommendation), timeout=settings.timeout_s)
        words = f"moved {count_noun(answer.moved, 'replica')}; modelled power of the cluster is now {format_power(answer.modelled_power_w)}"
        print_document(settings, answer, [words])
