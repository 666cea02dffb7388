"""Streams from nodes to the controller: connection, back-off, certificate rotation, and the pool of all nodes.

Theory. A gRPC write succeeds long before anybody reads it, so being connected
is proved by acknowledgements alone; the node says when it is stalled, and the
stream is dropped. A controller that is behind says that it has our Hello; from
then on we wait for our turn. Reconnecting waits a random part of a doubling bound (full
jitter), so that a thousand agents do not come back at once. Of several controllers
one leads: after a connection ends the next one is tried, or whom a follower named,
at once where none of them had welcomed the node yet, and otherwise spread over the
time that the last leader asked for. Several ingest processes are equals, so each
node has a first one of its own and goes back to it some time after it was lost:
else all would be at one of them after each had been restarted. One that has lost
the leader asks for Hello or Resume on the stream that is there, which costs both
sides a fraction of a new connection. gRPC's client
cannot reload certificates: when the files change, a second channel is opened,
and only when the controller has welcomed it is the first one closed.

Each node has its own channel and its own TCP connection, as a thousand agents
on a thousand machines would: gRPC shares connections between channels of like
arguments unless each has a pool of its own.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, aclosing
from functools import partial

import grpc.aio

from eelgrid_agent.node.leader_terms import TermTooOld
from eelgrid_agent.node.node import AgentNode, ForeignSequence
from eelgrid_protos.codec import digest_message
from eelgrid_protos.controller_addresses import ControllerAddresses, LeaderSearch
from eelgrid_protos.errors import ContractError
from eelgrid_protos.faults import Fault, NotLeader
from eelgrid_protos.file_reloader import FileReloader
from eelgrid_protos.messages import ConnectRequest, ConnectResponse, HelloReceived, ResumeRequest, TermRefused, Welcome
from eelgrid_protos.rpc import AGENT_SERVICE, build_client
from eelgrid_protos.transport import CertificateUnusable, ListenError, TlsContents, TlsFiles, may_connect, open_channel
from eelgrid_protos.values import dataclass

_LOG = logging.getLogger("eelgrid.agent")


@dataclass(frozen=True, slots=True, kw_only=True)
class UplinkLimits:
    """Bounds of connecting."""

    backoff_first_s: float = 0.5
    backoff_most_s: float = 30.0
    # The same once a controller has welcomed the node, or as long as it wants its agents spread over, if that is more.
    backoff_welcomed_s: float = 5.0
    # The controller journals a new node before it answers.
    welcome_s: float = 20.0
    # The same once it said that Hello is there: then it answers in turn, and who leaves the queue only makes it longer.
    queued_s: float = 300.0
    # A connection that lasted this long was a good one: back-off starts over.
    good_s: float = 5.0
    tls_check_s: float = 5.0
    # Between two rounds over several controllers, at least; at the most it is as long as the leader's spread.
    round_s: float = 2.0
    # How long a controller that was refused has to read why.
    refusal_s: float = 2.0
    # How often a node that is at another ingest process than its first looks whether that is back.
    return_s: float = 300.0


def bound_backoff(limits: UplinkLimits, failures: int, spread_s: float | None) -> float:
    """Returns the bound of the random wait after so many failed connections, in seconds.

    `spread_s` is over how long the last controller that welcomed the node wants all its agents back, None where none has:
    a controller that starts has its agents within that, however long it was away.
    """
    most_s = limits.backoff_most_s
    if spread_s is not None:
        most_s = min(most_s, max(limits.backoff_welcomed_s, spread_s))
    return min(most_s, limits.backoff_first_s * 2.0 ** min(failures, 16))


class Uplink:
    """The stream of one node."""

    def __init__(
        self,
        node: AgentNode,
        open_channel: Callable[[str], grpc.aio.Channel],
        *,
        controllers: ControllerAddresses,
        gate: asyncio.Semaphore,
        jitter: Callable[[], float],
        report: Callable[[str], None],
        limits: UplinkLimits | None = None,
        tls_version: Callable[[], int] | None = None,
    ) -> None:
        self._node = node
        self._open_channel = open_channel
        self._controllers = controllers
        self._search = controllers.begin_search()
        node.has_choice = self._search.is_choice
        # Over how long the last leader wants its agents back; None where none has welcomed this node.
        self._spread_s: float | None = None
        self._gate = gate
        self._jitter = jitter
        self._report = report
        self._limits = limits or UplinkLimits()
        # Changes when there are new certificates to connect with.
        self._tls_version = tls_version
        self._active: _Session | None = None
        self._failures = 0
        self.connections_total = 0

    async def run(self) -> None:
        """Until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            began_s = loop.time()
            ended = await self._connection()
            welcomed = ended.welcomed.is_set()
            self._node.on_disconnected()
            if not ended.is_open:
                self._node.on_refused()
            if welcomed and loop.time() - began_s >= self._limits.good_s:
                self._failures = 0
            bound_s = self._choose_next(ended, welcomed=welcomed)
            await asyncio.sleep(bound_s * self._jitter())

    def _choose_next(self, ended: "_Session", *, welcomed: bool) -> float:
        """Goes on to the next controller, and reports why; returns within how many seconds to connect to it."""
        self._controllers.has_follower |= ended.is_follower
        if welcomed:
            self._spread_s = ended.spread_s
            self._search = self._controllers.begin_search()
        reasons = self._search.note(ended.reason)
        moved_s = self._search.move_on(ended.reason, ended.leader)
        self._report(reasons)
        if moved_s is not None:
            self._failures = 0
            if welcomed:
                # A whole fleet may have lost the same controller: it said over how long it wants it back.
                return max(self._limits.backoff_first_s, ended.spread_s)
            return 0.0 if moved_s == 0.0 else max(self._limits.round_s, self._spread_s or 0.0)
        bound_s = bound_backoff(self._limits, self._failures, self._spread_s)
        self._failures += 1
        return max(bound_s, ended.spread_s)

    def drop_connection(self, reason: str) -> None:
        """Ends the connection in use; the next one sends what was not acknowledged."""
        if self._active is not None:
            self._active.end(reason)

    async def _connection(self) -> "_Session":
        """One connection with its successors; returns the last, which has ended."""
        session = self._start(self._search)
        version = self._tls_version() if self._tls_version else None
        loop = asyncio.get_running_loop()
        return_due_s = loop.time() + self._limits.return_s
        try:
            while True:
                wait_s = max(0.0, return_due_s - loop.time())
                wait_s = min(wait_s, self._limits.tls_check_s) if self._tls_version else wait_s
                await asyncio.wait({session.task}, timeout=wait_s)
                if session.task.done():
                    return session
                if loop.time() >= return_due_s:
                    return_due_s = loop.time() + self._limits.return_s
                    if session.welcomed.is_set() and (first := self._controllers.seek_first()) is not None:
                        session = await self._open_successor(session, first, "the first ingest process is back")
                    continue
                fresh = self._tls_version() if self._tls_version else None
                if fresh == version or not session.welcomed.is_set():
                    continue
                version = fresh
                session = await self._open_successor(session, self._search, "certificates changed")
        finally:
            await session.close()
            if self._active is session:
                self._active = None

    async def _open_successor(self, session: "_Session", search: LeaderSearch, why: str) -> "_Session":
        """A successor, once it is welcomed; until then the session stays."""
        successor = self._start(search)
        welcomed = asyncio.ensure_future(successor.welcomed.wait())
        try:
            await asyncio.wait({welcomed, successor.task}, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            await successor.close()
            raise
        finally:
            welcomed.cancel()
        if successor.welcomed.is_set():
            await session.close()
            self._report(f"{why}: moved to a new connection")
            return successor
        self._controllers.has_follower |= successor.is_follower
        if search is self._search:
            self._report(f"{why}, but a new connection fails: {successor.reason}")
        await successor.close()
        return session

    def _start(self, search: LeaderSearch) -> "_Session":
        address = search.address
        take_over = partial(self._switch_session, search)
        return _Session(self._node, lambda: self._open_channel(address), self._gate, self._limits, take_over)

    def _switch_session(self, search: LeaderSearch, session: "_Session") -> None:
        """The session that was welcomed last is the one that sends."""
        if self._active is not None:
            self._active.retire()
        self._active, self._search = session, search
        search.succeed()
        self._node.wake = session.wake.set
        self.connections_total += 1


class _Session:
    """One stream on one channel."""

    def __init__(
        self,
        node: AgentNode,
        open_channel: Callable[[], grpc.aio.Channel],
        gate: asyncio.Semaphore,
        limits: UplinkLimits,
        take_over: Callable[["_Session"], None],
    ) -> None:
        self._node = node
        self._open_channel = open_channel
        self._gate = gate
        self._limits = limits
        self._take_over = take_over
        self.reason = "cancelled"
        # Whom the controller named that does not lead itself.
        self.leader = ""
        self.is_follower = False
        self.spread_s = 0.0
        # The opening to send next, if one is due: a controller wants all of it after a Resume, or was lost.
        self._opening: Callable[[], ConnectRequest] | None = self._build_opening
        # A controller has welcomed the node on this stream, and is still behind it.
        self.is_open = False
        self.welcomed = asyncio.Event()
        self.wake = asyncio.Event()
        self.retired = False
        # What is said last, to a controller that is not obeyed.
        self._refusal: TermRefused | None = None
        self.task = asyncio.create_task(self._run())

    def retire(self) -> None:
        """Sends nothing more, so that no message goes into a stream that nobody reads."""
        self.retired = True
        self.wake.set()

    def end(self, reason: str) -> None:
        """Ends it from our side."""
        self.reason = reason
        self.task.cancel()

    async def close(self) -> None:
        """Ends it and waits until it has ended."""
        self.task.cancel()
        await asyncio.wait({self.task})

    async def _run(self) -> None:
        # Nothing awaits Channel.close(): it walks every task of the process, so that ending 1,213 streams
        # took 14 s. A channel that nobody refers to any more closes itself at once, and so does its call.
        try:
            async with AsyncExitStack() as stack:
                async with self._gate:
                    channel = self._open_channel()
                    responses = build_client(AGENT_SERVICE, channel).connect(self._requests())
                    await stack.enter_async_context(aclosing(responses))
                    try:
                        async with asyncio.timeout(self._limits.welcome_s) as deadline:
                            await self._greet(responses, deadline)
                    except TermTooOld as error:
                        await self._refuse(responses, error)
                await self._follow(responses)
                self.reason = "ended by the controller"
        except TimeoutError:
            self.reason = "the controller did not answer Hello in time"
        except NotLeader as error:
            self.reason, self.leader, self.is_follower = str(error), error.leader, True
        except (Fault, ContractError, ForeignSequence, ListenError, TermTooOld) as error:
            self.reason = str(error)
        except Exception as error:  # noqa: BLE001  # the boundary of a stream
            # A fault of ours in one message must not end the node: the log has it, and the stream is opened again.
            _LOG.exception("event=stream_fault")
            self.reason = f"a fault of the agent: {error!r}"
        finally:
            self.retire()

    async def _follow(self, responses: AsyncIterator[ConnectResponse]) -> None:
        try:
            async for response in responses:
                if not isinstance(response.message, ResumeRequest):
                    self._node.on_message(response)
                elif not self.retired:
                    self.is_open = False
                    self._node.on_disconnected()
                    async with asyncio.timeout(self._limits.welcome_s) as deadline:
                        self._open_again(response.message, deadline)
                        await self._greet(responses, deadline)
        except TermTooOld as error:
            await self._refuse(responses, error)

    def _open_again(self, request: ResumeRequest, deadline: asyncio.Timeout) -> None:
        """Opens the stream for another controller, which may not be there yet."""
        self._send_opening(self._build_opening)
        wait_s = request.leader_within_s + self._limits.welcome_s
        deadline.reschedule(asyncio.get_running_loop().time() + wait_s)

    def _send_opening(self, build: Callable[[], ConnectRequest]) -> None:
        self._opening = build
        self.wake.set()

    def _build_opening(self) -> ConnectRequest:
        return self._node.build_resume(digest_message) or self._node.build_hello()

    async def _refuse(self, responses: AsyncIterator[ConnectResponse], error: TermTooOld) -> None:
        """Tells the controller that it is not obeyed, and ends the stream; always raises."""
        self._refusal = error.refusal
        self.wake.set()
        # It ends the stream when it has read this; what it says until then is not listened to.
        with contextlib.suppress(TimeoutError, Fault, ContractError):
            async with asyncio.timeout(self._limits.refusal_s):
                async for _ in responses:
                    pass
        raise error

    async def _greet(self, responses: AsyncIterator[ConnectResponse], deadline: asyncio.Timeout) -> None:
        async for response in responses:
            match response.message:
                case HelloReceived(inventory_wanted=is_wanted):
                    deadline.reschedule(asyncio.get_running_loop().time() + self._limits.queued_s)
                    if is_wanted:
                        self._send_opening(self._node.build_hello)
                case ResumeRequest() as request:
                    self._open_again(request, deadline)
                case Welcome() as welcome:
                    self.spread_s = welcome.reconnect_spread_s
                    self._node.on_welcome(welcome)
                    self.is_open = True
                    if not self.welcomed.is_set():
                        self._take_over(self)
                        self.welcomed.set()
                    self.wake.set()
                    return
        raise Fault("the stream ended before Welcome")

    async def _requests(self) -> AsyncIterator[ConnectRequest]:
        # gRPC leaves this waiting for ever when the other side ended the stream, so the session ends it.
        while not self.retired:
            if self._refusal is not None:
                yield ConnectRequest(message=self._refusal)
                return
            if self._opening is not None:
                build, self._opening = self._opening, None
                yield build()
                continue
            message = self._node.next_message() if self.is_open else None
            if message is not None:
                yield message
                continue
            self.wake.clear()
            await self.wake.wait()


# Streams between connecting and Welcome at one time: enough to hide the controller's
# answer time, few enough that nobody waits out the deadline until the controller says that it has our Hello.
CONNECTS_AT_ONCE = 128
STREAM_CHECK_S = 0.5
REPORT_S = 5.0


class UplinkCertificates:
    """The agent's certificates for its streams, reloaded on change and shared by all nodes."""

    def __init__(self, files: TlsFiles) -> None:
        """Raises CertificateUnusable."""
        self._reloader = FileReloader(files.load_contents, name="uplink_tls", log=_LOG, errors=(CertificateUnusable,))

    @property
    def contents(self) -> TlsContents:
        """The newest that can be used."""
        return self._reloader.refresh()

    def read_version(self) -> int:
        """A number that changes when there are new ones."""
        self._reloader.refresh()
        return self._reloader.reloads


def open_channels(
    *, certificates: UplinkCertificates | None, insecure: bool, is_choice: bool = False
) -> Callable[[str], grpc.aio.Channel]:
    """Opens channels to controllers, each with a connection of its own; raises ListenError.

    `is_choice` says that there are several.
    """
    options = [("grpc.use_local_subchannel_pool", 1)]
    return lambda address: open_channel(
        address,
        tls=None if certificates is None else certificates.contents,
        insecure=insecure,
        is_choice=is_choice,
        options=options,
    )


def know_controllers(
    addresses: Sequence[str], *, certificates: UplinkCertificates | None, insecure: bool
) -> ControllerAddresses:
    """Returns the controllers of one agent; another one that a follower names is called where that would be protected."""

    def may_follow(address: str) -> bool:
        return may_connect(address, tls=None if certificates is None else certificates.contents, insecure=insecure)

    return ControllerAddresses(addresses, may_follow=may_follow)


class UplinkPool:
    """The streams of all nodes."""

    def __init__(
        self,
        nodes: Sequence[AgentNode],
        open_channel: Callable[[str], grpc.aio.Channel],
        *,
        controllers: ControllerAddresses,
        jitter: Callable[[], float],
        certificates: UplinkCertificates | None = None,
        limits: UplinkLimits | None = None,
    ) -> None:
        self._nodes = nodes
        self._reason = ""
        gate = asyncio.Semaphore(CONNECTS_AT_ONCE)
        self._uplinks = {
            node.name: Uplink(
                node,
                open_channel,
                controllers=controllers.order_for(node.name),
                gate=gate,
                jitter=jitter,
                report=self._reporter(node.name),
                limits=limits,
                tls_version=None if certificates is None else certificates.read_version,
            )
            for node in nodes
        }

    @property
    def connections_total(self) -> int:
        """Connections that the controller welcomed."""
        return sum(uplink.connections_total for uplink in self._uplinks.values())

    def drop_stalled(self, node: AgentNode) -> None:
        """Ends the stream of a node whose batches nobody acknowledges."""
        self._uplinks[node.name].drop_connection("no acknowledgement in time")

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
            await asyncio.sleep(STREAM_CHECK_S)
            quiet_s += STREAM_CHECK_S
            connected = sum(node.connected for node in self._nodes)
            whole = connected == len(self._nodes)
            if whole and connected != said:
                _LOG.info("event=connected streams=%d nodes=%d", connected, len(self._nodes))
                said, said_reason = connected, ""
            elif not whole and quiet_s >= REPORT_S and (connected, self._reason) != (said, said_reason):
                _LOG.warning("event=streams streams=%d nodes=%d last=%r", connected, len(self._nodes), self._reason)
                said, said_reason, quiet_s = connected, self._reason, 0.0
