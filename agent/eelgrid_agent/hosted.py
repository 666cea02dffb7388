"""What one process of the agent hosts: nodes, the work that keeps them going, and what frees their devices."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

from eelgrid_agent.node import Node
from eelgrid_agent.worker.latency import Latencies
from eelgrid_agent.worker.remote import RemoteDevice

__all__ = ["Drop", "Hosted"]

# Ends the stream of a node whose batches nobody acknowledges.
Drop = Callable[[Node], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Hosted:
    """`work` runs until it is cancelled, and puts back then what it changed; `worker` is the driver's child process."""

    nodes: tuple[Node, ...]
    work: Callable[[Drop], tuple[Awaitable[None], ...]]
    close: Callable[[], None]
    worker: RemoteDevice | None = None
    # Seconds in the driver by call, where calls are timed; and of the newest look of each kind.
    calls: Latencies | None = None
    collection_s: Mapping[str, float] = field(default_factory=dict)
