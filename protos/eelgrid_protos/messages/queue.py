"""Queues: quotas, limits, weights and what uses them; backfill and reservations; mirrored by queue.proto."""

from collections.abc import Iterator
from typing import Annotated

from eelgrid_protos.errors import Violation
from eelgrid_protos.quantities import (
    Label,
    Many,
    Name,
    Nanoseconds,
    OpenEnum,
    Range,
    RequiredLabel,
    Sentence,
    Uint32,
    Uint64,
)
from eelgrid_protos.values import dataclass

QUEUES_MOST = 10_000
QUEUE_DEPTH_MOST = 16
# The queue of work that names none, where it is declared.
DEFAULT_QUEUE = "default"
QUEUE_RESOURCES = ("gpu", "cpu", "memory")
# Before the name of a GPU model.
MODEL_PREFIX = "gpu/"
# Counted where a queue of the tree has a quota of it.
POWER_RESOURCE = "power"

_QUOTAS_MOST = 64
_NAMES_MOST = 1000
# 2^53: every amount is exact in a float, too. A thousand clusters of a million GPUs, or 8 PiB.
QueueAmount = Annotated[int, Range(0, 2**53)]
QueueWeight = Annotated[float, Range(1e-6, 1e6)]
Share = Annotated[float, Range(0.0, 1e18)]


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueQuota:
    """What a queue may use of a resource: GPUs and CPUs in thousandths, memory in bytes, power in milliwatts.

    None is no limit.
    """

    resource: Name
    nominal: QueueAmount = 0
    borrowing_limit: QueueAmount | None = None
    lending_limit: QueueAmount | None = None
    usage_limit: QueueAmount | None = None

    def violations(self) -> Iterator[Violation]:
        """Checks that the resource is known."""
        is_model = self.resource.removeprefix(MODEL_PREFIX) < self.resource
        if self.resource not in (*QUEUE_RESOURCES, POWER_RESOURCE) and not is_model:
            known = ", ".join((*QUEUE_RESOURCES, POWER_RESOURCE, f"{MODEL_PREFIX}MODEL"))
            yield Violation("resource", f"is {self.resource!r}", f"use one of {known}")


class PreemptionWithin(OpenEnum):
    """Whom waiting work of a queue may preempt in the same queue; unspecified is nobody."""

    UNSPECIFIED = 0
    LOWER_PRIORITY = 1


class PreemptionReclaim(OpenEnum):
    """When waiting work of a queue may preempt work of queues that borrow; unspecified is never."""

    UNSPECIFIED = 0
    NOMINAL = 1
    FAIR_SHARE = 2
    PAST_USE = 3


class PreemptionVictims(OpenEnum):
    """Which running work of a queue may be preempted; unspecified is processes and jobs that are not fixed."""

    UNSPECIFIED = 0
    NONE = 1
    ALL = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuePreemption:
    """What waiting work of a queue may preempt, and what protects its running work.

    `horizon_s` is for reclaim by past use; 0 is a sixteenth of the half-life. Its work waits `delay_s` after its
    submission before others make room for it; what is free it takes at once.
    """

    within: PreemptionWithin = PreemptionWithin.UNSPECIFIED
    reclaim: PreemptionReclaim = PreemptionReclaim.UNSPECIFIED
    victims: PreemptionVictims = PreemptionVictims.UNSPECIFIED
    min_runtime_s: Annotated[float, Range(0.0, 3e7, "s")] = 0.0
    horizon_s: Annotated[float, Range(0.0, 3e7, "s")] = 0.0
    delay_s: Annotated[float, Range(0.0, 3e7, "s")] = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Queue:
    """A queue in a tree; only queues without others below them hold work."""

    name: Name
    parent: Label = ""
    weight: QueueWeight = 1.0
    quotas: Annotated[tuple[QueueQuota, ...], Many(_QUOTAS_MOST)] = ()
    users: Annotated[tuple[RequiredLabel, ...], Many(_NAMES_MOST)] = ()
    namespaces: Annotated[tuple[RequiredLabel, ...], Many(_NAMES_MOST)] = ()
    preemption: QueuePreemption | None = None

    def violations(self) -> Iterator[Violation]:
        """Checks that each resource has one quota."""
        if len({quota.resource for quota in self.quotas}) < len(self.quotas):
            yield Violation("quotas", "name one resource twice", "give each resource one quota")


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueUsage:
    """The use of one resource by a queue and the queues below it."""

    resource: Name
    quota: Uint64
    used: Uint64
    borrowed: Uint64 = 0
    lent: Uint64 = 0
    usage_most: Uint64 | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueStatus:
    """A queue with what uses it and what waits in it."""

    queue: Queue
    usage: Annotated[tuple[QueueUsage, ...], Many(_QUOTAS_MOST + len(QUEUE_RESOURCES))] = ()
    weighted_share: Share = 0.0
    weighted_usage: Share = 0.0
    running: Uint32 = 0
    waiting: Uint32 = 0


RESERVATIONS_MOST = 256
_RESERVED_NODES_MOST = 10_000


class BackfillMode(OpenEnum):
    """Which pending work gets a reservation in time; unspecified is easy by stated run times only."""

    UNSPECIFIED = 0
    NONE = 1
    EASY = 2
    CONSERVATIVE = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Reservation:
    """Nodes, or all of a pool, that are held from `start_ns` to `end_ns` for some work, or for maintenance."""

    name: Name
    node_names: Annotated[tuple[Name, ...], Many(_RESERVED_NODES_MOST)] = ()
    pool: Label = ""
    start_ns: Nanoseconds
    end_ns: Nanoseconds
    users: Annotated[tuple[RequiredLabel, ...], Many(_NAMES_MOST)] = ()
    queue: Label = ""
    maintenance: bool = False
    # How many GPUs, of which models: nodes that have them are chosen when the policy is changed.
    gpus: Uint32 = 0
    gpu_models: Annotated[tuple[RequiredLabel, ...], Many(_NAMES_MOST)] = ()
    # How many of these it lacks, and why its nodes were last chosen again.
    lacking_gpus: Uint32 = 0
    change_cause: Sentence = ""

    def violations(self) -> Iterator[Violation]:
        """Checks that it ends after its start, names nodes, a pool or GPUs, and no users for maintenance."""
        if self.end_ns <= self.start_ns:
            yield Violation("end_ns", "is not after start_ns", "let it end after it starts")
        if self.gpus and self.pool:
            yield Violation("gpus", "are set beside pool", "reserve a number of GPUs, or one pool")
        if self.gpu_models and not self.gpus:
            yield Violation("gpu_models", "are set without gpus", "set gpus, or leave them out")
        if not self.gpus and bool(self.node_names) == bool(self.pool):
            yield Violation("node_names", "are not the only choice beside pool", "name nodes, or one pool")
        if self.maintenance and (self.users or self.queue):
            yield Violation("users", "or a queue are set for maintenance", "leave them out: nothing starts then")
