"""Placement policies in fleets where tasks end: python -m bench.openb.steady --data DIR.

Owns the comparison at steady loads. Must not know how a policy decides.

Theory. The published protocol fills a fleet with tasks of which none ever ends, so that what a placement spoils stays
spoilt and the load reaches 100 %. Most clusters run for weeks at one load, and tasks end. Here tasks of the typical mix
arrive as a Poisson process, and each lasts for a time drawn from one distribution with the mean 1 for all classes:
exponential, or lognormal with a given sigma. The rate is such that what arrives asks in the mean for a given share of
the fleet's GPU (the offered load), or more than there is; with --swing it rises and falls by that share of itself, as in
a day, once in DAY mean durations. What fits nowhere is refused and does not come again, or with --wait stays in
the queue of eelctl replay, where what fits starts whenever a task ends, and small tasks pass large ones, as under
backfill without reservations; only what no empty node holds is refused then. After WARM mean durations,
allocated GPU and watts are averaged over time for MEASURED more, or for a day. With --alike the fleets are a few equal
nodes with a few kinds of task. All policies meet the same arrivals and durations. Saving is compared per allocated GPU,
since a policy that refuses work draws less for less. Each run shows ours beside the mix of PWR that saves most in that
very run, which is luck in part. The last table has every policy by itself, means over the lists with the standard error
of what differs between them, and `pwr-tuned`: for each list the mix of PWR that saves most over its other orders of arrival.
Source: Weng et al., USENIX ATC'23 (tasks and nodes); the loss system is Erlang's, with several resources.
"""

import heapq
import math
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import click
import numpy as np
from joblib import Parallel, delayed

from bench.openb.alike import build_alike_traces
from bench.openb.mix_comparison import BELOW_FGD_PP_MOST, PWR_MIXES
from bench.openb.policies import OURS, REFERENCE
from bench.openb.switching import list_orders
from bench.openb.traces import csv_folder
from bench.runner import Options, Progress, Unusable, benchmark, data_option, processes_option, seeds_option
from bench.tables import format_table, write_csv
from eelgrid_controller.replay.csv_reader import TraceError
from eelgrid_controller.replay.openb import NODE_LIST, read_nodes
from eelgrid_controller.replay.openb_protocol import SEEDS, TraceArrays, node_order
from eelgrid_controller.replay.policy_comparison import OBJECTIVE_POLICIES, find_replayed_policy
from eelgrid_controller.replay.simulation import REFUSED, ArrivalSchedule, simulate_policy
from eelgrid_kernels.arrays import Floats, Ints
from eelgrid_kernels.simulation import SimulatedFleet

WARM, MEASURED, DAY = 3.0, 3.0, 8.0  # mean durations
POLICIES = (REFERENCE, *PWR_MIXES, OURS, *OBJECTIVE_POLICIES)
TUNED = "pwr-tuned"
_DRAWS = 777  # apart from the seeds of arrivals


class Arrivals(NamedTuple):
    """What comes, in order."""

    kind: Ints  # (N,)
    at: Floats  # (N,) in mean durations
    lasts: Floats  # (N,)


class Traffic(NamedTuple):
    """How the durations of tasks are distributed, by how much the load swings, and whether what has no place waits."""

    sigma: float = 0.0  # of lognormal durations; 0 for exponential ones
    swing: float = 0.0  # of the load, up and down
    waits: bool = False


class Steady(NamedTuple):
    """Means over time under one policy."""

    alloc_pct: float  # of the fleet's GPU
    power_kw: float
    refused_pct: float  # of the GPU that was asked for while it was measured
    # Mean durations that a GPU asked for then and not refused has waited, to the end of the run at most.
    wait: float = 0.0


class Row(NamedTuple):
    """One order of arrivals of a list at one load, under every policy."""

    trace: str
    seed: int
    load: float
    found: dict[str, Steady]

    @property
    def fgd(self) -> Steady:
        """What savings are measured against."""
        return self.found[REFERENCE]

    @property
    def ours(self) -> Steady:
        """With the weights of the objective `balanced`."""
        return self.found[OURS]

    @property
    def pwr(self) -> str:
        """The mix of PWR that saves most here."""
        return max(PWR_MIXES, key=self.saving_pct)

    @property
    def best_pwr(self) -> Steady:
        """That mix."""
        return self.found[self.pwr]

    def saving_pct(self, policy: str) -> float:
        """Saved for each allocated GPU, in per cent of FGD's watts."""
        return save_per_gpu_pct(self.found[policy], self.fgd)

    def over_pp(self, policy: str) -> float:
        """Allocation beside FGD's, in points of the fleet."""
        return self.found[policy].alloc_pct - self.fgd.alloc_pct

    @property
    def over_pwr_pp(self) -> float:
        """Saving per allocated GPU beside the best PWR mix's, in points of FGD's watts."""
        return self.saving_pct(OURS) - self.saving_pct(self.pwr)


def save_per_gpu_pct(mine: Steady, reference: Steady) -> float:
    """Watts saved for each allocated GPU, in per cent of the reference's; nan where nothing is allocated."""
    if not (mine.alloc_pct and reference.alloc_pct):
        return float("nan")
    return 100.0 * (1.0 - (mine.power_kw / mine.alloc_pct) / (reference.power_kw / reference.alloc_pct))


def draw_arrivals(trace: TraceArrays, seed: int, load: float, traffic: Traffic) -> Arrivals:
    """Tasks of the typical mix that ask for that share of the fleet's GPU in the mean."""
    generator, sigma, swing = np.random.default_rng(_DRAWS + seed), traffic.sigma, traffic.swing
    likely = trace.typical.weight / trace.typical.weight.sum()
    rate = load * (1.0 + swing) * trace.fleet.gpu_milli / float(likely @ trace.task_milli[trace.typical.spec])
    count = int(rate * (WARM + (DAY if swing else MEASURED)))
    kind = generator.choice(trace.typical.spec, size=count, p=likely).astype(np.int64)
    at = np.cumsum(generator.exponential(1.0 / rate, count))
    lasts = generator.lognormal(-sigma * sigma / 2.0, sigma, count) if sigma else generator.exponential(1.0, count)
    if not swing:
        return Arrivals(kind, at, lasts)
    comes = generator.random(count) * (1.0 + swing) < 1.0 + swing * np.sin(2.0 * np.pi * at / DAY)
    return Arrivals(kind[comes], at[comes], lasts[comes])


def _build_fleet(trace: TraceArrays, seed: int, policy: str) -> SimulatedFleet:
    rank, chosen = node_order(trace, seed), find_replayed_policy(policy)
    return SimulatedFleet(trace.fleet, trace.specs, trace.typical, rank, chosen)


def play(trace: TraceArrays, seed: int, policy: str, arrivals: Arrivals) -> Steady:
    """One policy through all arrivals and ends; what fits nowhere is refused."""
    fleet = _build_fleet(trace, seed, policy)
    milli, ends = trace.task_milli.tolist(), list[tuple[float, int, int, int, tuple[int, ...]]]()
    held = asked = refused = 0
    last = held_time = energy = 0.0

    def pass_time(now: float) -> None:
        nonlocal last, held_time, energy
        if now > WARM:
            elapsed = now - max(last, WARM)
            held_time, energy = held_time + held * elapsed, energy + fleet.power_w * elapsed
        last = now

    for number, (kind, now, lasts) in enumerate(
        zip(arrivals.kind.tolist(), arrivals.at.tolist(), arrivals.lasts.tolist(), strict=True)
    ):
        while ends and ends[0][0] <= now:
            end, _, node, ended, slots = heapq.heappop(ends)
            pass_time(end)
            fleet.release_task(node, ended, slots)
            held -= milli[ended]
        pass_time(now)
        node, slots = fleet.place_task(kind)
        if node >= 0:
            held += milli[kind]
            heapq.heappush(ends, (now + lasts, number, node, kind, slots))
        if now > WARM:
            asked, refused = asked + milli[kind], refused + (milli[kind] if node < 0 else 0)
    span = max(1e-9, last - WARM)
    alloc_pct = 100.0 * held_time / span / max(1, trace.fleet.gpu_milli)
    return Steady(alloc_pct, energy / span / 1e3, 100.0 * refused / max(1, asked))


def play_waiting(trace: TraceArrays, seed: int, policy: str, arrivals: Arrivals) -> Steady:
    """One policy through all arrivals and ends as eelctl replay plays them: only what no empty node holds is refused."""
    fleet = _build_fleet(trace, seed, policy)
    schedule = ArrivalSchedule(*arrivals, np.zeros(len(arrivals.kind), np.int64))
    played = simulate_policy(trace, schedule, fleet, (), float(arrivals.at[-1]))
    elapsed, span = np.diff(np.maximum(np.append(played.time_s, played.end_s), WARM)), max(1e-9, played.end_s - WARM)
    asked = np.where(arrivals.at > WARM, trace.task_milli[arrivals.kind], 0)
    refused, total = float(asked[played.fate == REFUSED].sum()), max(1, int(asked.sum()))
    alloc_pct = 100.0 * float(played.allocated_milli @ elapsed) / span / max(1, trace.fleet.gpu_milli)
    wait = float(asked @ played.waited_s) / max(1.0, total - refused)
    return Steady(alloc_pct, float(played.power_w @ elapsed) / span / 1e3, 100.0 * refused / total, wait)


def compare_steady(trace: TraceArrays, seed: int, loads: Sequence[float], traffic: Traffic) -> list[Row]:
    """Every policy on one list, at every load."""
    rows, played = [], play_waiting if traffic.waits else play
    for load in loads:
        arrivals = draw_arrivals(trace, seed, load, traffic)
        rows.append(Row(trace.name, seed, load, {name: played(trace, seed, name, arrivals) for name in POLICIES}))
    return rows


def _list_alike(options: Options) -> list[tuple[TraceArrays, int]]:
    """Fleets of equal nodes with their seeds."""
    seeds = range(SEEDS[0], SEEDS[0] + options.seeds)
    traces = build_alike_traces(read_nodes(csv_folder(options.data) / NODE_LIST))
    return [(trace, seed) for trace in traces for seed in seeds]


def _cells(row: Row) -> dict[str, object]:
    return {
        "trace": row.trace,
        "seed": row.seed,
        "load": f"{row.load:g}",
        "fgd_alloc": f"{row.fgd.alloc_pct:.2f}",
        "pwr": row.pwr,
        "pwr_alloc": f"{row.best_pwr.alloc_pct:.2f}",
        "alloc": f"{row.ours.alloc_pct:.2f}",
        "over_fgd": f"{row.over_pp(OURS):+.2f}",
        "refused": f"{row.ours.refused_pct:.2f}",
        "pwr_per_gpu": f"{row.saving_pct(row.pwr):.2f}",
        "per_gpu": f"{row.saving_pct(OURS):.2f}",
        "over_pwr": f"{row.over_pwr_pp:+.2f}",
        "fgd_kw": f"{row.fgd.power_kw:.1f}",
        "kw": f"{row.ours.power_kw:.1f}",
        "fgd_wait": f"{row.fgd.wait:.3f}",
        "pwr_wait": f"{row.best_pwr.wait:.3f}",
        "wait": f"{row.ours.wait:.3f}",
    }


def summarize(rows: Sequence[Row]) -> list[dict[str, object]]:
    """By load: means, the worst list, and on how many lists ours falls short; without GPU held, nothing is saved for one."""
    lines = []
    for load in sorted({row.load for row in rows}):
        here = [row for row in rows if row.load == load]
        over_fgd, held = [row.over_pp(OURS) for row in here], [row for row in here if math.isfinite(row.over_pwr_pp)]
        over_pwr = [row.over_pwr_pp for row in held]
        lines.append(
            {
                "load": f"{load:g}",
                "lists": len(here),
                "over_fgd": f"{statistics.fmean(over_fgd):+.2f}",
                "worst": f"{min(over_fgd):+.2f}",
                "below": sum(value < -BELOW_FGD_PP_MOST for value in over_fgd),
                "pwr_over_fgd": f"{statistics.fmean(row.over_pp(row.pwr) for row in here):+.2f}",
                "per_gpu": f"{statistics.fmean(row.saving_pct(OURS) for row in held):.2f}",
                "pwr_per_gpu": f"{statistics.fmean(row.saving_pct(row.pwr) for row in held):.2f}",
                "over_pwr": f"{statistics.fmean(over_pwr):+.2f}",
                "worst_over_pwr": f"{min(over_pwr):+.2f}",
                "below_pwr": sum(value < 0.0 for value in over_pwr),
                "fgd_wait": f"{statistics.fmean(row.fgd.wait for row in here):.3f}",
                "pwr_wait": f"{statistics.fmean(row.best_pwr.wait for row in here):.3f}",
                "wait": f"{statistics.fmean(row.ours.wait for row in here):.3f}",
            }
        )
    return lines


def _tune_pwr(row: Row, orders: Sequence[Row]) -> str:
    """The mix of PWR that saves most over the other orders of a list; of one order alone, over that."""
    others = [other for other in orders if other is not row] or [row]
    return max(PWR_MIXES, key=lambda name: statistics.fmean(other.saving_pct(name) for other in others))


def _standard_error(means: Sequence[float]) -> float:
    return statistics.stdev(means) / math.sqrt(len(means)) if len(means) > 1 else 0.0


def _average_policy(policy: str, by_list: Sequence[Sequence[Row]]) -> dict[str, object]:
    """Means over lists of the means over their orders, with their standard errors."""
    chosen = [[(row, _tune_pwr(row, orders) if policy == TUNED else policy) for row in orders] for orders in by_list]
    over_fgd = [statistics.fmean(row.over_pp(name) for row, name in orders) for orders in chosen]
    per_gpu = [statistics.fmean(row.saving_pct(name) for row, name in orders) for orders in chosen]
    wait = statistics.fmean(statistics.fmean(row.found[name].wait for row, name in orders) for orders in chosen)
    return {
        "policy": policy,
        "over_fgd": f"{statistics.fmean(over_fgd):+.2f}",
        "error": f"{_standard_error(over_fgd):.2f}",
        "below": sum(mean < -BELOW_FGD_PP_MOST for mean in over_fgd),
        "per_gpu": f"{statistics.fmean(per_gpu):.2f}",
        "its_error": f"{_standard_error(per_gpu):.2f}",
        "wait": f"{wait:.3f}",
    }


def compare_policies(rows: Sequence[Row]) -> list[dict[str, object]]:
    """By load and policy: means over the lists, their errors, and on how many lists less is allocated than by FGD."""
    lines = list[dict[str, object]]()
    for load in sorted({row.load for row in rows}):
        grouped = defaultdict[str, list[Row]](list)
        for row in rows:
            if row.load == load and math.isfinite(row.over_pwr_pp):
                grouped[row.trace].append(row)
        policies = (*POLICIES[1:], TUNED) if grouped else ()
        lines += ({"load": f"{load:g}", **_average_policy(name, list(grouped.values()))} for name in policies)
    return lines


def _list_cells(row: Row) -> Iterator[dict[str, object]]:
    for policy, one in row.found.items():
        named = {"trace": row.trace, "seed": row.seed, "load": f"{row.load:g}", "policy": policy}
        yield {**named, **{name: f"{value:.4f}" for name, value in one._asdict().items()}}


@benchmark(out="bench-out/openb", refused=(TraceError, OSError))
@data_option()
@click.option("--mixes", default=0, help="how many mixes to draw in place of the traces")
@click.option("--seed", default=1, help="of the mixes")
@click.option("--traces", default="all", help="suffixes of the task lists, with commas")
@click.option("--alike", is_flag=True, help="Play fleets of a few equal nodes, in place of the traces.")
@click.option("--loads", default="0.6,0.75,0.85,0.95,1.1", help="GPU asked for, as shares of the fleet's, with commas")
@click.option("--sigma", default=0.0, help="of lognormal durations; 0 for exponential ones")
@click.option("--wait", is_flag=True, help="Have what fits nowhere wait, instead of refusing it.")
@click.option("--swing", default=0.0, help="share of the load by which it rises and falls in a day; 0 for a steady one")
@seeds_option(1, f"how many, from {SEEDS[0]} up; orders of arrivals of each mix")
@click.option("--part", default=1, help="take one in so many nodes")
@processes_option
def main(options: Options) -> int:
    """Plays every list at every load; 2 if what was asked for is not there."""
    loads = [float(text) for text in options.loads.split(",")]
    if min(options.seeds, options.part, options.processes) < 1 or min(options.mixes, options.seed) < 0:
        raise Unusable("take at least one seed, part and process, and mixes by a seed that is not negative")
    if not loads or min(loads) <= 0.0 or options.sigma < 0.0 or not 0.0 <= options.swing <= 1.0:
        raise Unusable("take loads above 0, a sigma that is not negative, and a swing from 0 to 1")
    if options.alike and (options.mixes or options.part > 1 or options.traces != "all"):
        raise Unusable("take equal nodes (--alike) without --mixes, --traces and --part, which they have no use for")
    if options.mixes and options.traces != "all":
        raise Unusable("take mixes or traces: a mix is drawn from the lists default and gpuspec33")
    traffic = Traffic(options.sigma, options.swing, options.wait)
    lists, rows = _list_alike(options) if options.alike else list_orders(options), list[Row]()
    progress = Progress("lists")
    work = Parallel(n_jobs=min(options.processes, len(lists)), return_as="generator")
    for done, found in enumerate(work(delayed(compare_steady)(*one, loads, traffic) for one in lists)):
        rows += found
        write_csv(options.out / "steady.csv", None, map(_cells, rows))  # what is done stays
        progress.show(done + 1, len(lists))
    print(format_table(None, map(_cells, rows), words=1))
    write_csv(options.out / "steady_policies.csv", None, (cells for row in rows for cells in _list_cells(row)))
    print(f"\n{format_table(None, summarize(rows), words=0)}\n\n{format_table(None, compare_policies(rows), words=2)}")
    print(f"written to {options.out / 'steady.csv'} and steady_policies.csv beside it")
    return 0


if __name__ == "__main__":
    sys.exit(main())
