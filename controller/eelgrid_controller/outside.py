"""What an engine that runs the work says to the steering: whose replicas it may not change, and where pages are.

Owns these words, by workload. Must not know who says them, nor who listens. They are of this
moment and in no journal: whoever knows says them anew after a restart.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

__all__ = ["Bounds", "Outside"]


class Bounds(NamedTuple):
    """The fewest and the most replicas that the steering may ask for."""

    least: int
    most: int


@dataclass(slots=True)
class Outside:
    """Each mapping is replaced entry by entry, from the event loop alone."""

    advised: dict[str, str] = field(default_factory=dict)  # workloads that are not scaled now, and why
    bounds: dict[str, Bounds] = field(default_factory=dict)  # narrower than the promise's
    pages: dict[str, Mapping[int, str]] = field(default_factory=dict)  # where each replica's metrics are
    grown: dict[str, frozenset[int]] = field(default_factory=dict)  # replicas that served before they were told of

    def forget(self, workload_id: str) -> None:
        """A workload that is no more."""
        for words in (self.advised, self.bounds, self.pages, self.grown):
            words.pop(workload_id, None)
