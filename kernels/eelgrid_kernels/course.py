"""One policy over a whole course of arrivals on an empty fleet: the arrays that eelgrid_kernels.best works on.

Owns how plain columns become those arrays: kinds, shapes, the typical mix, the
idle watts. Must not know policies beyond their number, files or names.
Everything is copied, so that a run changes nothing of its caller's.
"""
# ruff: noqa: PLR0917 (the columns of a run come one by one, as kernels take them)

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from eelgrid_kernels.arrays import Floats, Ints, Mix
from eelgrid_kernels.best import advance
from eelgrid_kernels.build import bits, build, expect, kinds_of, shapes_of
from eelgrid_kernels.packages import CPU_PACKAGE_IDLE_W, PACKAGE_W, active_packages
from eelgrid_kernels.peer_arrays import Course, Run
from eelgrid_kernels.states import settle

__all__ = ["FleetColumns", "SpecColumns", "empty_course", "prepare", "run"]


class SpecColumns(Protocol):
    """What tasks ask for, by spec; CPU milli, MiB, GPUs, milli of each, 1 where the model may be used."""

    @property
    def cpu_milli(self) -> Ints: ...  # noqa: D102 (S,)
    @property
    def memory_mib(self) -> Ints: ...  # noqa: D102 (S,)
    @property
    def gpu_count(self) -> Ints: ...  # noqa: D102 (S,)
    @property
    def gpu_milli(self) -> Ints: ...  # noqa: D102 (S,)
    @property
    def allows(self) -> Ints: ...  # noqa: D102 (S, M)


class FleetColumns(Protocol):
    """What nodes have when empty; the model is -1 without GPU, the watts are of one GPU."""

    @property
    def cpu_milli(self) -> Ints: ...  # noqa: D102 (N,)
    @property
    def memory_mib(self) -> Ints: ...  # noqa: D102 (N,)
    @property
    def gpu_count(self) -> Ints: ...  # noqa: D102 (N,)
    @property
    def model(self) -> Ints: ...  # noqa: D102 (N,)
    @property
    def idle_w(self) -> Floats: ...  # noqa: D102 (N,)
    @property
    def busy_w(self) -> Floats: ...  # noqa: D102 (N,)


def _ints(values: NDArray[Any]) -> Ints:
    return np.array(values, np.int64, order="C")


def _kinds(specs: SpecColumns) -> Ints:
    models = np.array([bits(row) for row in specs.allows], np.int64)
    return kinds_of(specs.cpu_milli, specs.memory_mib, specs.gpu_count, specs.gpu_milli, models)


def _shapes(fleet: FleetColumns) -> tuple[tuple[Ints, Floats], list[int], Ints]:
    """The shapes, the families that they are of, and the shape of each node."""
    columns = (fleet.cpu_milli, fleet.gpu_count, fleet.model, fleet.idle_w, fleet.busy_w)
    rows, of_node = np.unique(np.column_stack(columns), axis=0, return_inverse=True)
    there = np.arange(max(1, int(np.max(fleet.gpu_count)))) < rows[:, 1, None]
    table, families = shapes_of(_ints(rows[:, 0]), _ints(np.where(there, rows[:, 2, None], -1)))
    added_w = np.where(there, (rows[:, 4] - rows[:, 3])[:, None], 0.0)
    return (table, added_w), families, _ints(of_node.reshape(-1))


def _mix(specs: SpecColumns, typical: tuple[Ints, Ints]) -> Mix:
    chosen, weight = typical
    return Mix(
        cpu_milli=_ints(specs.cpu_milli[chosen]),
        gpu_count=_ints(specs.gpu_count[chosen]),
        gpu_milli=_ints(specs.gpu_milli[chosen]),
        allows=_ints(specs.allows[chosen].T),
        weight=_ints(weight),
        total=max(1, int(np.sum(weight))),
    )


def _idle_w(fleet: FleetColumns) -> float:
    idle_w = float(np.sum(fleet.gpu_count * fleet.idle_w))
    for cpu_milli in fleet.cpu_milli.tolist():  # the half core of an odd vCPU counts as working, even on an empty node
        idle_w += CPU_PACKAGE_IDLE_W * active_packages(cpu_milli, 0) + PACKAGE_W * active_packages(cpu_milli, cpu_milli)
    return idle_w


def prepare(
    fleet: FleetColumns, specs: SpecColumns, typical: tuple[Ints, Ints], rank: Ints, policy: int, weights: Floats
) -> Run:
    """The empty fleet under a policy; weights are (PWR, FGD) of MIX and the three of EELGRID, others take none."""
    shapes, families, of_node = _shapes(fleet)
    expected = expect(_mix(specs, typical), families)
    nodes = (of_node, _ints(rank), _ints(fleet.memory_mib))
    scene = build(shapes, _kinds(specs), expected, nodes, policy, weights)
    scene.power_w[0] = _idle_w(fleet)
    settle(scene, np.arange(len(of_node)))
    return scene


def empty_course(arrivals: int) -> Course:
    """Room for what becomes of that many arrivals."""
    sums = [np.zeros(arrivals, np.int64) for _ in range(3)]
    return Course(np.zeros(arrivals, np.bool_), np.zeros(arrivals), *sums)


def run(
    fleet: FleetColumns,
    specs: SpecColumns,
    typical: tuple[Ints, Ints],
    arrivals: Ints,
    rank: Ints,
    policy: int,
    weights: Floats,
) -> Course:
    """Every arrival under a policy, one after the other; none of them ever leaves."""
    scene = prepare(fleet, specs, typical, rank, policy, weights)
    course = empty_course(len(arrivals))
    advance(scene, _ints(arrivals), course, 0, len(arrivals))
    return course
