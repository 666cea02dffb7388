"""Who comes when and stays how long, and when nodes are away: what a simulation is fed, as arrays.

Owns these arrays and the draw of failures from a seed. Must not know policies,
files or what comes of it.

Theory: all moments are seconds of one clock, the trace's; the first arrival is
the beginning. Failures of a node are an alternating renewal process with
exponential times, drawn for each node after the other from the raw words of
PCG64, which numpy keeps the same in every version.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from eelgrid_controller.replay.csv_lines import TraceMalformed, TraceTooLarge
from eelgrid_controller.replay.openb import NodeRow, TaskRow
from eelgrid_controller.replay.protocol import Trace
from eelgrid_controller.replay.site_csv import FAILURES_MOST, FailureRow
from eelgrid_kernels.arrays import Floats, Ints

__all__ = ["Outage", "Schedule", "drawn_outages", "outages_of", "schedule"]

_STREAM = 4  # after those of the protocol: what is drawn for one purpose changes no other


class Schedule(NamedTuple):
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


def schedule(trace: Trace, tasks: Sequence[TaskRow]) -> Schedule:
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
    return Schedule(spec[order], arrival_s[order], duration_s[order], priority[order])


def outages_of(rows: Sequence[FailureRow], nodes: Sequence[NodeRow]) -> tuple[Outage, ...]:
    """Failures by name as failures by number."""
    number = {node.name: index for index, node in enumerate(nodes)}
    return tuple(Outage(number[row.node], row.down_s, math.inf if row.up_s is None else row.up_s) for row in rows)


def drawn_outages(
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
