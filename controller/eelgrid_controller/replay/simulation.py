"""Discrete event simulation of a placement policy: arrivals, departures, failures and the queue.

The placer is a port (eelgrid_kernels.simulation implements it). All times are seconds of the trace's clock; the first
arrival is the beginning. Failures of a node are an alternating renewal process with exponential times, drawn node by
node from the raw words of PCG64, which numpy keeps the same in every version.

Events of one moment happen in this order: tasks leave, nodes return, nodes fail, waiting tasks are tried if anything
changed, tasks arrive. A task is placed on arrival if it fits anywhere; one that no node of the empty fleet could hold
is refused; else it waits. What a failed node held returns to its place in the queue and starts over.

The queue is ordered by priority, then arrival. A round of tries walks it and skips a class of tasks once one of it has
failed, as the controller's core does; with a heap for each class the walk is a choice among the heads. A waiting
class can only have come to fit on a node where something was released since it last failed, so a round examines
these nodes and asks the policy only for classes that fit one of them: the same decisions at a fraction of the time.
"""

import math
from collections.abc import Iterable, Sequence
from heapq import heapify, heappop, heappush
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from eelgrid_controller.replay.csv_reader import TraceMalformed, TraceTooLarge
from eelgrid_controller.replay.openb import TraceNode, TraceTask
from eelgrid_controller.replay.openb_protocol import TaskSpecs, TraceArrays, TraceFleet
from eelgrid_controller.replay.site_csv import FAILURES_MOST, FailureRow
from eelgrid_kernels.arrays import Floats, Ints
from eelgrid_kernels.cost_terms import CORES_PER_PACKAGE, CPU_PACKAGE_FULL_W, CPU_PACKAGE_IDLE_W, MILLI_PER_CORE

_STREAM = 4  # after those of the protocol: what is drawn for one purpose changes no other


class ArrivalSchedule(NamedTuple):
    """Every task in order of arrival; tasks of one moment stay in the order of the trace."""

    spec: Ints  # (T,) class of the task
    arrival_s: Floats  # (T,) never falls
    duration_s: Floats  # (T,) infinite for a task that never leaves
    priority: Ints  # (T,) the higher is tried first when tasks wait

    @property
    def begin_s(self) -> float:
        """The first arrival."""
        return float(self.arrival_s[0])

    @property
    def end_s(self) -> float:
        """When the last task would be gone if none ever waited; one that never leaves counts as its arrival."""
        leaving = np.where(np.isfinite(self.duration_s), self.arrival_s + self.duration_s, self.arrival_s)
        return float(leaving.max())


class Outage(NamedTuple):
    """A node is away, by its number."""

    node: int
    down_s: float
    up_s: float  # infinite if it never returns


def build_schedule(trace: TraceArrays, tasks: Sequence[TraceTask]) -> ArrivalSchedule:
    """The tasks of which the trace was built; raises TraceMalformed if one has no arrival."""
    timeless = next((task for task in tasks if task.arrival_s is None), None)
    if timeless is not None:
        remedy = "give a list with times, or take --mode arrivals"
        raise TraceMalformed(f"trace {trace.name}, task {timeless.name}", "has no time of arrival", remedy)
    spec = np.empty(len(tasks), np.int64)
    spec[sorted(range(len(tasks)), key=lambda row: tasks[row].name)] = trace.task_spec
    arrival_s = np.array([task.arrival_s for task in tasks], np.float64)
    duration_s = np.array([math.inf if task.duration_s is None else task.duration_s for task in tasks], np.float64)
    priority = np.array([task.priority for task in tasks], np.int64)
    order = np.argsort(arrival_s, kind="stable")
    return ArrivalSchedule(spec[order], arrival_s[order], duration_s[order], priority[order])


def outages_from_rows(rows: Sequence[FailureRow], nodes: Sequence[TraceNode]) -> tuple[Outage, ...]:
    """Failures by name as failures by number."""
    number = {node.name: index for index, node in enumerate(nodes)}
    return tuple(Outage(number[row.node], row.down_s, math.inf if row.up_s is None else row.up_s) for row in rows)


def draw_outages(
    nodes: int, begin_s: float, end_s: float, *, mtbf_s: float, mttr_s: float, seed: int
) -> tuple[Outage, ...]:
    """Failures that begin between two moments; mtbf_s is the mean time that a node is up, mttr_s that it is down."""
    expected = nodes * (end_s - begin_s) / (mtbf_s + mttr_s)
    if expected > FAILURES_MOST / 2:
        problem = f"means about {expected:.0f} failures, more than this program takes"
        raise TraceTooLarge(f"--mtbf {mtbf_s:g} s", problem, "take a longer time between failures, or fewer nodes")
    bits = np.random.PCG64(np.random.SeedSequence((seed, _STREAM)))

    def exponential_s(mean_s: float) -> float:
        uniform = (float(int(bits.random_raw()) >> 11) + 0.5) * 2.0**-53
        return -mean_s * math.log(uniform)

    found: list[Outage] = []
    for node in range(nodes):
        down_s = begin_s + exponential_s(mtbf_s)
        while down_s < end_s:
            up_s = down_s + exponential_s(mttr_s)
            found.append(Outage(node, down_s, up_s))
            down_s = up_s + exponential_s(mtbf_s)
    return tuple(found)


class TaskQueue:
    """The queue."""

    __slots__ = ("_by_spec", "_count")

    def __init__(self) -> None:
        self._by_spec: dict[int, list[tuple[int, int]]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    @property
    def specs(self) -> tuple[int, ...]:
        """The classes of what waits."""
        return tuple(self._by_spec)

    def push(self, task: int, *, spec: int, priority: int) -> None:
        """Begins to wait; a lower number came earlier."""
        heappush(self._by_spec.setdefault(spec, []), (-priority, task))
        self._count += 1

    def first(self, specs: Iterable[int]) -> tuple[int, int] | None:
        """The class and the task that is next among these classes."""
        heads = ((self._by_spec[spec][0], spec) for spec in specs if spec in self._by_spec)
        best = min(heads, default=None)
        return None if best is None else (best[1], best[0][1])

    def pop(self, spec: int) -> None:
        """The first of the class waits no more."""
        heappop(self._by_spec[spec])
        if not self._by_spec[spec]:
            del self._by_spec[spec]
        self._count -= 1

    def tasks(self) -> tuple[int, ...]:
        """All that wait, in the order of arrival."""
        return tuple(sorted(task for heap in self._by_spec.values() for _, task in heap))


TO_COME, REFUSED, WAITING, RUNNING, FINISHED = range(5)
_LEAVES, _RETURNS, _FAILS = range(3)


class FleetPlacer(Protocol):
    """Who holds the fleet and chooses; eelgrid_kernels.simulation.SimulatedFleet is one."""

    def place_task(self, spec: int, moment: int = 0) -> tuple[int, tuple[int, ...]]:
        """The node and GPUs of a task, or node -1."""

    def release_task(self, node: int, spec: int, slots: Sequence[int]) -> None:
        """Takes a task off its node."""

    def set_available(self, node: int, available: bool) -> None:
        """Whether the node takes tasks."""

    def free_resources(self, node: int) -> tuple[int, int, tuple[int, ...]]:
        """CPU milli, memory MiB, milli of each GPU."""

    @property
    def power_w(self) -> float:
        """Watts of all nodes."""


class SimulationOutcome(NamedTuple):
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


def _ever(trace: TraceArrays) -> NDArray[np.bool_]:
    """(S,) whether some node could hold a task of the class if it were empty."""
    fleet, specs = trace.fleet, trace.specs
    columns = np.column_stack((fleet.cpu_milli, fleet.memory_mib, fleet.gpu_count, fleet.model))
    fits = np.zeros(len(specs.cpu_milli), np.bool_)
    for cpu_milli, memory_mib, gpus, model in np.unique(columns, axis=0):
        fits |= _fitting(specs, cpu_milli, memory_mib, np.full(gpus, 1000), model)
    return fits


def _fitting(specs: TaskSpecs, cpu_milli: int, memory_mib: int, gpus: Ints, model: int) -> NDArray[np.bool_]:
    """(S,) whether what is free on a node holds a task of the class."""
    fits = (specs.cpu_milli <= cpu_milli) & (specs.memory_mib <= memory_mib)
    enough = (gpus[:, None] >= specs.gpu_milli).sum(axis=0) >= specs.gpu_count
    allowed = specs.allows[:, model] != 0 if model >= 0 else np.False_
    return np.asarray(fits & ((specs.gpu_count == 0) | (enough & allowed)))


def empty_node_w(fleet: TraceFleet) -> Floats:
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

    def __init__(self, trace: TraceArrays, schedule: ArrivalSchedule, fleet: FleetPlacer) -> None:
        tasks = len(schedule.spec)
        self.trace, self.schedule, self.fleet, self.empty_w = trace, schedule, fleet, empty_node_w(trace.fleet)
        self.ever, self.demand = _ever(trace), trace.task_milli
        self.spec, self.duration_s = schedule.spec.tolist(), schedule.duration_s.tolist()
        self.queue = TaskQueue()
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
        node, slots = self.fleet.place_task(spec, len(self.decided))
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

    def enqueue_task(self, task: int, now_s: float) -> None:
        self.fate[task], self.since_s[task] = WAITING, now_s
        self.queue.push(task, spec=self.spec[task], priority=int(self.schedule.priority[task]))

    def arrive(self, task: int, now_s: float) -> None:
        if not self.ever[self.spec[task]]:
            self.fate[task] = REFUSED
        elif not self.try_to_place(task, now_s):
            self.enqueue_task(task, now_s)

    def leave(self, task: int) -> int:
        """Takes a task off its node; returns the node."""
        node, spec = self.where[task], self.spec[task]
        self.fleet.release_task(node, spec, self.held[node].pop(task))
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
            self.enqueue_task(task, now_s)
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
                cpu_milli, memory_mib, gpus = self.fleet.free_resources(node)
                model = int(self.trace.fleet.model[node])
                fits |= _fitting(self.trace.specs, cpu_milli, memory_mib, np.array(gpus, np.int64), model)
            specs = specs | {spec for spec in waiting if fits[spec]}
        while (head := self.queue.first(specs)) is not None:
            spec, task = head
            waited_s = now_s - self.since_s[task]
            if self.try_to_place(task, now_s):
                self.queue.pop(spec)
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

    def record_state(self, now_s: float) -> None:
        """The state from this moment on; of several rows of one moment the last counts."""
        if self.rows and self.rows[-1][0] == now_s:
            self.rows.pop()
        away_w = math.fsum(self.empty_w[node] for node in self.away)  # whatever their order
        idle_w, power_w = self.idle_w - away_w, self.fleet.power_w - away_w
        waiting, away = len(self.queue), len(self.away)
        self.rows.append((now_s, power_w, idle_w, self.allocated_milli, waiting, self.running, away))


def simulate_policy(
    trace: TraceArrays, schedule: ArrivalSchedule, fleet: FleetPlacer, outages: Sequence[Outage], end_s: float
) -> SimulationOutcome:
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
    play.record_state(schedule.begin_s)
    while True:
        next_s = arrival_s[coming] if coming < len(arrival_s) else math.inf
        now_s = min(next_s, play.events[0][0]) if play.events else next_s
        if now_s > end_s or math.isinf(now_s):
            break
        play.happen(now_s)
        while coming < len(arrival_s) and arrival_s[coming] == now_s:
            play.arrive(coming, now_s)
            coming += 1
        play.record_state(now_s)
    return _outcome(play, end_s)


def _outcome(play: _Play, end_s: float) -> SimulationOutcome:
    for task in play.queue.tasks():
        play.waited_s[task] += end_s - play.since_s[task]
    moments, tasks, nodes = zip(*play.decided, strict=True) if play.decided else ((), (), ())
    time_s, power_w, idle_w, allocated, waiting, running, away = zip(*play.rows, strict=True)
    return SimulationOutcome(
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
