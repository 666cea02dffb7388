"""What rollouts could gain over the cost of a decision: python -m bench.openb.rollouts --data DIR --traces default.

Owns the rollouts, at whatever time they take; the daemon has none. Must not know the terms of a cost.

Theory: for each arrival, the best nodes by the cost, each in another state, are tried on a copy of the fleet: the task
is placed there, then tasks drawn from the typical mix arrive, the same for every candidate, each placed by the cost.
A candidate is worth the mean watts of that future and, for each GPU that was asked for and not allocated, REFUSED_W.
Another node than the cheapest is taken where its mean over the futures is lower by more than the standard error of
the difference. What has arrived and the mix are all that is looked at: nothing is known of the tasks to come.

The fleet is every so many-th node of the list in order of model, GPUs and CPU, beginning elsewhere for each seed. The
smaller the fleet, the more one decision matters, so that what is gained is rather too much than too little.
Source: Bertsekas, Tsitsiklis and Wu, "Rollout algorithms for combinatorial optimization", J. Heuristics 3, 1997.
"""

import statistics
import sys
import time
from typing import Any, NamedTuple

import click
import numpy as np

from bench.openb.measure import Figures, compute_curves, empty_power_w, figures
from bench.openb.policies import OURS, REFERENCE, choose_names
from bench.openb.traces import load_trace, trace_names
from bench.runner import Options, Progress, Unusable, benchmark, data_option, seeds_option
from bench.tables import format_table, write_csv
from eelgrid_controller.replay.csv_reader import TraceError
from eelgrid_controller.replay.openb_protocol import SEEDS, TraceArrays, TraceFleet, arrival_order, node_order
from eelgrid_controller.replay.run_statistics import ArrivalCurves
from eelgrid_kernels.argmin_index import choose_nodes, place_arrivals
from eelgrid_kernels.arrays import ArrivalOutcomes, EngineArrays, Floats, Ints
from eelgrid_kernels.baselines import choose_gpus, find_policy
from eelgrid_kernels.node_states import shift_task
from eelgrid_kernels.opportunity_prices import update_prices
from eelgrid_kernels.simulation import build_empty_engine, build_empty_outcomes, simulate_arrivals

REFUSED_W = 1000.0
NODES_MOST = 32  # that candidates are looked for in
LAST_X = 1.02  # what arrives beyond is of no account
_DRAWS = 12345  # apart from the seeds of arrivals


class Plan(NamedTuple):
    """How much is tried for each arrival."""

    candidates: int
    futures: int
    ahead: int  # tasks of a future


class Gain(NamedTuple):
    """One order of arrivals without and with rollouts, beside the reference on the same fleet."""

    trace: str
    seed: int
    gpus: int
    reference_alloc_pct: float
    plain: Figures
    rolled: Figures
    changed: int  # decisions for another node than the cheapest
    decisions: int  # with several candidates
    ms: float  # for each arrival, of the processor


def take_part(trace: TraceArrays, part: int, first: int) -> TraceArrays:
    """The trace on every part-th node, by kind."""
    fleet = trace.fleet
    place = np.arange(len(fleet.model))
    kept = np.sort(np.lexsort((place, fleet.cpu_milli, fleet.gpu_count, fleet.model))[first % part :: part])
    return trace._replace(fleet=TraceFleet(*(np.ascontiguousarray(column[kept]) for column in fleet)))


def list_arrays(value: Any) -> list[Any]:
    """The arrays of a tree of tuples, in its order."""
    if isinstance(value, np.ndarray):
        return [value]
    return [each for part in value for each in list_arrays(part)] if isinstance(value, tuple) else []


class Rollouts:
    """A fleet, a copy of it to try on, and the mix that futures are drawn from."""

    def __init__(self, trace: TraceArrays, seed: int, plan: Plan) -> None:
        how = find_policy(OURS)
        self._trace, self._plan = trace, plan
        self.run, self._trial = (
            build_empty_engine(trace.fleet, trace.specs, trace.typical, node_order(trace, seed), how) for _ in range(2)
        )
        self._pairs = list(zip(list_arrays(self._trial), list_arrays(self.run), strict=True))
        self._generator = np.random.default_rng(_DRAWS + seed)
        self._likely = trace.typical.weight / trace.typical.weight.sum()
        self._course = build_empty_outcomes(plan.ahead)

    def list_candidates(self, kind: int) -> list[int]:
        """The best nodes for a task, each in another state, the cheapest first."""
        nodes = np.empty(NODES_MOST, np.int64)
        found: dict[int, int] = {}
        for node in nodes[: choose_nodes(self.run, kind, 0, nodes)].tolist():
            found.setdefault(int(self.run.nodes[node]["state"]), node)
        return list(found.values())[: self._plan.candidates]

    def choose(self, kind: int, candidates: list[int]) -> int:
        """The candidate whose futures are best by more than chance, as its place in the list."""
        shape = (self._plan.futures, self._plan.ahead)
        futures = self._generator.choice(self._trace.typical.spec, size=shape, p=self._likely).astype(np.int64)
        worth = np.array([[self._try(kind, node, future) for node in candidates] for future in futures])
        best = int(worth.mean(axis=0).argmin())
        gained = worth[:, 0] - worth[:, best]
        return best if best and gained.mean() > gained.std(ddof=1) / np.sqrt(len(gained)) else 0

    def _try(self, kind: int, node: int, future: Ints) -> float:
        """Mean watts of a future after the task is placed there, and the price of what is not allocated."""
        for mine, theirs in self._pairs:
            np.copyto(mine, theirs)
        book(self._trial, kind, node)
        place_arrivals(self._trial, future, self._course, 0, len(future))
        refused = np.cumsum(self._trace.task_milli[future]) - self._course.allocated_milli
        return float(self._course.power_w.mean() + REFUSED_W * refused.mean() / 1000.0)


def book(run: EngineArrays, kind: int, node: int) -> None:
    """The task on that node, on the GPUs that the cost chooses there."""
    choose_gpus(run, kind, int(run.nodes[node]["state"]), 0)
    shift_task(run, node, kind, run.taken, -1)


def play_rollouts(trace: TraceArrays, seed: int, plan: Plan, arrivals: Ints) -> tuple[ArrivalOutcomes, int, int]:
    """Every arrival with rollouts; what became of them, how many were changed and how many had a choice."""
    rollouts, outcomes = Rollouts(trace, seed, plan), build_empty_outcomes(len(arrivals))
    changed = decisions = allocated = 0
    for i, kind in enumerate(arrivals.tolist()):
        update_prices(rollouts.run)
        candidates = rollouts.list_candidates(kind)
        if len(candidates) > 1:
            chosen = rollouts.choose(kind, candidates)
            decisions, changed = decisions + 1, changed + (chosen > 0)
            candidates = candidates[chosen:]
        if candidates:
            book(rollouts.run, kind, candidates[0])
            allocated += int(trace.task_milli[kind])
        outcomes.placed[i], outcomes.power_w[i] = bool(candidates), rollouts.run.scalars[0]["power_w"]
        outcomes.allocated_milli[i] = allocated
    outcomes.arrived_milli[:] = np.cumsum(trace.task_milli[arrivals])
    return outcomes, changed, decisions


def measure_gain(whole: TraceArrays, seed: int, part: int, plan: Plan) -> Gain:
    """One order of arrivals on a part of the fleet."""
    trace = take_part(whole, part, seed)
    order = arrival_order(trace, seed)
    arrived: Floats = np.cumsum(trace.task_milli[order]) / trace.fleet.gpu_milli
    order = order[: int(np.searchsorted(arrived, LAST_X, side="right"))]

    def judge(outcomes: ArrivalOutcomes) -> ArrivalCurves:
        return compute_curves(outcomes, trace.fleet.gpu_milli, empty_power_w(trace.fleet))

    def play(policy: str) -> ArrivalCurves:
        how = find_policy(policy)
        run = build_empty_engine(trace.fleet, trace.specs, trace.typical, node_order(trace, seed), how)
        return judge(simulate_arrivals(run, order))

    reference, plain, gpus = play(REFERENCE), play(OURS), trace.fleet.gpu_milli // 1000
    begun_s = time.process_time()
    outcomes, changed, decisions = play_rollouts(trace, seed, plan, order)
    ms = 1e3 * (time.process_time() - begun_s) / max(1, len(order))
    told = [figures(curves, reference, gpus) for curves in (reference, plain, judge(outcomes))]
    return Gain(whole.name, seed, gpus, told[0].alloc_100_pct, told[1], told[2], changed, decisions, ms)


def _cells(gain: Gain) -> dict[str, object]:
    plain, rolled = gain.plain, gain.rolled
    return {
        "trace": gain.trace,
        "seed": gain.seed,
        "gpus": gain.gpus,
        "fgd_alloc": f"{gain.reference_alloc_pct:.2f}",
        "alloc": f"{plain.alloc_100_pct:.2f}",
        "saving": f"{plain.saving_mean_pct:.2f}",
        "per_gpu": f"{plain.saving_per_gpu_pct:.2f}",
        "alloc_gain": f"{rolled.alloc_100_pct - plain.alloc_100_pct:+.2f}",
        "saving_gain": f"{rolled.saving_mean_pct - plain.saving_mean_pct:+.3f}",
        "per_gpu_gain": f"{rolled.saving_per_gpu_pct - plain.saving_per_gpu_pct:+.3f}",
        "changed": f"{gain.changed}/{gain.decisions}",
        "ms": f"{gain.ms:.1f}",
    }


def summarize(gains: list[Gain]) -> str:
    """Mean gains by trace, with their deviation over seeds."""
    lines = []
    for name in dict.fromkeys(gain.trace for gain in gains):
        pairs = [(gain.plain, gain.rolled) for gain in gains if gain.trace == name]
        alloc = [rolled.alloc_100_pct - plain.alloc_100_pct for plain, rolled in pairs]
        saving = [rolled.saving_per_gpu_pct - plain.saving_per_gpu_pct for plain, rolled in pairs]
        spread = [statistics.stdev(values) if len(values) > 1 else 0.0 for values in (alloc, saving)]
        lines.append(
            f"{name}: allocation {statistics.fmean(alloc):+.2f} points (deviation {spread[0]:.2f}), "
            f"saving per allocated GPU {statistics.fmean(saving):+.2f} ({spread[1]:.2f})"
        )
    return "\n".join(lines)


@benchmark(out="bench-out/openb", refused=(TraceError, OSError))
@data_option()
@click.option("--traces", default="default", help="suffixes of the task lists, with commas")
@seeds_option(4, f"how many, from {SEEDS[0]} up")
@click.option("--part", default=16, help="take one in so many nodes")
@click.option("--candidates", default=3, help="nodes tried for each arrival")
@click.option("--futures", default=6, help="futures for each of them")
@click.option("--ahead", default=40, help="tasks of a future")
def main(options: Options) -> int:
    """Measures each order of arrivals; 2 if what was asked for is not there."""
    if min(options.seeds, options.part, options.ahead) < 1 or min(options.candidates, options.futures) < 2:
        raise Unusable("take at least one seed, part and task ahead, and at least two candidates and futures")
    plan = Plan(options.candidates, options.futures, options.ahead)
    traces = [load_trace(options.data, name) for name in choose_names(options.traces, trace_names(options.data))]
    gains: list[Gain] = []
    progress = Progress("orders of arrival")
    for trace in traces:
        for seed in range(SEEDS[0], SEEDS[0] + options.seeds):
            gains.append(measure_gain(trace, seed, options.part, plan))
            write_csv(options.out / "rollouts.csv", None, map(_cells, gains))  # what is done stays
            progress.show(len(gains), len(traces) * options.seeds)
    print(format_table(None, map(_cells, gains), words=1))
    print(f"\n{summarize(gains)}\nwritten to {options.out / 'rollouts.csv'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
