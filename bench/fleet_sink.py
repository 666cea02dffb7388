"""A controller that only acknowledges: measures the cost of sending without any decisions.

    python bench/fleet_sink.py [--listen 127.0.0.1:7443] [--send 5] [--sample 1] [--window 8] [--seconds 0]

Prints, once a second while anything changes, the streams, batches and ticks so
far. Run `eelgrid-agent --simulate FILE` against it and watch that process.
"""

import argparse
import asyncio
import logging
import time
from collections.abc import AsyncIterator

import grpc.aio

from eelgrid_protos.messages import (
    Acknowledgement,
    Cadence,
    ConnectRequest,
    ConnectResponse,
    Hello,
    SampleBatch,
    Welcome,
)
from eelgrid_protos.rpc import AGENT_SERVICE, build_handler
from eelgrid_protos.transport import listen_on_address, server_options


class Sink:
    """Welcomes every agent and acknowledges every batch."""

    def __init__(self, cadence: Cadence) -> None:
        self.cadence = cadence
        self.streams = 0
        self.batches = 0
        self.ticks = 0
        self.began_s = 0.0

    async def connect(self, requests: AsyncIterator[ConnectRequest], context: object) -> AsyncIterator[ConnectResponse]:
        """One agent."""
        del context
        self.streams += 1
        self.began_s = self.began_s or time.monotonic()
        try:
            async for request in requests:
                match request.message:
                    case Hello():
                        yield ConnectResponse(message=Welcome(acknowledged_sequence=0, cadence=self.cadence))
                    case SampleBatch() as batch:
                        self.batches += 1
                        self.ticks += len(batch.time_ns)
                        yield ConnectResponse(message=Acknowledgement(sequence=batch.sequence))
        finally:
            self.streams -= 1


async def main() -> None:
    """Serves until interrupted or until the time is over."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--listen", default="127.0.0.1:7443")
    parser.add_argument("--send", type=float, default=5.0)
    parser.add_argument("--sample", type=float, default=1.0)
    parser.add_argument("--window", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=0.0, help="0: until interrupted")
    flags = parser.parse_args()
    sink = Sink(Cadence(sample_interval_s=flags.sample, send_interval_s=flags.send, window=flags.window))
    server = grpc.aio.server(options=server_options())
    server.add_generic_rpc_handlers((build_handler(AGENT_SERVICE, sink),))
    await listen_on_address(server, flags.listen, tls=None, insecure=False, log=logging.getLogger("sink"))
    await server.start()
    began_s = time.monotonic()
    said: tuple[int, int] = (-1, -1)
    while not flags.seconds or time.monotonic() - began_s < flags.seconds:
        await asyncio.sleep(1.0)
        if (sink.streams, sink.batches) != said:
            said = (sink.streams, sink.batches)
            since_s = time.monotonic() - sink.began_s if sink.began_s else 0.0
            print(f"t={since_s:.1f} streams={sink.streams} batches={sink.batches} ticks={sink.ticks}", flush=True)
    await server.stop(0.2)


if __name__ == "__main__":
    asyncio.run(main())
