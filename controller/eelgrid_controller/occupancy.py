"""What others hold on a node, as the engine that runs work there tells.

Owns the value. Must not know which engine that is, nor what Eelgrid placed there itself.

Theory. An engine runs more than what it asks Eelgrid to place: system pods, work that did not
opt in, another scheduler's jobs. The planner needs to know how much of a node is left, not by
whom it is held. Which GPUs others hold is often not known (a kubelet chooses them), only how
many. What an engine demands of a node besides amounts (labels, taints, features, partitions)
comes as traits: names that the engine gives to each set of demands, told of every node that
meets it; a workload requires some of them. So the rules of an engine stay with that engine.
"""

from dataclasses import dataclass
from typing import Annotated

from eelgrid_protos.quantities import Bytes, Count, CpuMilli, Label, Many, Sentence

__all__ = ["NOBODY", "Others"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Others:
    """Amounts that others hold, the node's traits, and why nothing new may come; empty where it may."""

    cpu_milli: CpuMilli = 0
    memory_bytes: Bytes = 0
    gpu_count: Count = 0
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


NOBODY = Others()
