"""Kueue's own load on queues of ours, in simulated time: 15,000 workloads in 30 queues of 5 cohorts.

Replays the load of Kueue's scheduler performance test (kueue test/performance/scheduler, Apache-2.0; definition and
published means in DATA/kai_kueue.json) on a core: workloads arrive and end at simulated times, and each is decided at
once. Reports the mean time from creation to start of each class beside Kueue's, which were measured with an API server
in real time, the share of the quota that is used, and the wall time of all decisions. Checks that no cohort ever holds
more than its quota.
"""

import gc
import heapq
import json
import time
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.queueing.summary import SetResult, SummaryRow
from bench.runner import Progress, Unusable
from bench.tables import write_csv
from eelgrid_controller.core.core import Core
from eelgrid_controller.core.steps import CoreStep
from eelgrid_controller.state.cluster_state import ClusterState
from eelgrid_controller.state.events import WorkloadPlaced
from eelgrid_protos import catalogue
from eelgrid_protos.messages import (
    Inventory,
    Queue,
    QueueQuota,
    ResourceRequest,
    SubmitWorkloadRequest,
    Workload,
    WorkloadKind,
    WorkloadSpec,
)

_NS_PER_MS = 1_000_000
_UNIT = 1000  # a unit of the load is a CPU
_NODE_CPUS = 96
# The target of this project for the baseline, on two cores.
_WALL_MOST_S = 90.0


def build_queues(load: dict[str, Any]) -> tuple[Queue, ...]:
    """The load's cohorts and queues."""
    found = []
    for cohort in range(load["cohorts"]):
        found.append(Queue(name=f"cohort-{cohort}"))
        for number in range(load["queues_per_cohort"]):
            quota = QueueQuota(
                resource="cpu",
                nominal=_UNIT * load["nominal_quota"],
                borrowing_limit=_UNIT * load["borrowing_limit"],
            )
            found.append(Queue(name=f"queue-{cohort}-{number}", parent=f"cohort-{cohort}", quotas=(quota,)))
    return tuple(found)


def list_arrivals(load: dict[str, Any]) -> list[tuple[int, str, str, dict[str, Any]]]:
    """Creation time in milliseconds, id, queue and class of every workload, in order."""
    found = []
    for cohort in range(load["cohorts"]):
        for number in range(load["queues_per_cohort"]):
            for one in load["workloads"]:
                for count in range(one["count_per_queue"]):
                    key = f"{one['cls']}-{cohort}-{number}-{count}"
                    found.append(((count + 1) * one["creation_interval_ms"], key, f"queue-{cohort}-{number}", one))
    return sorted(found, key=lambda item: item[:2])


class QueueReplay:
    """Submits and ends workloads on a core at simulated times, and times its decisions."""

    def __init__(self, load: dict[str, Any]) -> None:
        queues = build_queues(load)
        units = load["cohorts"] * load["queues_per_cohort"] * load["nominal_quota"]
        self.core = Core(ClusterState(), catalogue.load_catalogue())
        # Twice the quota, so that quotas bind and not the packing of nodes.
        for number in range(-(-2 * units // _NODE_CPUS)):
            inventory = Inventory(node_name=f"n{number}", cpu_milli=1000 * _NODE_CPUS, memory_bytes=2**40)
            self.core.register_node(inventory, now_ns=1)
        self.core.update_policy(replace(self.core.state.policy, queues=queues), now_ns=1)
        self.cohort_most = _UNIT * load["queues_per_cohort"] * load["nominal_quota"]
        self.cohorts = [queue.name for queue in queues if not queue.parent]
        self.ends: list[tuple[int, str]] = []
        self.classes: dict[str, dict[str, Any]] = {}
        self.waits_ms: dict[str, list[int]] = defaultdict(list)
        self.wall_s: list[float] = []
        self.last_ms = 0

    def submit(self, now_ms: int, key: str, queue: str, one: dict[str, Any]) -> None:
        """One workload arrives."""
        self.classes[key] = {**one, "created_ms": now_ms}
        spec = WorkloadSpec(
            name=key,
            queue=queue,
            kind=WorkloadKind.BATCH_JOB,
            priority=one["priority"],
            replicas=1,
            request=ResourceRequest(cpu_milli=_UNIT * one["request"]),
        )
        request = SubmitWorkloadRequest(spec=spec, workload_id=key)
        self._decide(now_ms, lambda: self.core.submit(request, now_ns=now_ms * _NS_PER_MS))

    def end(self, now_ms: int, key: str) -> None:
        """One workload ends."""
        self._decide(now_ms, lambda: self.core.cancel(key, now_ns=now_ms * _NS_PER_MS))

    def _decide(self, now_ms: int, call: Any) -> None:
        begin_s = time.perf_counter()
        steps: list[CoreStep[Workload] | CoreStep[None]] = [call()]
        while self.core.has_backlog:
            steps.append(self.core.retry(now_ns=now_ms * _NS_PER_MS))
        self.wall_s.append(time.perf_counter() - begin_s)
        for step in steps:
            for event in step.events:
                if isinstance(event, WorkloadPlaced):
                    one = self.classes[event.workload_id]
                    self.waits_ms[one["cls"]].append(now_ms - one["created_ms"])
                    heapq.heappush(self.ends, (now_ms + one["runtime_ms"], event.workload_id))
        self.last_ms = now_ms

    def check_quotas(self) -> None:
        """Raises Unusable if a cohort holds more than its quota."""
        for name in self.cohorts:
            used = next(one.used for one in self.core.queues.tree.usage(name) if one.resource == "cpu")
            if used > self.cohort_most:
                raise Unusable(f"{name} holds {used} of {self.cohort_most}, which is a fault of the controller")


def replay_load(load: dict[str, Any]) -> tuple[QueueReplay, int]:
    """Plays a whole load; returns the replay and how many workloads there are."""
    replay, arrivals = QueueReplay(load), list_arrivals(load)
    total, done, place = 2 * len(arrivals), 0, 0
    progress = Progress("arrivals and ends")
    gc.disable()
    while place < len(arrivals) or replay.ends:
        # Of one moment, ends come before arrivals.
        if replay.ends and (place == len(arrivals) or replay.ends[0][0] <= arrivals[place][0]):
            replay.end(*heapq.heappop(replay.ends))
        else:
            replay.submit(*arrivals[place])
            place += 1
        done += 1
        if done % 500 == 0:
            replay.check_quotas()
            gc.collect()
            progress.show(done, total)
    gc.enable()
    return replay, len(arrivals)


def run_set(folder: Path, size: str, out: Path) -> SetResult:
    """Replays the load, prints the decision times and writes queueing.csv."""
    load = json.loads((folder / "kai_kueue.json").read_text(encoding="utf-8"))["kueue"][size]
    replay, submitted = replay_load(load)
    wall_s, unit_ms = sum(replay.wall_s), load["unit_ms_per_queue"]
    queues = load["cohorts"] * load["queues_per_cohort"]
    usage = unit_ms * queues / (replay.last_ms * queues * load["nominal_quota"])
    theirs = load["published"]
    rows = [
        # Their wall time is that of the whole test, with an API server.
        _row("decisions_wall_s", wall_s, theirs["wall_ms"] / 1000.0),
        _row("makespan_s", replay.last_ms / 1000.0, theirs["wall_ms"] / 1000.0, load["bound_s"]),
        _row("usage_pct", 100.0 * usage, theirs["usage_pct"], 100.0),
    ]
    for name, waits in sorted(replay.waits_ms.items()):
        mean_s = sum(waits) / len(waits) / 1000.0
        rows.append(_row(f"wait_{name}_s", mean_s, theirs["avg_time_to_admission_ms"][name] / 1000.0))
    columns = ("metric", "ours", "kueue", "bound")
    write_csv(out / "queueing.csv", columns, [[row.metric, row.ours, row.published, row.bound] for row in rows])
    started = sum(map(len, replay.waits_ms.values()))
    slowest = sorted(replay.wall_s)
    print(
        f"{started:,} of {submitted:,} started; a decision takes {1e3 * wall_s / len(slowest):.2f} ms in the mean, "
        f"p99 {1e3 * slowest[int(0.99 * len(slowest))]:.1f} ms; Kueue's times include its API server"
    )
    targets = [("all start", started == submitted)]
    if size == "baseline":
        targets.append((f"decisions take at most {_WALL_MOST_S:.0f} s", wall_s <= _WALL_MOST_S))
    return SetResult(tuple(rows), tuple(targets))


def _row(metric: str, ours: float, published: float, bound: float | None = None) -> SummaryRow:
    return SummaryRow("kueue", "eelgrid (published: Kueue)", metric, ours, published, bound)
