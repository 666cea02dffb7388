"""The streams of all nodes of one process.

Owns how they are kept together: how many connect at once, and what the log says
of them. Must not know devices, signals or files.

Each node has its own channel and its own TCP connection, as a thousand agents
on a thousand machines would: gRPC shares connections between channels of like
arguments unless each has a pool of its own.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence

import grpc.aio

from eelgrid_agent.node import Node
from eelgrid_agent.uplink import Uplink, UplinkLimits
from eelgrid_protos.transport import TlsFiles, channel

__all__ = ["CONNECTS_AT_ONCE", "Links", "open_channels"]

# Streams between connecting and Welcome at one time: enough to hide the controller's
# answer time, few enough that nobody waits out the deadline until the controller says that it has our Hello.
CONNECTS_AT_ONCE = 128
LOOK_S = 0.5
REPORT_S = 5.0

_LOG = logging.getLogger("eelgrid.agent")


def open_channels(address: str, *, tls: TlsFiles | None, insecure: bool) -> Callable[[], grpc.aio.Channel]:
    """Opens channels to the controller, each with a connection of its own; raises ListenError."""
    options = [("grpc.use_local_subchannel_pool", 1)]
    return lambda: channel(address, tls=tls, insecure=insecure, options=options)


class Links:
    """The streams of all nodes."""

    def __init__(
        self, nodes: Sequence[Node], open_channel: Callable[[], grpc.aio.Channel], *, jitter: Callable[[], float],
        tls: TlsFiles | None = None, limits: UplinkLimits | None = None,
    ) -> None:  # fmt: skip
        self._nodes = nodes
        self._reason = ""
        gate = asyncio.Semaphore(CONNECTS_AT_ONCE)
        self._uplinks = {
            node.name: Uplink(
                node,
                open_channel,
                gate=gate,
                jitter=jitter,
                report=self._reporter(node.name),
                limits=limits,
                tls_stamp=None if tls is None else tls.stamp,
            )
            for node in nodes
        }

    @property
    def connections_total(self) -> int:
        """Connections that the controller welcomed."""
        return sum(uplink.connections_total for uplink in self._uplinks.values())

    def drop_stalled(self, node: Node) -> None:
        """Ends the stream of a node whose batches nobody acknowledges."""
        self._uplinks[node.name].drop("no acknowledgement in time")

    async def run(self) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as group:
            for uplink in self._uplinks.values():
                group.create_task(uplink.run())
            group.create_task(self._report())

    def _reporter(self, name: str) -> Callable[[str], None]:
        def report(reason: str) -> None:
            self._reason = reason
            _LOG.debug("event=stream_ended node=%s reason=%r", name, reason)

        return report

    async def _report(self) -> None:
        """A line when the number of streams changed, at most one in REPORT_S: a fleet must not flood the log."""
        said, said_reason, quiet_s = 0, "", 0.0
        while True:
            await asyncio.sleep(LOOK_S)
            quiet_s += LOOK_S
            connected = sum(node.connected for node in self._nodes)
            whole = connected == len(self._nodes)
            if whole and connected != said:
                _LOG.info("event=connected streams=%d nodes=%d", connected, len(self._nodes))
                said, said_reason = connected, ""
            elif not whole and quiet_s >= REPORT_S and (connected, self._reason) != (said, said_reason):
                _LOG.warning("event=streams streams=%d nodes=%d last=%r", connected, len(self._nodes), self._reason)
                said, said_reason, quiet_s = connected, self._reason, 0.0
