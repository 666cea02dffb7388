"""Queues: quotas, borrowing and lending limits, weights, and what uses them; mirrored by queue.proto."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

from eelgrid_protos.errors import Violation
from eelgrid_protos.quantities import Label, Many, Name, Range, RequiredLabel, Uint32, Uint64

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Queue:
    """A queue in a tree; only queues without others below them hold work."""

    name: Name
    parent: Label = ""
    weight: QueueWeight = 1.0
    quotas: Annotated[tuple[QueueQuota, ...], Many(_QUOTAS_MOST)] = ()
    users: Annotated[tuple[RequiredLabel, ...], Many(_NAMES_MOST)] = ()
    namespaces: Annotated[tuple[RequiredLabel, ...], Many(_NAMES_MOST)] = ()

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
