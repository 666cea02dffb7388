"""Cordons: what operators closed to new work, by whom and why, and the drains that empty it.

A cordon is of a whole node or of one GPU of it. It is an operator's, or a quarantine of the controller: it survives restarts
and the return of the agent, and only an operator lifts it. The cordons that an agent reports for the health of a GPU (`Gpu.cordon`) are
separate, since an operator's uncordon cannot cure a device. Must not know what is placed where, nor how work leaves.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from eelgrid_controller.state.journal import JournalSanitizer
from eelgrid_protos.plain_messages import to_plain
from eelgrid_protos.quantities import Label, Nanoseconds


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainTerms:
    """How a cordoned node or GPU is emptied: what is still there at the deadline returns to the queue.

    `deadline_ns` is 0 where the drain waits for work that cannot move to end. With `force`, work that is declared fixed
    returns to the queue as well.
    """

    deadline_ns: Nanoseconds = 0
    force: bool = False

    def is_over(self, now_ns: int) -> bool:
        """Returns whether the grace is over."""
        return 0 < self.deadline_ns <= now_ns


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorCordon:
    """An operator's cordon of a node or GPU, since when it is in force, and the drain that empties it, if any."""

    since_ns: Nanoseconds
    reason: Label = ""
    user: Label = ""
    drain: DrainTerms | None = None
    # The controller itself closed it (core.quarantine).
    is_quarantine: bool = False

    def describe(self) -> str:
        """Returns who cordoned and why: `cordoned by ann: fan broken`."""
        return f"cordoned{describe_cause(self.user, self.reason)}"


def describe_cause(user: str, reason: str) -> str:
    """Returns who did something and why, as far as both are known, as the end of a sentence: ` by ann: fan broken`."""
    return (f" by {user}" if user else "") + (f": {reason}" if reason else "")


def dump_cordon(cordon: OperatorCordon, gpu_uuid: str = "") -> dict[str, Any]:
    """Dumps a cordon of a node, or of one GPU, as plain JSON values."""
    return {**to_plain(cordon, brief=True), **({"gpu_uuid": gpu_uuid} if gpu_uuid else {})}


def load_cordons(
    rows: Iterable[Mapping[str, Any]], healer: JournalSanitizer
) -> tuple[OperatorCordon | None, dict[str, OperatorCordon]]:
    """Loads the cordons of a node from a checkpoint: its own, and those of its GPUs by UUID."""
    found = {row.get("gpu_uuid", ""): row for row in rows}
    cordons = {
        uuid and healer.identifier(uuid): healer.read(OperatorCordon, {k: v for k, v in row.items() if k != "gpu_uuid"})
        for uuid, row in found.items()
    }
    return cordons.pop("", None), cordons
