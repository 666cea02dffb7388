"""A real controller in the test's process, and clients of it.

Owns starting and stopping; the doubles here stand only for ports that are ours
(Journal) or for the other end of the wire (an agent's stream).
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

from eelgrid_controller.clock import Clock
from eelgrid_controller.composition import Controller
from eelgrid_controller.errors import JournalError
from eelgrid_controller.runtime.config import ControllerConfig
from eelgrid_controller.runtime.journal_rows import decode_checkpoint, encode_checkpoint
from eelgrid_controller.state.journal import Checkpoint, CheckpointRow, JournalCounters, JournalEntry, JournalHistory
from eelgrid_protos import rpc, transport
from eelgrid_protos.messages import (
    AttemptReport,
    ConnectRequest,
    ConnectResponse,
    HeldAssignments,
    Hello,
    Inventory,
    LeaderTerm,
)
from tests.waiting import wait_until

LOG = logging.getLogger("test.controller")


class RunningController:
    """A controller and clients of it."""

    def __init__(self, controller: Controller, line: str) -> None:
        self.controller = controller
        self.line = line
        parts = dict(part.split("=", 1) for part in line.split()[1:])
        self.address, self.metrics = parts["listen"], parts["metrics"]
        self.channel = transport.open_channel(self.address, tls=None)
        self.operators = rpc.build_client(rpc.OPERATOR_SERVICE, self.channel)
        self.agents: list[AgentStream] = []

    async def join(self, *inventories: Inventory, **hello: Any) -> "AgentStream":
        """Agents that said Hello, were welcomed and have answered; the last of them."""
        for item in inventories:
            agent = AgentStream(self.address)
            self.agents.append(agent)
            await agent.say(
                Hello(
                    incarnation=hello.get("incarnation", 1),
                    inventory=item,
                    plan_epoch=hello.get("plan_epoch", 0),
                    held=HeldAssignments(),
                )
            )
            await agent.hear()
            await self.answer(agent, item.node_name)
        return self.agents[-1]

    async def answer(self, agent: "AgentStream", node_name: str) -> None:
        """Has an agent say something after Welcome, and waits until the node is no longer doubted."""
        await agent.say(AttemptReport())
        nodes = self.controller.loop.core.state.nodes
        await wait_until(lambda: nodes[node_name].is_reported)


class AgentStream:
    """One stream, said and heard message by message."""

    def __init__(self, address: str) -> None:
        # A connection of its own, as an agent has.
        self._channel = transport.open_channel(address, tls=None, options=[("grpc.use_local_subchannel_pool", 1)])
        self._out: asyncio.Queue[Any] = asyncio.Queue()
        self._responses: AsyncIterator[ConnectResponse] = rpc.build_client(rpc.AGENT_SERVICE, self._channel).connect(
            self._requests()
        )

    async def _requests(self) -> AsyncIterator[ConnectRequest]:
        while (message := await self._out.get()) is not StopAsyncIteration:
            yield ConnectRequest(message=message)

    async def say(self, *messages: Any) -> None:
        """Send."""
        for message in messages:
            await self._out.put(message)

    async def hear(self, kind: type | None = None, *, within_s: float = 5.0) -> Any:
        """The next message, or the next of a kind; raises Fault when the stream failed."""
        async with asyncio.timeout(within_s):
            while True:
                message = (await anext(self._responses)).message
                if kind is None or isinstance(message, kind):
                    return message

    async def hear_to_the_end(self) -> None:
        """Raises the Fault with which the stream ends."""
        while True:
            await self.hear()

    async def leave(self) -> None:
        """End the stream and the connection."""
        await self._out.put(StopAsyncIteration)
        await self._responses.aclose()  # type: ignore[attr-defined]
        await self._channel.close()


@contextlib.asynccontextmanager
async def run_controller(data: Path, **options: Any) -> AsyncIterator[RunningController]:
    """A controller over a directory, on free ports if none are given."""
    config = ControllerConfig(data=data, **({"listen": "127.0.0.1:0", "metrics": "127.0.0.1:0"} | options))
    controller = Controller(config, tls=None, insecure=False, clock=Clock(), log=LOG)
    rig = RunningController(controller, await controller.start())
    try:
        yield rig
    finally:
        for agent in rig.agents:
            await agent.leave()
        await rig.channel.close()
        await controller.stop()


class MemoryJournal:
    """Implements `Journal` in memory; `fault` makes writing fail, `gate` holds it up."""

    is_remote = False
    may_lead = True
    lease_age_s = 0.0

    def __init__(self) -> None:
        self.path = Path("memory.sqlite3")
        self.term = LeaderTerm(epoch=1, holder="memory")
        self.counters = JournalCounters()
        self.lost = None
        self.entries: list[JournalEntry] = []
        self.audited: list[Any] = []
        self.checkpoints: list[Checkpoint] = []
        self.commits: list[int] = []
        self.fault: JournalError | None = None
        self.checkpoint_fault: JournalError | None = None
        self.probes = 0
        self.gate: Any = None

    def raise_term(self, above: LeaderTerm) -> LeaderTerm:
        """Rises."""
        if self.fault is not None:
            raise self.fault
        self.term = LeaderTerm(timeline=above.timeline, epoch=above.epoch + 1, holder=self.term.holder)
        return self.term

    def append(self, entries: Sequence[JournalEntry], audited: Sequence[Any] = ()) -> int:
        """Write all or none."""
        if self.gate is not None:
            self.gate.wait(5.0)
        if self.fault is not None:
            raise self.fault
        self.entries.extend(entries)
        self.audited.extend(audited)
        self.commits.append(len(entries))
        return len(self.entries)

    def newest_checkpoint(self) -> Checkpoint | None:
        """The newest checkpoint."""
        return self.checkpoints[-1] if self.checkpoints else None

    def entries_after(self, seq: int) -> Iterator[tuple[int, JournalEntry]]:
        """Entries after a number."""
        return iter(list(enumerate(self.entries, 1))[seq:])

    def read_history(self) -> JournalHistory:
        """Everything."""
        return JournalHistory(None, tuple(self.entries_after(0)))

    def write_checkpoint(self, checkpoint: Checkpoint | CheckpointRow) -> None:
        """Keep a checkpoint."""
        if fault := self.fault or self.checkpoint_fault:
            raise fault
        row = encode_checkpoint(checkpoint)
        kept = decode_checkpoint(row.seq, row.body, row.digest.encode(), row.crc32)
        assert kept is not None
        self.checkpoints.append(kept)

    def check_files(self) -> None:
        """There are none."""

    def probe(self) -> None:
        """Raise the fault, if any."""
        self.probes += 1
        if self.fault is not None:
            raise self.fault

    def close(self) -> None:
        """Nothing to give up."""
