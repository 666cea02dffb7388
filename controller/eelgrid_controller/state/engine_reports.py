"""Engine reports: external usage of nodes, running replicas to adopt, eligibility rules and scaling overrides.

Owns the values that an engine hands to the controller. Must not know which engine that is, nor what Eelgrid placed
there itself.

Theory. An engine runs more than what it asks Eelgrid to place: system pods, work that did not opt in, another
scheduler's jobs. The planner needs to know how much of a node is left, not who uses it. Often only the number of
externally used GPUs is known, not which they are (a kubelet chooses them); where a plan names them, nothing else is
counted for them. Until an engine has reported what runs on a node, nothing is placed there (UNREPORTED_USAGE). What
an engine demands of a node besides amounts (labels, taints, features) comes as traits: names that the engine gives to
each set of demands, reported for every node that meets it; a workload requires some of them. Where an answer depends
on what else is placed, or there are too many sets of demands, the engine is asked at the moment of the decision
instead (`EligibilityRules`). EngineOverrides hold for the moment and are in no journal: the engine reports them again
after a restart.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, NamedTuple, Protocol

from eelgrid_protos.messages import ResourceRequest, Workload
from eelgrid_protos.messages.reading import GPUS_PER_NODE_MOST
from eelgrid_protos.quantities import Bytes, Count, CpuMilli, Label, Many, Sentence


@dataclass(frozen=True, slots=True, kw_only=True)
class ExternalUsage:
    """What work outside Eelgrid uses on a node, the node's traits, and why it accepts no new work (empty if it does)."""

    cpu_milli: CpuMilli = 0
    memory_bytes: Bytes = 0
    gpu_count: Count = 0
    # Indexes of the GPUs that are known to be among these; the others are a guess.
    gpu_indexes: Annotated[tuple[Count, ...], Many(GPUS_PER_NODE_MOST)] = ()
    traits: Annotated[tuple[Label, ...], Many(256)] = ()
    closed: Sentence = ""

    def frees_capacity_since(self, before: "ExternalUsage") -> bool:
        """Returns whether pending work could start because of this change."""
        return (
            self.cpu_milli < before.cpu_milli
            or self.memory_bytes < before.memory_bytes
            or self.gpu_count < before.gpu_count
            or not set(self.traits) <= set(before.traits)
            or (before.closed != "" and self.closed == "")
        )

    def add(self, amounts: "ExternalUsage | ResourceRequest") -> "ExternalUsage":
        """Adds other amounts, or those of one replica."""
        return self._shift(amounts, 1)

    def subtract(self, amounts: "ExternalUsage | ResourceRequest") -> "ExternalUsage":
        """Subtracts amounts; never below zero."""
        return self._shift(amounts, -1)

    def _shift(self, amounts: "ExternalUsage | ResourceRequest", sign: int) -> "ExternalUsage":
        named = set(amounts.gpu_indexes) if isinstance(amounts, ExternalUsage) else set[int]()
        indexes = named.union(self.gpu_indexes) if sign > 0 else set(self.gpu_indexes) - named
        return replace(
            self,
            gpu_indexes=tuple(sorted(indexes)),
            cpu_milli=max(0, self.cpu_milli + sign * amounts.cpu_milli),
            memory_bytes=max(0, self.memory_bytes + sign * amounts.memory_bytes),
            gpu_count=max(0, self.gpu_count + sign * amounts.gpu_count),
        )


NO_EXTERNAL_USAGE = ExternalUsage()
# Why an engine's own cordon closes a node; it may follow an operator's cordon here.
CORDONED_BY_ENGINE = "the node is cordoned"
# Of a node that has just joined: an engine runs work there and has not reported it yet.
UNREPORTED_USAGE = ExternalUsage(closed="what stands on the node is not reported yet")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningReplica:
    """One running replica. `counted` is its share of the external usage of its node."""

    node_name: str
    gpu_indexes: tuple[int, ...] = ()
    is_exact: bool = False  # allocate exactly these devices
    counted: ExternalUsage = NO_EXTERNAL_USAGE


@dataclass(frozen=True, slots=True, kw_only=True)
class Adoption:
    """Replicas of a workload that an engine runs, and the numbers of those that it has released.

    `first` is the number of the first new replica: 0 for an unknown workload, otherwise the one after all that the
    workload has. A report that is repeated, or that is based on an outdated workload, changes nothing.
    """

    standing: tuple[RunningReplica, ...] = ()
    first: int = 0
    released: tuple[int, ...] = ()
    in_parts: bool = False  # replicas that cannot be allocated are left out instead of refusing all
    begins_pending: bool = False  # work of this id that waits has begun: all its replicas, from 0 on

    def frees_capacity(self, request: ResourceRequest) -> bool:
        """Returns whether the adoption frees capacity, so that pending work could start."""
        return bool(self.released) or any(
            one.counted.cpu_milli > request.cpu_milli
            or one.counted.memory_bytes > request.memory_bytes
            or one.counted.gpu_count > request.gpu_count
            for one in self.standing
        )


class EligibilityRules(Protocol):
    """Eligibility rules of an engine, evaluated during a decision."""

    @property
    def follows_specs(self) -> bool:
        """Whether the rules say the same of all workloads with equal specs, so that what keeps one keeps the others."""

    def has_rules_for(self, workload_id: str) -> bool:
        """Returns whether the engine's rules apply to a workload instead of its traits."""

    def list_eligible_nodes(
        self, workload_id: str, placed: Mapping[int, str], workloads: Mapping[str, Workload]
    ) -> frozenset[str]:
        """Returns the nodes that the next replica may use, regardless of capacity, after those `placed` by number.

        `workloads` are all workloads of the core, including its most recent decisions.
        """

    def list_equivalent_nodes(self, workload_id: str, node_name: str) -> frozenset[str]:
        """Returns the nodes that restrict the following replicas in the same way as this one."""


class Eligibility:
    """Holds the rules of an engine; None if there is no engine, or it is not ready."""

    def __init__(self) -> None:
        self.rules: EligibilityRules | None = None


class ReplicaBounds(NamedTuple):
    """The minimum and maximum number of replicas that the objectives loop may request."""

    least: int
    most: int


@dataclass(slots=True)
class EngineOverrides:
    """Settings of engines that override the policy; changed from the event loop only."""

    advised: dict[str, str] = field(default_factory=dict)  # workloads that are currently not scaled, and why
    bounds: dict[str, ReplicaBounds] = field(default_factory=dict)  # narrower than the objective's
    pages: dict[str, Mapping[int, str]] = field(default_factory=dict)  # URL of each replica's metrics
    grown: dict[str, frozenset[int]] = field(default_factory=dict)  # replicas that served before they were reported
    serving: dict[str, int] = field(
        default_factory=dict
    )  # how many replicas serve, where pages are not theirs one by one
    # How the ids of engines' work begin, which is theirs to submit: by an id of it a job of theirs would be found here.
    own_ids: set[str] = field(default_factory=set)

    def forget_workload(self, workload_id: str) -> None:
        """Removes the settings of a workload that ended."""
        for words in (self.advised, self.bounds, self.pages, self.grown, self.serving):
            words.pop(workload_id, None)
