"""Load of many agents: what one real agent sent, replayed with a connection and a stream for each.

Records a real agent's Hello and batches from a loopback stream, and sends them again under other names, numbers and times.
Knows nothing of who takes them. Streams are those of real agents (`Uplink`): each is opened again by their rule, and what
was not acknowledged is sent again. SIGUSR2: sends from now on. SIGUSR1: sends no more, and says what was sent.

python -m bench.agent_replay --frames FILE --controller HOST:PORT[,...] --agents N [--first I] [--interval S] [--welcomes FILE] [--older]
"""

import argparse
import asyncio
import contextlib
import json
import logging
import random
import signal
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, TextIO

import grpc
import grpc.aio

from bench.processes import fleet_file, free_port, running
from eelgrid_agent.node.node import AgentNode
from eelgrid_agent.node.uplink import Uplink, know_controllers, open_channels
from eelgrid_controller.server.remote_write.wire import encode_varint
from eelgrid_protos import codec
from eelgrid_protos.messages import (
    Acknowledgement,
    Cadence,
    ConnectRequest,
    ConnectResponse,
    Hello,
    Resume,
    SampleBatch,
    Welcome,
)
from eelgrid_protos.rpc import AGENT_SERVICE, Context, Encoded, build_handler
from eelgrid_protos.transport import listen_on_address, server_options
from eelgrid_protos.wire import node_pb2

_SAMPLES_TAG = b"\x1a"
# Agents that start in a second.
_STARTS_PER_S = 250.0


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
        return _SAMPLES_TAG + encode_varint(len(inner)) + inner


class _ReplayedNode(AgentNode):
    """One node: its opening, and a batch for each interval, which waits until it is acknowledged.

    Its stream is a real agent's (`Uplink`), which asks a node only for what is here.
    """

    def __init__(
        self, name: str, hello: Hello, templates: Sequence[_Template], told: TextIO | None, *, is_older: bool
    ) -> None:
        gpus = tuple(replace(gpu, uuid=f"GPU-{name}-{gpu.index}") for gpu in hello.inventory.gpus)
        inventory = replace(hello.inventory, node_name=name, gpus=gpus)
        self._name = name
        self._hello = replace(hello, inventory=inventory, accepts_resume_request=not is_older)
        self._digest = codec.digest_message(inventory)
        self._templates = templates
        self._told = told
        self._resumes = False
        self._term = None
        self.wake = _nothing
        self.connected = False
        self.sequence = self.ticks = self.ended = 0
        # Batches that are not acknowledged, by number, with their times; those from `_next` on are not sent either.
        self._waiting: deque[tuple[int, int]] = deque()
        self._next = 1

    @property
    def name(self) -> str:
        """Its name."""
        return self._name

    async def add_batches(self, begin: asyncio.Event, stop: asyncio.Event, interval_s: float) -> None:
        """Adds a batch each interval, from `begin` until `stop`, at moments of its own."""
        await begin.wait()
        due_s = asyncio.get_running_loop().time() + random.random() * interval_s
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(due_s):
                    await stop.wait()
            if stop.is_set():
                return
            due_s += interval_s
            self.sequence += 1
            self.ticks += self._templates[0].ticks
            self._waiting.append((self.sequence, time.time_ns()))
            self.wake()

    def build_hello(self) -> ConnectRequest:
        """Opens a stream with the inventory."""
        return ConnectRequest(message=replace(self._hello, term=self._term))

    def build_resume(self, digest: object) -> ConnectRequest | None:
        """Opens a stream by the fingerprint of the inventory, after the first one."""
        del digest
        if not self._resumes:
            return None
        resume = Resume(
            incarnation=self._hello.incarnation,
            node_name=self.name,
            inventory_digest=self._digest,
            term=self._term,
            accepts_resume_request=self._hello.accepts_resume_request,
        )
        return ConnectRequest(message=resume)

    def on_refused(self) -> None:
        """As a real one: the next stream begins with all of it."""
        self._resumes = False

    def on_welcome(self, message: Welcome) -> None:
        """Sends again what this controller lacks."""
        self._resumes, self.connected, self._term = message.resumes, True, message.term
        if self._told is not None:
            self._told.write(f"{time.monotonic()} {self.name}\n")
        self._forget(message.acknowledged_sequence)
        self._next = message.acknowledged_sequence + 1

    def on_disconnected(self) -> None:
        """Counts it."""
        self.ended += self.connected
        self.connected = False

    def on_message(self, response: ConnectResponse) -> None:
        """Takes acknowledgements."""
        if isinstance(response.message, Acknowledgement):
            self._forget(response.message.sequence)

    def _forget(self, sequence: int) -> None:
        while self._waiting and self._waiting[0][0] <= sequence:
            self._waiting.popleft()

    def next_message(self) -> Any:
        """The next batch that is not sent, encoded."""
        if not self._waiting or self._next > self.sequence:
            return None
        sequence, time_ns = self._waiting[max(0, self._next - self._waiting[0][0])]
        self._next = sequence + 1
        return Encoded(self._templates[sequence % len(self._templates)].fill(sequence, time_ns))


def _nothing() -> None:
    pass


async def _replay(flags: argparse.Namespace, lines: Sequence[bytes], told: TextIO | None) -> None:
    messages = [codec.decode_message(ConnectRequest, line).message for line in lines]
    hello = messages[0]
    assert isinstance(hello, Hello)
    templates = [_Template(message) for message in messages[1:] if isinstance(message, SampleBatch)]
    nodes = [
        _ReplayedNode(f"node-{flags.first + index:05}", hello, templates, told, is_older=flags.older)
        for index in range(flags.agents)
    ]
    begin, stop = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGUSR2, begin.set)
    loop.add_signal_handler(signal.SIGUSR1, stop.set)
    controllers = know_controllers(flags.controller.split(","), certificates=None, insecure=False)
    open_one = open_channels(certificates=None, insecure=False, is_choice=len(controllers.all) > 1)
    reasons: Counter[str] = Counter()
    async with asyncio.TaskGroup() as group:
        tasks = []
        for node in nodes:
            own = controllers.order_for(node.name)
            uplink = Uplink(
                node,
                open_one,
                controllers=own,
                gate=_Open(),
                jitter=random.random,
                report=lambda why: reasons.update((why[:300],)),
            )
            tasks.append(group.create_task(_start_in_turn(uplink, len(nodes))))
            tasks.append(group.create_task(node.add_batches(begin, stop, flags.interval)))
        while not stop.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    await stop.wait()
            print(json.dumps({"connected": sum(node.connected for node in nodes)}), flush=True)
            if told is not None:
                told.flush()
        await asyncio.sleep(1.0)
        said = {
            "batches": sum(node.sequence for node in nodes),
            "ticks": sum(node.ticks for node in nodes),
            "ended": sum(node.ended for node in nodes),
            "reasons": reasons.most_common(5),
        }
        print(json.dumps(said), flush=True)


class _Open(asyncio.Semaphore):
    """Agents are machines of their own: none waits for another."""

    async def acquire(self) -> Literal[True]:
        """At once."""
        return True

    def release(self) -> None:
        """Nothing was taken."""


async def _start_in_turn(uplink: Uplink, agents: int) -> None:
    await asyncio.sleep(random.random() * agents / _STARTS_PER_S)
    await uplink.run()


def main() -> None:
    """Replays until it is ended."""
    parser = argparse.ArgumentParser(prog="python -m bench.agent_replay", description=__doc__)
    parser.add_argument("--frames", required=True)
    parser.add_argument("--controller", required=True)
    parser.add_argument("--agents", type=int, required=True)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--interval", type=float, default=5.0)
    parser.add_argument(
        "--welcomes", type=Path, help="File for a line at each Welcome: the monotonic clock, and the node."
    )
    parser.add_argument(
        "--older", action="store_true", help="As agents of the version before, whose streams end with the leader."
    )
    flags = parser.parse_args()
    lines = [bytes.fromhex(line) for line in Path(flags.frames).read_text().splitlines()]
    with contextlib.nullcontext() if flags.welcomes is None else flags.welcomes.open("a") as told:
        asyncio.run(_replay(flags, lines, told))


if __name__ == "__main__":
    main()
