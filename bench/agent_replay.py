"""Load of many agents: what one real agent sent, replayed with a connection and a stream for each.

Records a real agent's Hello and batches from a loopback stream, and sends them again under other names, numbers and times,
as fast as the agent would or as many at once as it is told. Knows nothing of who takes them. A stream that ends after its
welcome is counted and not opened again. SIGUSR1: sends no more, and says what was sent.

python -m bench.agent_replay --frames FILE --controller HOST:PORT[,...] --agents N [--first I] [--interval S]
"""

import argparse
import asyncio
import contextlib
import json
import logging
import random
import signal
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from bench.processes import fleet_file, free_port, running
from eelgrid_protos import codec
from eelgrid_protos.controller_addresses import order_addresses
from eelgrid_protos.messages import (
    Acknowledgement,
    Cadence,
    ConnectRequest,
    ConnectResponse,
    Hello,
    SampleBatch,
    Welcome,
)
from eelgrid_protos.rpc import AGENT_SERVICE, Context, build_handler
from eelgrid_protos.transport import listen_on_address, open_channel, server_options
from eelgrid_protos.wire import node_pb2

_SAMPLES_TAG = b"\x1a"
_ACKNOWLEDGEMENT_TAG = b"\x12"
# Connections that are being opened at one time, as an agent's back-off spreads them.
_CONNECTS_AT_ONCE = 64
_AGAIN_S = 5.0


class _Recorder:
    """Welcomes one agent, and keeps what it says."""

    def __init__(self, cadence: Cadence, batches: int) -> None:
        self._cadence = cadence
        self._most = batches
        self.hello: Hello | None = None
        self.batches: list[SampleBatch] = []
        self.is_done = asyncio.Event()

    async def connect(
        self, requests: AsyncIterator[ConnectRequest], context: Context
    ) -> AsyncIterator[ConnectResponse]:
        """One agent."""
        del context
        async for request in requests:
            match request.message:
                case Hello() as hello:
                    self.hello = hello
                    yield ConnectResponse(message=Welcome(acknowledged_sequence=0, cadence=self._cadence))
                case SampleBatch() as batch:
                    self.batches.append(batch)
                    yield ConnectResponse(message=Acknowledgement(sequence=batch.sequence))
                    if len(self.batches) >= self._most:
                        self.is_done.set()


async def _record(folder: Path, gpus: int, cadence: Cadence, batches: int) -> _Recorder:
    recorder = _Recorder(cadence, batches)
    server = grpc.aio.server(options=server_options())
    server.add_generic_rpc_handlers((build_handler(AGENT_SERVICE, recorder),))
    port = await listen_on_address(server, "127.0.0.1:0", tls=None, insecure=False, log=logging.getLogger("record"))
    await server.start()
    flags = [
        "--simulate",
        str(fleet_file(folder / "one.json", nodes=1, gpus=gpus)),
        "--controller",
        f"127.0.0.1:{port}",
    ]
    flags += ["--listen", f"127.0.0.1:{free_port()}", "--metrics", f"127.0.0.1:{free_port()}"]
    with running("eelgrid_agent", flags, folder / "recorded.log"):
        async with asyncio.timeout(120.0 + 4.0 * batches * cadence.send_interval_s):
            await recorder.is_done.wait()
    await server.stop(0)
    return recorder


def record_agent(path: Path, *, gpus: int, interval_s: float, batches: int = 6) -> int:
    """Writes what a real agent sends, one message a line; returns the ticks of a batch."""
    cadence = Cadence(sample_interval_s=1.0, send_interval_s=interval_s)
    recorder = asyncio.run(_record(path.parent, gpus, cadence, batches + 1))
    assert recorder.hello is not None
    ticks = max(1, round(interval_s))
    # The first batch may be a part of one, and one that came late has the ticks of two.
    whole = [batch for batch in recorder.batches if len(batch.time_ns) == ticks]
    messages = [recorder.hello, *whole]
    assert whole, [len(batch.time_ns) for batch in recorder.batches]
    lines = [codec.encode_message(ConnectRequest(message=message)).hex() for message in messages]
    path.write_text("\n".join(lines))
    return ticks


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    out.append(number)
    return bytes(out)


class _Template:
    """A batch without its number and times, encoded."""

    def __init__(self, batch: SampleBatch) -> None:
        wire = node_pb2.SampleBatch()
        wire.ParseFromString(codec.encode_message(batch))
        wire.ClearField("sequence")
        wire.ClearField("time_ns")
        wire.ClearField("dropped_ticks")
        self.ticks = len(batch.time_ns)
        self._rest = wire.SerializeToString()

    def fill(self, sequence: int, now_ns: int) -> bytes:
        """Returns the message of a batch that ends now."""
        times = [now_ns - 1_000_000_000 * before for before in range(self.ticks - 1, -1, -1)]
        inner = node_pb2.SampleBatch(sequence=sequence, time_ns=times).SerializeToString() + self._rest
        return _SAMPLES_TAG + _varint(len(inner)) + inner


class _ReplayedAgent:
    """One agent: a connection, a stream, and its batches."""

    def __init__(self, name: str, hello: Hello, templates: Sequence[_Template], interval_s: float) -> None:
        gpus = tuple(replace(gpu, uuid=f"GPU-{name}-{gpu.index}") for gpu in hello.inventory.gpus)
        opening = replace(hello, inventory=replace(hello.inventory, node_name=name, gpus=gpus))
        self.name = name
        self._hello = codec.encode_message(ConnectRequest(message=opening))
        self._templates = templates
        self._interval_s = interval_s
        self.sequence = self.acknowledged = self.ticks = 0
        self.ended = ""
        self.is_welcomed = False
        # Streams that ended before they were welcomed.
        self.refusals = 0

    async def run(self, address: str, gate: asyncio.Semaphore, begin: asyncio.Event, stop: asyncio.Event) -> None:
        """Connects, and sends from `begin` until `stop`; the stream stays open. One that is refused is opened again."""
        while not self.is_welcomed:
            self.refusals += self.ended != ""
            await self._run_once(address, gate, begin, stop)
            if not self.is_welcomed:
                await asyncio.sleep(_AGAIN_S * random.random())

    async def _run_once(self, address: str, gate: asyncio.Semaphore, begin: asyncio.Event, stop: asyncio.Event) -> None:
        options = [("grpc.use_local_subchannel_pool", 1)]
        path = AGENT_SERVICE.path(AGENT_SERVICE.methods[0])
        async with open_channel(address, tls=None, options=options) as channel:
            call: Any = channel.stream_stream(path)()
            try:
                async with gate:
                    await call.write(self._hello)
                    while not isinstance(codec.decode_message(ConnectResponse, await call.read()).message, Welcome):
                        pass
                self.is_welcomed, self.ended = True, ""
                reader = asyncio.create_task(self._read(call))
                gate.welcomed += 1  # type: ignore[attr-defined]
                await begin.wait()
                # Each at a moment of its own.
                due_s = asyncio.get_running_loop().time() + random.random() * self._interval_s
                while not reader.done():
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout_at(due_s):
                            await stop.wait()
                    if stop.is_set():
                        break
                    self.sequence += 1
                    template = self._templates[self.sequence % len(self._templates)]
                    await call.write(template.fill(self.sequence, time.time_ns()))
                    self.ticks += template.ticks
                    due_s += self._interval_s
                await reader
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError, TypeError) as error:
                self.ended = repr(error)[:200]

    async def _read(self, call: Any) -> None:
        while (data := await call.read()) is not grpc.aio.EOF:
            if data[:1] == _ACKNOWLEDGEMENT_TAG:
                message = codec.decode_message(ConnectResponse, data).message
                assert isinstance(message, Acknowledgement)
                self.acknowledged = message.sequence
        self.ended = f"{await call.code()} {await call.details()}"


async def _replay(flags: argparse.Namespace, lines: Sequence[bytes]) -> None:
    messages = [codec.decode_message(ConnectRequest, line).message for line in lines]
    hello = messages[0]
    assert isinstance(hello, Hello)
    templates = [_Template(message) for message in messages[1:] if isinstance(message, SampleBatch)]
    names = [f"node-{flags.first + index:05}" for index in range(flags.agents)]
    agents = [_ReplayedAgent(name, hello, templates, flags.interval) for name in names]
    gate, begin, stop = asyncio.Semaphore(_CONNECTS_AT_ONCE), asyncio.Event(), asyncio.Event()
    gate.welcomed = 0  # type: ignore[attr-defined]
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGUSR2, begin.set)
    loop.add_signal_handler(signal.SIGUSR1, stop.set)
    addresses = flags.controller.split(",")
    tasks = [
        asyncio.create_task(agent.run(order_addresses(addresses, agent.name)[0], gate, begin, stop)) for agent in agents
    ]
    while not stop.is_set():
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1.0):
                await stop.wait()
        print(json.dumps({"welcomed": gate.welcomed}), flush=True)  # type: ignore[attr-defined]
    await asyncio.sleep(1.0)
    ended = [agent.ended for agent in agents if agent.ended]
    said = {
        "batches": sum(agent.sequence for agent in agents),
        "ticks": sum(agent.ticks for agent in agents),
        "ended": len(ended),
        "refusals": sum(agent.refusals for agent in agents),
        "reason": ended[0] if ended else "",
    }
    print(json.dumps(said), flush=True)
    await asyncio.gather(*tasks)


def main() -> None:
    """Replays until it is ended."""
    parser = argparse.ArgumentParser(prog="python -m bench.agent_replay", description=__doc__)
    parser.add_argument("--frames", required=True)
    parser.add_argument("--controller", required=True)
    parser.add_argument("--agents", type=int, required=True)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--interval", type=float, default=5.0)
    flags = parser.parse_args()
    lines = [bytes.fromhex(line) for line in Path(flags.frames).read_text().splitlines()]
    asyncio.run(_replay(flags, lines))


if __name__ == "__main__":
    main()
