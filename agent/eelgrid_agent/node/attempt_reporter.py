"""Attempt reporter: what the controller is told of processes on one stream, and when their node is to blame for their end.

Starts wait to be told with others, ends go at once. The end of a process that failed and had GPUs is kept back until the
driver was asked about these after it, or did not answer in time. Its node is to blame if one of them is lost or hangs, or
if the driver announced an error of one, since the process began, that ends what runs there. Must not know how reports are
sent, nor how the driver is asked.
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import islice

from eelgrid_agent.engine.port import AttemptKey, attempt_key
from eelgrid_agent.node.inventory import GpuReadings, HealthMonitor, is_lost
from eelgrid_protos.messages import ATTEMPTS_MOST, Assignment, AttemptReport, AttemptState, AttemptStatus, Gpu

# The driver is given this long to say what became of the GPUs of a process that failed.
LOOK_MOST_NS = 2_000_000_000

ListAttempts = Callable[[], Mapping[AttemptKey, AttemptStatus]]


class AttemptReporter:
    """Reports the attempts of one node; times are monotonic."""

    def __init__(self, list_attempts: ListAttempts) -> None:
        self._list_attempts = list_attempts
        self._reported: dict[AttemptKey, AttemptStatus] = {}
        self._untold_ends = deque[AttemptStatus]()
        # Of attempts that have begun; anything else that changes goes at once, and takes them along.
        self._is_start_report_due, self._has_untold_starts = True, False
        # Of ends that are kept back: since when; and of those that were judged, why their node is to blame, if it is.
        self._kept_ns: dict[AttemptKey, int] = {}
        self._faults: dict[AttemptKey, str] = {}

    def begin(self, ended: Sequence[AttemptStatus]) -> None:
        """Begins anew on a stream, on which the controller asked for these ends of earlier attempts."""
        self._reported.clear()
        self._untold_ends = deque(ended)
        self._is_start_report_due = True

    def report_starts(self) -> bool:
        """Lets starts be told that were not told with others meanwhile; returns whether there are any."""
        self._is_start_report_due = self._is_start_report_due or self._has_untold_starts
        return self._has_untold_starts

    def next_report(self, assignments: Iterable[Assignment], now_ns: int) -> AttemptReport | None:
        """Returns the attempts that the controller was not told of on this stream, as they are now."""
        if self._untold_ends:
            told = min(ATTEMPTS_MOST, len(self._untold_ends))
            return AttemptReport(attempts=tuple(self._untold_ends.popleft() for _ in range(told)))
        now = self._judge(self._list_attempts(), assignments, now_ns)
        changed = {key: status for key, status in now.items() if self._reported.get(key) != status}
        is_urgent = any(status.is_over or key in self._reported for key, status in changed.items())
        if not (is_urgent or self._is_start_report_due):
            self._has_untold_starts = bool(changed)
            return None
        self._is_start_report_due = self._has_untold_starts = False
        sent = dict(islice(changed.items(), ATTEMPTS_MOST))
        self._reported = {key: status for key, status in self._reported.items() if key in now} | sent
        return AttemptReport(attempts=tuple(sent.values())) if sent else None

    def _judge(
        self, known: Mapping[AttemptKey, AttemptStatus], assignments: Iterable[Assignment], now_ns: int
    ) -> Mapping[AttemptKey, AttemptStatus]:
        """Returns the attempts without ends that are kept back, and with what their nodes are to blame for."""
        failed = {key for key, status in known.items() if _has_failed(status)}
        if not (failed or self._faults or self._kept_ns):
            return known
        self._faults = {key: fault for key, fault in self._faults.items() if key in failed}
        self._kept_ns = {key: since_ns for key, since_ns in self._kept_ns.items() if key in failed}
        with_gpus = {attempt_key(item) for item in assignments if item.gpu_uuids}
        now = dict(known)
        for key in failed:
            if key not in self._faults and key in with_gpus:
                since_ns = self._kept_ns.setdefault(key, now_ns)
                if now_ns - since_ns < LOOK_MOST_NS:
                    del now[key]
            elif fault := self._faults.get(key):
                now[key] = replace(now[key], node_fault=fault)
        return now

    def list_suspected_gpus(self, assignments: Iterable[Assignment]) -> tuple[str, ...]:
        """Returns the GPUs of processes whose end is kept back."""
        if not self._kept_ns:
            return ()
        waiting = self._kept_ns.keys() - self._faults.keys()
        return tuple(sorted({uuid for item in assignments if attempt_key(item) in waiting for uuid in item.gpu_uuids}))

    def judge_ends(
        self, assignments: Iterable[Assignment], quick: GpuReadings, gpus: Iterable[Gpu], health: HealthMonitor
    ) -> bool:
        """Judges the ends that are kept back, of which all GPUs were looked at or hang; returns whether there is any."""
        waiting, known = self._kept_ns.keys() - self._faults.keys(), self._list_attempts()
        looks, names = dict(quick), {gpu.uuid: f"GPU {gpu.index}" for gpu in gpus}
        judged = False
        for item in assignments if waiting else ():
            key = attempt_key(item)
            status = known.get(key) if key in waiting else None
            if status is None or not (looks.keys() | health.hung_gpus).issuperset(item.gpu_uuids):
                continue
            faults = {
                names.get(uuid, uuid): "it was lost"
                if uuid in looks and is_lost(looks[uuid])
                else health.find_fault(uuid, since_ns=status.started_ns)
                for uuid in item.gpu_uuids
            }
            self._faults[key] = next((f"{name}: {fault}" for name, fault in faults.items() if fault), "")
            judged = True
        return judged


def _has_failed(status: AttemptStatus) -> bool:
    """Returns whether a process ended by itself, and not with success."""
    return status.state is AttemptState.ENDED and not status.is_success and not status.reason and status.started_ns > 0
