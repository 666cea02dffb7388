"""Engine reports: external usage of nodes, running replicas to adopt, eligibility rules and scaling overrides.

Owns the values that an engine hands to the controller. Must not know which engine that is, nor what Eelgrid
placed there itself.

Theory. An engine runs more than what it asks Eelgrid to place: system pods, work that did not opt in, another
scheduler's jobs. The planner needs to know how much of a node is left, not who uses it. Which GPUs are used
externally is often unknown (a kubelet chooses them), only how many; where a plan names them, nothing else is
counted for them. Until an engine has reported what runs on a node, nothing is placed there
(UNREPORTED_USAGE). What an engine demands of a node besides amounts (labels, taints, features) comes as traits:
names that the engine gives to each set of demands, reported for every node that meets it; a workload requires
some of them. Where an answer depends on what else is placed, or there are too many sets of demands, the engine
is asked at the moment of the decision instead (`EligibilityRules`). EngineOverrides are of this moment and in no
journal: the engine reports them
again after a restart.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, NamedTuple, Protocol

from eelgrid_protos.messages import ResourceRequest, Workload
from eelgrid_protos.messages.reading import GPUS_PER_NODE_MOST
from eelgrid_protos.quantities import Bytes, Count, CpuMilli, Label, Many, Sentence


@dataclass(frozen=True, slots=True, kw_only=True)
class ExternalUsage:
    """Amounts that others hold, the node's traits, and why nothing new may come; empty where it may."""

    cpu_milli: CpuMilli = 0
    memory_bytes: Bytes = 0
    gpu_count: Count = 0
    # Of these GPUs those that are known, by index; which the others are is a guess.
    gpu_indexes: Annotated[tuple[Count, ...], Many(GPUS_PER_NODE_MOST)] = ()
    traits: Annotated[tuple[Label, ...], Many(256)] = ()
    closed: Sentence = ""

    def frees_capacity_since(self, before: "ExternalUsage") -> bool:
        """Whether work that waits could begin on account of this."""
        return (
            self.cpu_milli < before.cpu_milli
            or self.memory_bytes < before.memory_bytes
            or self.gpu_count < before.gpu_count
            or not set(self.traits) <= set(before.traits)
            or (before.closed != "" and self.closed == "")
        )

    def add(self, amounts: "ExternalUsage | ResourceRequest") -> "ExternalUsage":
        """These and the amounts of others, or of one replica."""
        return self._shift(amounts, 1)

    def subtract(self, amounts: "ExternalUsage | ResourceRequest") -> "ExternalUsage":
        """These without them; never less than nothing."""
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
# Of a node that has joined: an engine runs work there, and has not said yet what stands on it.
UNREPORTED_USAGE = ExternalUsage(closed="what stands on the node is not reported yet")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningReplica:
    """One replica where it stands. `counted` is what it is among others' amounts there."""

    node_name: str
    gpu_indexes: tuple[int, ...] = ()
    is_exact: bool = False  # these devices and no others
    counted: ExternalUsage = NO_EXTERNAL_USAGE


@dataclass(frozen=True, slots=True, kw_only=True)
class Adoption:
    """A workload stands at these places, too, and no more at those that are released, by number.

    `first` is the number of the first that is new: 0 for a workload that is not known yet, for another the first after
    all that it has. Whoever says so again, or has not seen what became of the workload since, changes nothing.
    """

    standing: tuple[RunningReplica, ...] = ()
    first: int = 0
    released: tuple[int, ...] = ()
    in_parts: bool = False  # what cannot be held is left out, and does not keep the rest

    def frees_capacity(self, request: ResourceRequest) -> bool:
        """Whether more becomes free than is held, so that what waits could begin."""
        return bool(self.released) or any(
            one.counted.cpu_milli > request.cpu_milli
            or one.counted.memory_bytes > request.memory_bytes
            or one.counted.gpu_count > request.gpu_count
            for one in self.standing
        )


class EligibilityRules(Protocol):
    """An engine's own rules, asked while a decision is made; each answer is of this moment."""

    def has_rules_for(self, workload_id: str) -> bool:
        """Whether the engine is to be asked about a workload; its traits say nothing then."""

    def list_eligible_nodes(
        self, workload_id: str, placed: Mapping[int, str], workloads: Mapping[str, Workload]
    ) -> frozenset[str]:
        """Nodes that the next replica may go to, room apart, once those before it are `placed` by number.

        `workloads` are all that the core knows, with what it decided a moment ago.
        """

    def list_equivalent_nodes(self, workload_id: str, node_name: str) -> frozenset[str]:
        """Nodes that bind the replicas after the first to the same places as this one does."""


class Eligibility:
    """Where an engine leaves its rules for the core; None where there is no engine, or it is not ready yet."""

    def __init__(self) -> None:
        self.rules: EligibilityRules | None = None


class ReplicaBounds(NamedTuple):
    """The fewest and the most replicas that the steering may ask for."""

    least: int
    most: int


@dataclass(slots=True)
class EngineOverrides:
    """Each mapping is replaced entry by entry, from the event loop alone."""

    advised: dict[str, str] = field(default_factory=dict)  # workloads that are not scaled now, and why
    bounds: dict[str, ReplicaBounds] = field(default_factory=dict)  # narrower than the promise's
    pages: dict[str, Mapping[int, str]] = field(default_factory=dict)  # where each replica's metrics are
    grown: dict[str, frozenset[int]] = field(default_factory=dict)  # replicas that served before they were told of

    def forget_workload(self, workload_id: str) -> None:
        """A workload that is no more."""
        for words in (self.advised, self.bounds, self.pages, self.grown):
            words.pop(workload_id, None)
