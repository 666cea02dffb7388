"""What quarantine saves: jobs that one machine on which nothing starts takes in and fails, with and without.

Twenty nodes of four GPUs get jobs of one GPU, most of 15 minutes, as fast as they end; some fail at once wherever they run. On
one node all do, after two seconds. The same arrivals are played through the core both ways, and once more with no bad node,
where every node that is closed is a false alarm.
"""

import heapq
import random
import sys
from collections.abc import Iterator
from typing import NamedTuple

import click

from bench.backfill import build_empty_cluster
from bench.runner import Options, Progress, benchmark, report_promise
from bench.tables import write_csv
from eelgrid_controller.state.events import NodeCordoned
from eelgrid_protos.messages import (
    AttemptState,
    AttemptStatus,
    BackfillMode,
    Mobility,
    ProcessSpec,
    ResourceRequest,
    SubmitWorkloadRequest,
    WorkloadSpec,
)

_NS = 10**9
_NODES, _NODE_GPUS, _BAD = 20, 4, "n0007"
_USERS = 30
_USUAL_S, _QUICK_S = 900.0, 2.0
# 71 of 80 GPUs are busy.
_BETWEEN_S = 12.8
_ARRIVES, _ENDS = 0, 1
_LOST_MOST = 20


class Outcome(NamedTuple):
    """Jobs that came, that ended, and that the bad node has failed; nodes that were closed."""

    came: int
    ended: int
    lost: int
    closed: int


class Cluster:
    """The core of one run, and the processes that its agents would run."""

    def __init__(self, seed: int, *, has_bad: bool, quarantines: bool, failing: float) -> None:
        self._chance, self._failing = random.Random(seed), failing
        self._bad = _BAD if has_bad else ""
        self._core = build_empty_cluster(
            _NODES,
            BackfillMode.NONE,
            model="A10",
            cpu_milli=64_000,
            memory_bytes=2**38,
            node_gpus=_NODE_GPUS,
            runs_processes=True,
            quarantines=quarantines,
        )
        self._agenda: list[tuple[float, int, str]] = [(10.0, _ARRIVES, "")]
        self._running: dict[str, tuple[float, bool, bool]] = {}  # since when, whether it fails, and on the bad node
        self._came = self._ended = self._lost = self._closed = 0

    def play(self, hours: float) -> Outcome:
        """Plays so many hours."""
        while self._agenda[0][0] <= hours * 3600.0:
            at_s, kind, key = heapq.heappop(self._agenda)
            if kind == _ARRIVES:
                self._submit(at_s)
                heapq.heappush(self._agenda, (at_s + self._chance.expovariate(1.0 / _BETWEEN_S), _ARRIVES, ""))
            else:
                self._end(key, at_s)
            while self._core.has_backlog:
                self._core.retry(now_ns=int(at_s * _NS))
            for key, node_name in self._list_begun():
                self._begin(key, node_name, at_s)
        return Outcome(self._came, self._ended, self._lost, self._closed)

    def _submit(self, at_s: float) -> None:
        self._came += 1
        spec = WorkloadSpec(
            name=f"job-{self._came}",
            user=f"u{self._chance.randrange(_USERS)}",
            request=ResourceRequest(cpu_milli=1000, memory_bytes=2**30, gpu_count=1, gpu_milli=1000),
            mobility=Mobility.FIXED,
            process=ProcessSpec(argv=("train",), working_directory="/"),
        )
        self._core.submit(SubmitWorkloadRequest(spec=spec, workload_id=f"w{self._came}"), now_ns=int(at_s * _NS))

    def _list_begun(self) -> Iterator[tuple[str, str]]:
        workloads = self._core.state.workloads
        for key in [key for key in self._core.state.live_ids if key not in self._running]:
            if workloads[key].placements:
                yield key, workloads[key].placements[0].node_name

    def _begin(self, key: str, node_name: str, at_s: float) -> None:
        is_on_bad = node_name == self._bad
        fails = is_on_bad or self._chance.random() < self._failing
        takes_s = _QUICK_S if fails else 61.0 + self._chance.expovariate(1.0 / _USUAL_S)
        self._running[key] = at_s, fails, is_on_bad
        heapq.heappush(self._agenda, (at_s + takes_s, _ENDS, key))

    def _end(self, key: str, at_s: float) -> None:
        begun_s, fails, is_on_bad = self._running.pop(key)
        workload = self._core.state.workloads[key]
        status = AttemptStatus(
            workload_id=key,
            replica=0,
            attempt=workload.attempt,
            state=AttemptState.ENDED,
            exit_code=int(fails),
            started_ns=int(begun_s * _NS),
            ended_ns=int(at_s * _NS),
        )
        step = self._core.record_attempts(workload.placements[0].node_name, (status,), now_ns=int(at_s * _NS))
        self._ended, self._lost = self._ended + 1, self._lost + is_on_bad
        self._closed += sum(isinstance(event, NodeCordoned) for event in step.events)


@benchmark()
@click.option("--seeds", type=click.IntRange(1), default=8, show_default=True, help="Runs of each kind.")
@click.option("--hours", type=click.FloatRange(0.1), default=4.0, show_default=True, help="Hours of each run.")
@click.option(
    "--failing", type=click.FloatRange(0.0, 1.0), default=0.02, show_default=True, help="Share that fails anywhere."
)
def main(options: Options) -> int:
    """Plays all runs and writes quarantine.csv."""
    kinds = {"without": (True, False), "with": (True, True), "no bad node": (False, True)}
    progress, rows, done = Progress("runs"), [], 0
    for seed in range(options.seeds):
        for kind, (has_bad, quarantines) in kinds.items():
            cluster = Cluster(seed, has_bad=has_bad, quarantines=quarantines, failing=options.failing)
            rows.append([kind, seed, *cluster.play(options.hours)])
            done += 1
            progress.show(done, options.seeds * len(kinds))
    for kind in kinds:
        mine = [row for row in rows if row[0] == kind]
        lost, came, closed = (sorted(row[at] for row in mine) for at in (4, 2, 5))
        print(
            f"{kind:<12}{came[0]:>6} to {came[-1]} jobs, {lost[0]} to {lost[-1]} lost on the bad node, "
            f"{closed[0]} to {closed[-1]} nodes closed"
        )
    write_csv(options.out / "quarantine.csv", ("quarantine", "seed", "came", "ended", "lost", "closed"), rows)
    worst = max(row[4] for row in rows if row[0] == "with")
    alarms = sum(row[5] for row in rows if row[0] == "no bad node")
    return report_promise(
        f"at most {_LOST_MOST} jobs are lost, and no good node is closed", kept=worst <= _LOST_MOST and not alarms
    )


if __name__ == "__main__":
    sys.exit(main())
