"""Stale reads: how a caller allows a follower to answer, and how the answer says how old it is.

Consul's consistency mode `stale`: of several controllers any may answer a read, so that reads go on while none leads, and
the caller is told what it got. Owns the words of both in gRPC's metadata, and which calls have them. A call that is not
listed here, or does not allow it, is the leader's alone.

The age bounds how stale an answer is: it has everything that was committed so long ago. It is counted on the follower's own
clock from before its last look at the journal's end, so that it grows while the follower is cut off from the database.
"""

from collections.abc import Iterable
from typing import Any

from eelgrid_protos.values import dataclass

CALLS = frozenset(
    (
        "WhoAmI",
        "GetSummary",
        "ListNodes",
        "ListGpus",
        "ListPlans",
        "GetWorkload",
        "ListWorkloads",
        "ExplainWorkload",
        "GetPolicy",
        "ListQueues",
    )
)
_CONSISTENCY, _STALE = "eelgrid-consistency", "stale"
# What a caller sends with a call that any controller may answer.
REQUEST_METADATA = ((_CONSISTENCY, _STALE),)
_AGE_MS, _REVISION, _TIMELINE, _EPOCH = (
    f"eelgrid-stale-{name}" for name in ("age-ms", "revision", "timeline", "epoch")
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Staleness:
    """What a follower's answer rests on: the journal up to an entry, as it was at most so many seconds ago."""

    age_s: float
    # Number of the last entry.
    revision: int
    # The term of who led then: timeline, then epoch.
    timeline: int
    epoch: int

    def to_metadata(self) -> tuple[tuple[str, str], ...]:
        """Returns what is sent behind the answer."""
        return (
            (_AGE_MS, f"{1e3 * self.age_s:.0f}"),
            (_REVISION, str(self.revision)),
            (_TIMELINE, str(self.timeline)),
            (_EPOCH, str(self.epoch)),
        )


def allows_stale(metadata: Iterable[tuple[str, Any]] | None) -> bool:
    """Whether a call's metadata lets a follower answer."""
    return any(key == _CONSISTENCY and value == _STALE for key, value in metadata or ())


def parse_staleness(metadata: Iterable[tuple[str, Any]] | None) -> Staleness | None:
    """Returns what the metadata behind an answer says; None for an answer of the leader, or of one that cannot be read."""
    found = dict(metadata or ())
    try:
        age_ms, *numbers = (int(found[key]) for key in (_AGE_MS, _REVISION, _TIMELINE, _EPOCH))
    except (KeyError, ValueError):
        return None
    revision, timeline, epoch = numbers
    return Staleness(age_s=age_ms / 1e3, revision=revision, timeline=timeline, epoch=epoch)
