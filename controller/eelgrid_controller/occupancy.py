"""What stands on nodes without our word: what others hold, and what is to be taken over, as an engine tells.

Owns the values. Must not know which engine that is, nor what Eelgrid placed there itself.

Theory. An engine runs more than what it asks Eelgrid to place: system pods, work that did not
opt in, another scheduler's jobs. The planner needs to know how much of a node is left, not by
whom it is held. Which GPUs others hold is often not known (a kubelet chooses them), only how
many; where a plan says which, they are named, and nothing else is taken for them. Until an engine
has reported what stands on a node, nothing is placed there (UNREPORTED). What an engine demands of a node besides amounts (labels, taints, features, partitions)
comes as traits: names that the engine gives to each set of demands, told of every node that
meets it; a workload requires some of them. So the rules of an engine stay with that engine.
Where an answer depends on what else is placed, or there are more sets of demands than a node can
be told traits of, the engine is asked at the moment of the decision instead (`EligibilityRules`).
Work that runs and is to be Eelgrid's is said to stand somewhere, replica by replica, with what
it is among these amounts; adoption.py of the core judges it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Protocol

from eelgrid_protos.messages import ResourceRequest, Workload
from eelgrid_protos.messages.reading import GPUS_PER_NODE_MOST
from eelgrid_protos.quantities import Bytes, Count, CpuMilli, Label, Many, Sentence

__all__ = ["NOBODY", "UNREPORTED", "Adoption", "Eligibility", "EligibilityRules", "Others", "Standing"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Others:
    """Amounts that others hold, the node's traits, and why nothing new may come; empty where it may."""

    cpu_milli: CpuMilli = 0
    memory_bytes: Bytes = 0
    gpu_count: Count = 0
    # Of these GPUs those that are known, by index; which the others are is a guess.
    gpu_indexes: Annotated[tuple[Count, ...], Many(GPUS_PER_NODE_MOST)] = ()
    traits: Annotated[tuple[Label, ...], Many(256)] = ()
    closed: Sentence = ""

    def leaves_more_than(self, before: "Others") -> bool:
        """Whether work that waits could begin on account of this."""
        return (
            self.cpu_milli < before.cpu_milli
            or self.memory_bytes < before.memory_bytes
            or self.gpu_count < before.gpu_count
            or not set(self.traits) <= set(before.traits)
            or (before.closed != "" and self.closed == "")
        )

    def more(self, amounts: "Others | ResourceRequest") -> "Others":
        """These and the amounts of others, or of one replica."""
        return self._shifted(amounts, 1)

    def less(self, amounts: "Others | ResourceRequest") -> "Others":
        """These without them; never less than nothing."""
        return self._shifted(amounts, -1)

    def _shifted(self, amounts: "Others | ResourceRequest", sign: int) -> "Others":
        named = set(amounts.gpu_indexes) if isinstance(amounts, Others) else set[int]()
        indexes = named.union(self.gpu_indexes) if sign > 0 else set(self.gpu_indexes) - named
        return replace(
            self,
            gpu_indexes=tuple(sorted(indexes)),
            cpu_milli=max(0, self.cpu_milli + sign * amounts.cpu_milli),
            memory_bytes=max(0, self.memory_bytes + sign * amounts.memory_bytes),
            gpu_count=max(0, self.gpu_count + sign * amounts.gpu_count),
        )


NOBODY = Others()
# Of a node that has joined: an engine runs work there, and has not said yet what stands on it.
UNREPORTED = Others(closed="what stands on the node is not reported yet")


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """One replica where it stands. `counted` is what it is among others' amounts there."""

    node_name: str
    gpu_indexes: tuple[int, ...] = ()
    is_exact: bool = False  # these devices and no others
    counted: Others = NOBODY


@dataclass(frozen=True, slots=True, kw_only=True)
class Adoption:
    """A workload stands at these places, too, and no more at those that are released, by number.

    `first` is the number of the first that is new: 0 for a workload that is not known yet, for another the first after
    all that it has. Whoever says so again, or has not seen what became of the workload since, changes nothing.
    """

    standing: tuple[Standing, ...] = ()
    first: int = 0
    released: tuple[int, ...] = ()
    in_parts: bool = False  # what cannot be held is left out, and does not keep the rest

    def frees(self, request: ResourceRequest) -> bool:
        """Whether more becomes free than is held, so that what waits could begin."""
        return bool(self.released) or any(
            one.counted.cpu_milli > request.cpu_milli
            or one.counted.memory_bytes > request.memory_bytes
            or one.counted.gpu_count > request.gpu_count
            for one in self.standing
        )


class EligibilityRules(Protocol):
    """An engine's own rules, asked while a decision is made; each answer is of this moment."""

    def judges(self, workload_id: str) -> bool:
        """Whether the engine is to be asked about a workload; its traits say nothing then."""

    def eligible(
        self, workload_id: str, placed: Mapping[int, str], workloads: Mapping[str, Workload]
    ) -> frozenset[str]:
        """Nodes that the next replica may go to, room apart, once those before it are `placed` by number.

        `workloads` are all that the core knows, with what it decided a moment ago.
        """

    def alike(self, workload_id: str, node_name: str) -> frozenset[str]:
        """Nodes that bind the replicas after the first to the same places as this one does."""


class Eligibility:
    """Where an engine leaves its rules for the core; None where there is no engine, or it is not ready yet."""

    def __init__(self) -> None:
        self.rules: EligibilityRules | None = None
