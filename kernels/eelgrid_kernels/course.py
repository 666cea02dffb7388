"""One policy over a whole course of arrivals on an empty fleet: the arrays that eelgrid_kernels.peers works on.

Owns how plain columns become those arrays: kinds, shapes, the typical mix, the
idle watts. Must not know policies beyond their number, files or names.
Everything is copied, so that a run changes nothing of its caller's.
"""
# ruff: noqa: PLR0917 (the columns of a run come one by one, as kernels take them)

from typing import Protocol

import numpy as np

from eelgrid_kernels.arrays import Floats, Ints, Mix
from eelgrid_kernels.peer_arrays import Capacity, Course, Kinds, Members, Run, Scores, States
from eelgrid_kernels.peers import BEST_FIT, GPU_CLUSTERING, MIX, advance
from eelgrid_kernels.states import PACKAGE_W, WHOLE, active_packages, settle

__all__ = ["FleetColumns", "SpecColumns", "empty_course", "prepare", "run"]

PACKAGE_IDLE_W = 15.0
_TAGS_MOST = 62


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


def _ints(values: Ints) -> Ints:
    return np.array(values, np.int64, order="C")


def _kinds(specs: SpecColumns) -> Kinds:
    columns = (specs.cpu_milli, specs.gpu_count, specs.gpu_milli)
    table = np.column_stack((*columns, specs.allows)).astype(np.int64)
    rows, of_spec = np.unique(table, axis=0, return_inverse=True)
    return Kinds(
        cpu_milli=_ints(rows[:, 0]),
        gpu_count=_ints(rows[:, 1]),
        gpu_milli=_ints(rows[:, 2]),
        allows=_ints(rows[:, 3:]),
        tag=_tags(rows[:, 1], rows[:, 2]),
        of_spec=_ints(of_spec.reshape(-1)),
        memory_mib=_ints(specs.memory_mib),
    )


def _tags(gpu_count: Ints, gpu_milli: Ints) -> Ints:
    """Shares of a GPU are one kind of GPU task, so many whole GPUs one each; the rarest widths share the last tag."""
    width = np.where((gpu_count == 1) & (gpu_milli < WHOLE), 0, gpu_count)
    tags = np.unique(width[gpu_count > 0], return_inverse=True)[1].reshape(-1)
    every = np.full(len(gpu_count), -1, np.int64)
    every[gpu_count > 0] = np.minimum(tags, _TAGS_MOST - 1)
    return every


def _capacity(fleet: FleetColumns, rank: Ints) -> Capacity:
    columns = (fleet.cpu_milli, fleet.gpu_count, fleet.model, fleet.idle_w, fleet.busy_w)
    shape = np.unique(np.column_stack(columns), axis=0, return_inverse=True)[1]
    return Capacity(
        cpu_milli=_ints(fleet.cpu_milli),
        gpu_count=_ints(fleet.gpu_count),
        model=_ints(fleet.model),
        idle_w=np.array(fleet.idle_w, np.float64),
        busy_w=np.array(fleet.busy_w, np.float64),
        rank=_ints(rank),
        shape=_ints(shape.reshape(-1)),
    )


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


def _members(fleet: FleetColumns, kinds: Kinds, tagged: bool) -> Members:
    nodes = len(fleet.cpu_milli)
    held = np.zeros((nodes, 1 + int(kinds.tag.max(initial=-1))) if tagged else (0, 0), np.int64)
    return Members(np.full(nodes, -1, np.int64), np.full(nodes, -1, np.int64), _ints(fleet.memory_mib), held)


def _states(nodes: int, slots: int, classes: int) -> States:
    def empty(*shape: int) -> Ints:
        return np.zeros(shape, np.int64)

    buckets = 1 << (2 * nodes).bit_length()
    return States(
        head=np.full(nodes, -1, np.int64),
        version=empty(nodes),
        cpu_free=empty(nodes),
        gpu_free=empty(nodes, slots),
        gpu_total=empty(nodes),
        tags=empty(nodes),
        closed=empty(nodes),
        usable=empty(nodes, classes),
        waste=empty(nodes, classes),
        fragments=empty(nodes),
        chain=np.full(nodes, -1, np.int64),
        bucket=np.full(buckets, -1, np.int64),
        spare=empty(nodes),
        counts=empty(2),
    )


def _scores(kinds: int, nodes: int) -> Scores:
    shape = (kinds, nodes)
    return Scores(np.zeros(shape, np.int64), np.zeros(shape), np.zeros(shape), np.zeros(shape, np.int64))


def prepare(
    fleet: FleetColumns, specs: SpecColumns, typical: tuple[Ints, Ints], rank: Ints, policy: int, weights: Floats
) -> Run:
    """The empty fleet under a policy; weights are (PWR, FGD) of MIX and the three of EELGRID, others take none."""
    nodes = len(rank)
    slots = max(1, int(np.max(fleet.gpu_count)))
    capacity, kinds, mix = _capacity(fleet, rank), _kinds(specs), _mix(specs, typical)
    idle_w = np.sum(capacity.gpu_count * capacity.idle_w)
    for cpu_milli in capacity.cpu_milli:  # the half core of an odd vCPU counts as working, even on an empty node
        idle_w += PACKAGE_IDLE_W * active_packages(cpu_milli, 0) + PACKAGE_W * active_packages(cpu_milli, cpu_milli)
    given = np.zeros(3)
    given[: len(weights)] = weights
    seed = 0
    for place in rank:  # the only draw that a run is given: RANDOM's go by it
        seed = (seed * 1_000_003 + int(place) + 1) % (1 << 32)
    scene = Run(
        capacity=capacity,
        kinds=kinds,
        mix=mix,
        members=_members(fleet, kinds, policy == GPU_CLUSTERING),
        states=_states(nodes, slots, len(mix.weight)),
        scores=_scores(len(kinds.cpu_milli), nodes),
        fitting=np.zeros((2, nodes), np.int64),
        gpu=np.zeros(slots, np.int64),
        kept=np.zeros(slots, np.int64),
        taken=np.full(slots, -1, np.int64),
        power_w=np.array([idle_w], np.float64),
        policy=policy,
        tagged=policy == GPU_CLUSTERING,
        weights=given,
        blend=_blend(policy, given),
        seed=seed,
    )
    settle(scene, _ints(np.argsort(-capacity.rank, kind="stable")))
    return scene


def _blend(policy: int, weights: Floats) -> Floats:
    if policy == MIX:
        return np.array([weights[0], weights[1]])
    return np.array([1.0, 0.0] if policy == BEST_FIT else [0.0, 1.0])


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
