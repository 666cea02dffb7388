"""What switching between costs could gain, by playing the mix to the end: python -m bench.openb.switching --data DIR.

Owns the switching; the daemon has none. Must not know the terms of a cost.

Theory: each time the load (allocated GPU or CPU, whichever is the larger share) has risen by a step, futures are drawn
from the typical mix, up to the GPU of the whole fleet, and each is played to its end on a copy of the fleet under every
setting of SETTINGS. Decisions continue with the setting that is judged best until the next step. Beside the fleet,
FGD and mixes of PWR have placed the same arrivals on empty fleets of their own, as a shadow policy does, and play the
same futures. A setting falls short in a future by the points of GPU allocation at x = 1 that it is more than
BELOW_FGD_PP_MOST below FGD, and by the points of saving per allocated GPU that it is below the best mix of PWR, each
and MISSED_POINTS more. It is worth its allocation and its saving, in points, less SHORTFALL_WEIGHT times what it falls
short by, in the mean over the futures. A setting other than the present one is taken where it is better by more than the
standard error of the paired difference. All settings play the first futures, the better half of them the rest.

What has arrived and the mix are all that is looked at: nothing is known of the tasks to come. The typical mix is that of
the whole list, which every policy of the comparison knows; with --learned, futures are drawn from the tasks that have
arrived, and settings are compared from the first step on. Ours is tuned to a list in this way as its peers are not, and
PWR's and FGD's costs are among the settings, so that the comparison says what switching would bring to us, and not which
cost is better.
Source: Chang, Givan and Chong, "Parallel rollout for online solution of partially observable Markov decision
processes", Discrete Event Dynamic Systems 14, 2004 (policy switching).
"""

import statistics
import sys
import time
from collections.abc import Sequence
from typing import NamedTuple

import click
import numpy as np
from joblib import Parallel, delayed

from bench.openb.measure import compute_curves, empty_power_w, saving_per_gpu_pct, value_at
from bench.openb.mix_comparison import BELOW_FGD_PP_MOST, PWR_MIXES, read_pools
from bench.openb.mixes import SEEDS_APART, draw_mix
from bench.openb.policies import OURS, REFERENCE, choose_names
from bench.openb.rollouts import LAST_X, list_arrays, take_part
from bench.openb.traces import load_trace, trace_names
from bench.runner import Options, Progress, Unusable, benchmark, data_option, processes_option, seeds_option
from bench.tables import format_table, write_csv
from eelgrid_controller.replay.csv_reader import TraceError
from eelgrid_controller.replay.openb_protocol import SEEDS, TraceArrays, arrival_order, node_order
from eelgrid_controller.replay.run_statistics import ArrivalCurves
from eelgrid_kernels.argmin_index import place_arrivals
from eelgrid_kernels.arrays import (
    FRAGMENTATION,
    NEVER,
    SCARCITY,
    STRANDING,
    STRANDING_WHEN_FULL,
    WEIGHTS,
    ArrivalOutcomes,
    EngineArrays,
    Floats,
    Ints,
)
from eelgrid_kernels.baselines import PlacementPolicy, find_policy
from eelgrid_kernels.simulation import build_empty_engine, build_empty_outcomes

SHORTFALL_WEIGHT = 10.0  # a point below FGD or PWR outweighs ten above
MISSED_POINTS = 1.0  # being below at all counts as so many points: what cannot be had is not bought with the other
FIRST_FUTURES = 2  # that all settings play
ARRIVALS_BETWEEN = 16  # two looks at the load
_DRAWS = 54321  # apart from the seeds of arrivals
_SCALED = "pwr200"  # the engine of a mix has room for what every other policy keeps
SHADOWS = (REFERENCE, "pwr", "pwr500", "pwr300", "pwr200")


def _vary_ours(**weights: float) -> PlacementPolicy:
    """Ours with other weights of these terms."""
    place = {"fragmentation": FRAGMENTATION, "stranding": STRANDING, "full": STRANDING_WHEN_FULL, "scarcity": SCARCITY}
    varied = find_policy(OURS).weights.copy()
    for term, weight in weights.items():
        varied[place[term]] = weight
    return find_policy(OURS)._replace(weights=varied)


SETTINGS: dict[str, PlacementPolicy] = {
    OURS: find_policy(OURS),
    "less-stranding": _vary_ours(stranding=50.0, full=500.0),
    "stranding-300": _vary_ours(stranding=300.0),
    "stranding-500": _vary_ours(stranding=500.0),
    "stranding-1000": _vary_ours(stranding=1000.0),
    "fragmentation-100": _vary_ours(fragmentation=100.0),
    "fragmentation-300": _vary_ours(fragmentation=300.0),
    "fragmentation-1000": _vary_ours(fragmentation=1000.0),
    "both-300": _vary_ours(fragmentation=300.0, stranding=300.0),
    "no-scarcity": _vary_ours(scarcity=0.0),
    **{name: find_policy(name) for name in (REFERENCE, "pwr", "pwr500", "pwr200")},
}


class Effort(NamedTuple):
    """How often settings are compared, and how well."""

    futures: int  # 0: the fleet keeps ours
    step_pct: float  # of load between two comparisons
    learned: bool = False  # futures are drawn from what has arrived, instead of the typical mix


class Choice(NamedTuple):
    """A comparison that took another setting than that before."""

    load_pct: float
    setting: str


class Worth(NamedTuple):
    """What a policy comes to in the futures, in per cent."""

    alloc: Floats  # (K,) allocated at x = 1
    saving: Floats  # (K,) per allocated GPU, beside FGD's


class Played(NamedTuple):
    """One order of arrivals with switching."""

    curves: ArrivalCurves
    choices: tuple[Choice, ...]
    comparisons: int
    compared_s: float  # of the processor, all comparisons


class Row(NamedTuple):
    """One order of arrivals without and with switching: points over FGD's allocation and the best PWR mix's saving per GPU."""

    trace: str
    seed: int
    fgd_alloc_pct: float
    pwr_per_gpu_pct: float
    plain: tuple[float, float]
    switched: tuple[float, float]
    played: Played


def set_policy(run: EngineArrays, policy: PlacementPolicy) -> None:
    """The fleet goes on under another policy: no cost is known, and prices are due."""
    given = np.zeros(WEIGHTS)
    given[: len(policy.weights)] = policy.weights
    if len(policy.weights) <= STRANDING_WHEN_FULL:
        given[STRANDING_WHEN_FULL] = given[STRANDING]
    run.scalars["policy"], run.scalars["shifts"] = policy.code, NEVER
    run.scalars["given_weights"] = run.scalars["weights"] = given
    run.kinds["read"], run.kinds["loose"] = NEVER, 0.0


class Fleet:
    """A fleet under a policy that may change, and what became of its arrivals."""

    def __init__(self, trace: TraceArrays, seed: int, policy: PlacementPolicy, arrivals: int) -> None:
        rank = node_order(trace, seed)
        self.run = build_empty_engine(trace.fleet, trace.specs, trace.typical, rank, find_policy(_SCALED))
        set_policy(self.run, policy)
        self.outcomes, self.placed = build_empty_outcomes(arrivals), 0
        self.arrays, self._capacity_milli = list_arrays(self.run), trace.fleet.gpu_milli
        self._empty_w = empty_power_w(trace.fleet)

    def place(self, order: Ints, last: int) -> None:
        """The arrivals up to a number of them."""
        place_arrivals(self.run, order, self.outcomes, self.placed, last)
        self.placed = last

    def copy_state(self, other: "Fleet") -> None:
        """Becomes as another is, apart from its outcomes."""
        for mine, theirs in zip(self.arrays, other.arrays, strict=True):
            np.copyto(mine, theirs)

    @property
    def load(self) -> float:
        """Allocated GPU or CPU, whichever is the larger share."""
        scalars, states = self.run.scalars[0], self.run.states
        alive = states["root"] >= 0
        size = np.where(alive, self.run.nodes["tree_size"][states["root"]], 0)
        free = [int((size * states[column]).sum()) for column in ("total_free", "cpu_free")]
        capacity = [int(scalars["capacity_milli"]), int(scalars["cpu_capacity"])]
        return max(1.0 - left / max(1, whole) for left, whole in zip(free, capacity, strict=True))

    def curves(self, future: ArrivalOutcomes | None = None) -> ArrivalCurves:
        """Of all that arrived, and of a future after it."""
        past = ArrivalOutcomes._make(column[: self.placed] for column in self.outcomes)
        if future is None:
            return compute_curves(past, self._capacity_milli, self._empty_w)
        joined = ArrivalOutcomes._make(np.concatenate(pair) for pair in zip(past, future, strict=True))
        if self.placed:
            joined.arrived_milli[self.placed :] += past.arrived_milli[-1]
            joined.allocated_milli[self.placed :] += past.allocated_milli[-1]
        return compute_curves(joined, self._capacity_milli, self._empty_w)


def judge(worth: Worth, reference: Worth, pwr_saving: Floats) -> Floats:
    """(K,) what a setting is worth in each future beside FGD and the best PWR mix there."""
    short = np.stack((reference.alloc - BELOW_FGD_PP_MOST - worth.alloc, pwr_saving - worth.saving))
    points = np.where(short > 0.0, MISSED_POINTS + short, 0.0).sum(axis=0)
    return np.asarray(worth.alloc + worth.saving - SHORTFALL_WEIGHT * points)


class Switcher:
    """A fleet whose setting is chosen anew at each step of load, and its shadows."""

    def __init__(self, trace: TraceArrays, seed: int, effort: Effort, order: Ints) -> None:
        self._trace, self._order, self._effort = trace, order, effort
        self.setting = OURS
        self.live = Fleet(trace, seed, SETTINGS[OURS], len(order))
        self.shadows = {name: Fleet(trace, seed, find_policy(name), len(order)) for name in SHADOWS}
        self._trial = Fleet(trace, seed, SETTINGS[OURS], 0)
        self._generator = np.random.default_rng(_DRAWS + seed)
        self._likely = trace.typical.weight / trace.typical.weight.sum()

    def play(self) -> Played:
        """Every arrival, with comparisons on the way."""
        order, step, compared_s, comparisons = self._order, self._effort.step_pct / 100.0, 0.0, 0
        next_load = step if self._effort.learned else 0.0
        choices: list[Choice] = []
        for last in range(0, len(order) + ARRIVALS_BETWEEN, ARRIVALS_BETWEEN):
            load = self.live.load
            if self._effort.futures and load >= next_load:
                for shadow in self.shadows.values():
                    shadow.place(order, self.live.placed)
                begun_s, before = time.process_time(), self.setting
                self.compare()
                compared_s += time.process_time() - begun_s
                comparisons, next_load = comparisons + 1, load + step
                if self.setting != before:
                    choices.append(Choice(100.0 * load, self.setting))
            self.live.place(order, min(len(order), last + ARRIVALS_BETWEEN))
        return Played(self.live.curves(), tuple(choices), comparisons, compared_s)

    def compare(self) -> None:
        """Plays the futures and takes the setting that is best by more than chance."""
        futures = [self.draw_future() for _ in range(self._effort.futures)]
        shadows = [
            {name: self._play(fleet, None, future) for name, fleet in self.shadows.items()} for future in futures
        ]
        references = [curves[REFERENCE] for curves in shadows]
        reference = _measure(references, references)
        others = [[saving_per_gpu_pct(c[name], c[REFERENCE]) for name in SHADOWS if name != REFERENCE] for c in shadows]
        pwr_saving = np.max(others, axis=1)

        def judge_setting(name: str, first: int, last: int) -> Floats:
            part = slice(first, last)
            mine = [self._play(self.live, name, future) for future in futures[part]]
            past = Worth(*(column[part] for column in reference))
            return judge(_measure(mine, references[part]), past, pwr_saving[part])

        first = min(FIRST_FUTURES, len(futures))
        worth = {name: judge_setting(name, 0, first) for name in SETTINGS}
        ranked = sorted(worth, key=lambda name: -float(worth[name].mean()))
        kept = dict.fromkeys((self.setting, *ranked[: len(ranked) // 2]))
        whole = {name: np.concatenate((worth[name], judge_setting(name, first, len(futures)))) for name in kept}
        best = max(whole, key=lambda name: float(whole[name].mean()))
        gained = whole[best] - whole[self.setting]
        if best != self.setting and gained.mean() > gained.std(ddof=1) / np.sqrt(len(gained)):
            self.setting = best
            set_policy(self.live.run, SETTINGS[best])

    def draw_future(self) -> Ints:
        """Tasks of the mix that ask for what is missing to the GPU of the whole fleet."""
        demand, kinds, likely = self._trace.task_milli, self._trace.typical.spec, self._likely
        if self._effort.learned:
            kinds, counts = np.unique(self._order[: self.live.placed], return_counts=True)
            likely = counts / counts.sum()
        arrived = int(self.live.outcomes.arrived_milli[self.live.placed - 1]) if self.live.placed else 0
        missing = max(0, round(LAST_X * self._trace.fleet.gpu_milli) - arrived)
        size = 200 + int(1.3 * missing / float(likely @ demand[kinds]))
        drawn = self._generator.choice(kinds, size=size, p=likely)
        return drawn[: 1 + int(np.searchsorted(np.cumsum(demand[drawn]), missing))].astype(np.int64)

    def _play(self, fleet: Fleet, setting: str | None, future: Ints) -> ArrivalCurves:
        """The whole course of a fleet if this future follows, under another setting where one is named."""
        self._trial.copy_state(fleet)
        if setting is not None and setting != self.setting:
            set_policy(self._trial.run, SETTINGS[setting])
        outcomes = build_empty_outcomes(len(future))
        place_arrivals(self._trial.run, future, outcomes, 0, len(future))
        return fleet.curves(outcomes)


def _measure(curves: Sequence[ArrivalCurves], references: Sequence[ArrivalCurves]) -> Worth:
    return Worth(
        np.array([100.0 * value_at(each.allocated, 1.0) for each in curves]),
        np.array([saving_per_gpu_pct(mine, theirs) for mine, theirs in zip(curves, references, strict=True)]),
    )


def compare_switching(trace: TraceArrays, seed: int, effort: Effort) -> Row:
    """One order of arrivals under FGD, every PWR mix, ours, and ours with switching."""
    order = arrival_order(trace, seed)
    arrived: Floats = np.cumsum(trace.task_milli[order]) / trace.fleet.gpu_milli
    order = order[: int(np.searchsorted(arrived, LAST_X, side="right"))]

    def place_all(policy: str) -> ArrivalCurves:
        fleet = Fleet(trace, seed, find_policy(policy), len(order))
        fleet.place(order, len(order))
        return fleet.curves()

    reference = place_all(REFERENCE)
    pwr = max(saving_per_gpu_pct(place_all(name), reference) for name in PWR_MIXES)
    fgd_alloc = 100.0 * value_at(reference.allocated, 1.0)
    played = Switcher(trace, seed, effort, order).play()
    plain, switched = (
        (100.0 * value_at(curves.allocated, 1.0) - fgd_alloc, saving_per_gpu_pct(curves, reference) - pwr)
        for curves in (place_all(OURS), played.curves)
    )
    return Row(trace.name, seed, fgd_alloc, pwr, plain, switched, played)


def _cells(row: Row) -> dict[str, object]:
    played = row.played
    return {
        "trace": row.trace,
        "seed": row.seed,
        "fgd_alloc": f"{row.fgd_alloc_pct:.2f}",
        "pwr_per_gpu": f"{row.pwr_per_gpu_pct:.2f}",
        "over_fgd": f"{row.plain[0]:+.2f}",
        "over_pwr": f"{row.plain[1]:+.2f}",
        "switched_over_fgd": f"{row.switched[0]:+.2f}",
        "switched_over_pwr": f"{row.switched[1]:+.2f}",
        "compared_s": f"{played.compared_s / max(1, played.comparisons):.2f}",
        "choices": " ".join(f"{choice.load_pct:.0f}:{choice.setting}" for choice in played.choices),
    }


def summarize(rows: Sequence[Row]) -> str:
    """Both figures without and with switching: mean, worst, how many fall short, and the differences in pairs."""
    lines, kept = [], [0, 0]
    for row in rows:
        for i, (over_fgd, over_pwr) in enumerate((row.plain, row.switched)):
            kept[i] += over_fgd >= -BELOW_FGD_PP_MOST and over_pwr >= 0.0
    for name, place, least in (
        ("allocation over FGD's, points", 0, -BELOW_FGD_PP_MOST),
        ("saving per allocated GPU over the best PWR mix's, points", 1, 0.0),
    ):
        told = []
        for values in ([row.plain[place] for row in rows], [row.switched[place] for row in rows]):
            short = sum(value < least for value in values)
            told.append(f"{statistics.fmean(values):+.2f} (worst {min(values):+.2f}, below {least:g} on {short})")
        gains = [row.switched[place] - row.plain[place] for row in rows]
        spread = statistics.stdev(gains) if len(gains) > 1 else 0.0
        lines.append(
            f"{name}: ours {told[0]}, with switching {told[1]} of {len(rows)}; "
            f"gain {statistics.fmean(gains):+.2f}, deviation {spread:.2f}"
        )
    lines.append(f"neither below: ours {kept[0]}, with switching {kept[1]} of {len(rows)}")
    return "\n".join(lines)


def list_orders(options: Options) -> list[tuple[TraceArrays, int]]:
    """The mixes or the traces with their seeds, on a part of the fleet: one for each seed of a trace, the same for all of a mix."""
    if not options.mixes:
        names = choose_names(options.traces, trace_names(options.data))
        seeds = range(SEEDS[0], SEEDS[0] + options.seeds)
        jobs = [(load_trace(options.data, name), seed) for name in names for seed in seeds]
        return [(take_part(trace, options.part, seed) if options.part > 1 else trace, seed) for trace, seed in jobs]
    nodes, pools = read_pools(options.data)
    orders = []
    for number in range(options.mixes):
        first = SEEDS_APART * options.seed + number
        trace = draw_mix(nodes, pools, options.seed, number)
        part = take_part(trace, options.part, first) if options.part > 1 else trace
        orders += [(part, first + options.mixes * order) for order in range(options.seeds)]
    return orders


@benchmark(out="bench-out/openb", refused=(TraceError, OSError))
@data_option()
@click.option("--mixes", default=0, help="how many mixes to draw in place of the traces")
@click.option("--seed", default=1, help="of the mixes")
@click.option("--traces", default="all", help="suffixes of the task lists, with commas")
@seeds_option(1, f"how many, from {SEEDS[0]} up; orders of arrivals of each mix")
@click.option("--part", default=1, help="take one in so many nodes")
@click.option("--futures", default=6, help="that each comparison plays")
@click.option("--step", default=10.0, help="points of load between two comparisons")
@click.option("--learned", is_flag=True, help="Draw futures from what has arrived, instead of the typical mix.")
@processes_option
def main(options: Options) -> int:
    """Plays each order of arrivals; 2 if what was asked for is not there."""
    if min(options.seeds, options.part, options.processes) < 1 or min(options.mixes, options.seed) < 0:
        raise Unusable("take at least one seed, part and process, and mixes by a seed that is not negative")
    if options.futures <= FIRST_FUTURES or not 0.0 < options.step <= 100.0:
        raise Unusable(f"take more than {FIRST_FUTURES} futures, and a step of load up to 100 points")
    effort = Effort(options.futures, options.step, options.learned)
    jobs, rows = list_orders(options), list[Row]()
    progress = Progress("orders of arrival")
    work = Parallel(n_jobs=min(options.processes, len(jobs)), return_as="generator")
    for row in work(delayed(compare_switching)(*job, effort) for job in jobs):
        rows.append(row)
        write_csv(options.out / "switching.csv", None, map(_cells, rows))  # what is done stays
        progress.show(len(rows), len(jobs))
    print(format_table(None, map(_cells, rows), words=1))
    for name in dict.fromkeys(row.trace for row in rows) if not options.mixes else ():
        print(f"\n{name}\n{summarize([row for row in rows if row.trace == name])}")
    print(f"\nall\n{summarize(rows)}\nwritten to {options.out / 'switching.csv'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
