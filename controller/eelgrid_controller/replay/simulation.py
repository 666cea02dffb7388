"""One policy on a fleet while tasks come and go and nodes fail: a discrete event simulation.

Owns what happens when: arrivals, departures, failures, the queue. Must not know
how a place is chosen (eelgrid_kernels.fleet is asked), what energy costs, where
a schedule came from or any clock but the trace's.

Theory: events of one moment happen in this order: tasks leave, nodes return,
nodes fail, waiting tasks are tried if anything changed, tasks arrive. A task is
placed when it arrives if it fits anywhere; one that no node of the whole empty
fleet could hold is refused; else it waits. What a failed node held goes back to
its place in the queue and begins anew. The order of tries is that of
eelgrid_controller.replay.waiting. A waiting class can only have come to fit on a
node where something was released since it last failed, so that a round weighs
these nodes and asks the policy only for classes that fit one of them: the same
decisions as asking for all, at a fraction of the time.

A node that is away draws nothing. Nothing that is still to come is looked at.
"""

import math
from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from eelgrid_controller.replay.protocol import Fleet, Specs, Trace
from eelgrid_controller.replay.schedule import Outage, Schedule
from eelgrid_controller.replay.waiting import Waiting
from eelgrid_kernels.arrays import Floats, Ints
from eelgrid_kernels.packages import CORES_PER_PACKAGE, CPU_PACKAGE_FULL_W, CPU_PACKAGE_IDLE_W, MILLI_PER_CORE

__all__ = ["FINISHED", "REFUSED", "RUNNING", "TO_COME", "WAITING", "Outcome", "Placer", "empty_node_w", "simulate"]

TO_COME, REFUSED, WAITING, RUNNING, FINISHED = range(5)
_LEAVES, _RETURNS, _FAILS = range(3)


class Placer(Protocol):
    """Who holds the fleet and chooses; eelgrid_kernels.fleet.Fleet is one."""

    def place(self, spec: int, moment: int = 0) -> tuple[int, tuple[int, ...]]:
        """The node and GPUs of a task, or node -1."""

    def release(self, node: int, spec: int, slots: Sequence[int]) -> None:
        """Takes a task off its node."""

    def set_available(self, node: int, available: bool) -> None:
        """Whether the node takes tasks."""

    def free(self, node: int) -> tuple[int, int, tuple[int, ...]]:
        """CPU milli, memory MiB, milli of each GPU."""

    @property
    def power_w(self) -> float:
        """Watts of all nodes."""


class Outcome(NamedTuple):
    """What became of every task, and the state after each moment at which something happened."""

    fate: NDArray[np.int8]  # (T,) TO_COME, REFUSED, WAITING, RUNNING or FINISHED at the end
    waited_s: Floats  # (T,) in all, until the end for what still waits
    restarts: Ints  # (T,)
    lost_gpu_s: float  # of attempts that a failure ended
    decided_s: Floats  # (D,) when a task was placed
    decided_task: Ints  # (D,)
    decided_node: Ints  # (D,)
    time_s: Floats  # (E,) rises; the first is the beginning
    power_w: Floats  # (E,) from this moment to the next, the last one to the end
    idle_w: Floats  # (E,) of the same nodes with nothing on them
    allocated_milli: Ints  # (E,)
    waiting: Ints  # (E,)
    running: Ints  # (E,)
    away: Ints  # (E,) nodes
    end_s: float


def _ever(trace: Trace) -> NDArray[np.bool_]:
    """(S,) whether some node could hold a task of the class if it were empty."""
    fleet, specs = trace.fleet, trace.specs
    columns = np.column_stack((fleet.cpu_milli, fleet.memory_mib, fleet.gpu_count, fleet.model))
    fits = np.zeros(len(specs.cpu_milli), np.bool_)
    for cpu_milli, memory_mib, gpus, model in np.unique(columns, axis=0):
        fits |= _fitting(specs, cpu_milli, memory_mib, np.full(gpus, 1000), model)
    return fits


def _fitting(specs: Specs, cpu_milli: int, memory_mib: int, gpus: Ints, model: int) -> NDArray[np.bool_]:
    """(S,) whether what is free on a node holds a task of the class."""
    fits = (specs.cpu_milli <= cpu_milli) & (specs.memory_mib <= memory_mib)
    enough = (gpus[:, None] >= specs.gpu_milli).sum(axis=0) >= specs.gpu_count
    allowed = specs.allows[:, model] != 0 if model >= 0 else np.False_
    return np.asarray(fits & ((specs.gpu_count == 0) | (enough & allowed)))


def empty_node_w(fleet: Fleet) -> Floats:
    """(N,) watts of each node with nothing on it, as eelgrid_kernels counts them.

    The half core of an odd vCPU counts as working even then.
    """
    cores = -(-fleet.cpu_milli // MILLI_PER_CORE)
    packages = -(-cores // CORES_PER_PACKAGE)
    active = -(-(cores - fleet.cpu_milli // MILLI_PER_CORE) // CORES_PER_PACKAGE)
    cpu_w = CPU_PACKAGE_FULL_W * active + CPU_PACKAGE_IDLE_W * (packages - active)
    return np.asarray(cpu_w + fleet.gpu_count * fleet.idle_w, np.float64)


class _Play:
    """The state of one simulation."""

    def __init__(self, trace: Trace, schedule: Schedule, fleet: Placer) -> None:
        tasks = len(schedule.spec)
        self.trace, self.schedule, self.fleet, self.empty_w = trace, schedule, fleet, empty_node_w(trace.fleet)
        self.ever, self.demand = _ever(trace), trace.task_milli
        self.spec, self.duration_s = schedule.spec.tolist(), schedule.duration_s.tolist()
        self.queue = Waiting()
        self.events: list[tuple[float, int, int, int]] = []  # moment, kind, task or node, attempt
        self.held: dict[int, dict[int, tuple[int, ...]]] = {}  # by node: task and its GPUs
        self.where, self.since_s, self.attempt = [-1] * tasks, [0.0] * tasks, [0] * tasks
        self.fate = np.full(tasks, TO_COME, np.int8)
        self.waited_s, self.restarts = np.zeros(tasks), np.zeros(tasks, np.int64)
        self.away: set[int] = set()
        self.lost_gpu_s = 0.0
        self.allocated_milli = self.running = 0
        self.idle_w = float(self.empty_w.sum())
        self.decided: list[tuple[float, int, int]] = []
        self.rows: list[tuple[float, float, float, int, int, int, int]] = []

    def try_to_place(self, task: int, now_s: float) -> bool:
        spec = self.spec[task]
        node, slots = self.fleet.place(spec, len(self.decided))
        if node < 0:
            return False
        self.held.setdefault(node, {})[task] = slots
        self.where[task], self.since_s[task], self.fate[task] = node, now_s, RUNNING
        self.attempt[task] += 1
        self.allocated_milli += int(self.demand[spec])
        self.running += 1
        self.decided.append((now_s, task, node))
        if math.isfinite(self.duration_s[task]):
            heappush(self.events, (now_s + self.duration_s[task], _LEAVES, task, self.attempt[task]))
        return True

    def wait(self, task: int, now_s: float) -> None:
        self.fate[task], self.since_s[task] = WAITING, now_s
        self.queue.add(task, spec=self.spec[task], priority=int(self.schedule.priority[task]))

    def arrive(self, task: int, now_s: float) -> None:
        if not self.ever[self.spec[task]]:
            self.fate[task] = REFUSED
        elif not self.try_to_place(task, now_s):
            self.wait(task, now_s)

    def leave(self, task: int) -> int:
        """Takes a task off its node; returns the node."""
        node, spec = self.where[task], self.spec[task]
        self.fleet.release(node, spec, self.held[node].pop(task))
        self.allocated_milli -= int(self.demand[spec])
        self.running -= 1
        self.where[task] = -1
        return node

    def fail(self, node: int, now_s: float) -> set[int]:
        """A node goes away; returns the classes of what it held, which wait again."""
        self.fleet.set_available(node, False)
        self.away.add(node)
        victims = sorted(self.held.pop(node, {}).items())
        self.held[node] = dict(victims)
        for task, _ in victims:
            spec = self.spec[task]
            self.lost_gpu_s += float(self.demand[spec]) / 1000.0 * (now_s - self.since_s[task])
            self.leave(task)
            self.restarts[task] += 1
            self.wait(task, now_s)
        return {self.spec[task] for task, _ in victims}

    def come_back(self, node: int) -> None:
        self.fleet.set_available(node, True)
        self.away.discard(node)

    def retry(self, freed: set[int], specs: set[int], now_s: float) -> None:
        """A round of tries, after something was released on some nodes and some classes came back."""
        waiting = self.queue.specs
        if waiting:
            fits = np.zeros(len(self.ever), np.bool_)
            for node in freed - self.away:
                cpu_milli, memory_mib, gpus = self.fleet.free(node)
                model = int(self.trace.fleet.model[node])
                fits |= _fitting(self.trace.specs, cpu_milli, memory_mib, np.array(gpus, np.int64), model)
            specs = specs | {spec for spec in waiting if fits[spec]}
        while (head := self.queue.first(specs)) is not None:
            spec, task = head
            waited_s = now_s - self.since_s[task]
            if self.try_to_place(task, now_s):
                self.queue.take(spec)
                self.waited_s[task] += waited_s
            else:
                specs = specs - {spec}

    def happen(self, now_s: float) -> None:
        """All that happens at a moment but arrivals."""
        freed: set[int] = set()
        specs: set[int] = set()
        while self.events and self.events[0][0] == now_s:
            _, kind, subject, attempt = heappop(self.events)
            if kind == _RETURNS:
                self.come_back(subject)
                freed.add(subject)
            elif kind == _FAILS:
                specs |= self.fail(subject, now_s)
            elif self.where[subject] >= 0 and self.attempt[subject] == attempt:
                freed.add(self.leave(subject))
                self.fate[subject] = FINISHED
        if freed or specs:
            self.retry(freed, specs, now_s)

    def note(self, now_s: float) -> None:
        """The state from this moment on; of several rows of one moment the last counts."""
        if self.rows and self.rows[-1][0] == now_s:
            self.rows.pop()
        away_w = math.fsum(self.empty_w[node] for node in self.away)  # whatever their order
        idle_w, power_w = self.idle_w - away_w, self.fleet.power_w - away_w
        waiting, away = len(self.queue), len(self.away)
        self.rows.append((now_s, power_w, idle_w, self.allocated_milli, waiting, self.running, away))


def simulate(trace: Trace, schedule: Schedule, fleet: Placer, outages: Sequence[Outage], end_s: float) -> Outcome:
    """Everything from the first arrival to end_s, that moment included, on an empty fleet."""
    play = _Play(trace, schedule, fleet)
    for outage in outages:
        if outage.up_s <= schedule.begin_s:
            continue
        play.events.append((max(outage.down_s, schedule.begin_s), _FAILS, outage.node, 0))
        if math.isfinite(outage.up_s):
            play.events.append((outage.up_s, _RETURNS, outage.node, 0))
    play.events = [event for event in play.events if event[0] <= end_s]
    heapify(play.events)
    arrival_s, coming = schedule.arrival_s.tolist(), 0
    play.note(schedule.begin_s)
    while True:
        next_s = arrival_s[coming] if coming < len(arrival_s) else math.inf
        now_s = min(next_s, play.events[0][0]) if play.events else next_s
        if now_s > end_s or math.isinf(now_s):
            break
        play.happen(now_s)
        while coming < len(arrival_s) and arrival_s[coming] == now_s:
            play.arrive(coming, now_s)
            coming += 1
        play.note(now_s)
    return _outcome(play, end_s)


def _outcome(play: _Play, end_s: float) -> Outcome:
    for task in play.queue.tasks():
        play.waited_s[task] += end_s - play.since_s[task]
    moments, tasks, nodes = zip(*play.decided, strict=True) if play.decided else ((), (), ())
    time_s, power_w, idle_w, allocated, waiting, running, away = zip(*play.rows, strict=True)
    return Outcome(
        fate=play.fate,
        waited_s=play.waited_s,
        restarts=play.restarts,
        lost_gpu_s=play.lost_gpu_s,
        decided_s=np.array(moments, np.float64),
        decided_task=np.array(tasks, np.int64),
        decided_node=np.array(nodes, np.int64),
        time_s=np.array(time_s, np.float64),
        power_w=np.array(power_w, np.float64),
        idle_w=np.array(idle_w, np.float64),
        allocated_milli=np.array(allocated, np.int64),
        waiting=np.array(waiting, np.int64),
        running=np.array(running, np.int64),
        away=np.array(away, np.int64),
        end_s=end_s,
    )
