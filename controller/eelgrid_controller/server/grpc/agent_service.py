"""AgentService: one bidirectional stream for each agent, from Hello to its end."""

import asyncio
import itertools
import logging
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

import grpc.aio

from eelgrid_controller.core.nodes import PlanClaim, check_plan_epoch, known_epoch, may_be_old
from eelgrid_controller.core.steps import CommitResult
from eelgrid_controller.energy.store.ledger_writer import LedgerWriter
from eelgrid_controller.errors import BatchRefused
from eelgrid_controller.runtime.loop import ControllerLoop
from eelgrid_controller.server.grpc.leader_terms import LeaderClaims
from eelgrid_controller.server.metrics.catalogue import build_family
from eelgrid_controller.state.agent_liveness import RegistrationLimiter, RegistrationRefused
from eelgrid_controller.state.attempts import is_stale
from eelgrid_controller.state.events import NodesRemoved
from eelgrid_controller.state.node_changes import NodeChangeKind, NodeChanges
from eelgrid_controller.state.telemetry import BatchReceipt, BatchVerdict, DeviceReports, PackedTick, Telemetry
from eelgrid_protos import codec
from eelgrid_protos.errors import Violation
from eelgrid_protos.faults import Aborted, Fault, InvalidArgument, NotFound, NotLeader, ResourceExhausted, Unavailable
from eelgrid_protos.messages import (
    RECONNECT_SPREAD_S_MOST,
    Acknowledgement,
    AttemptReport,
    Cadence,
    ConnectRequest,
    ConnectResponse,
    EnergyAcknowledgement,
    EnergyWindow,
    HeldDevices,
    Hello,
    HelloReceived,
    InputChunk,
    InputResult,
    Inventory,
    LogChunk,
    LogRequest,
    NodeEvent,
    NodeEventKind,
    NodePlan,
    PlanApplied,
    Policy,
    Resume,
    SampleBatch,
    TermRefused,
    Welcome,
)
from eelgrid_protos.openmetrics import MetricFamily
from eelgrid_protos.roles import Caller, peer_address

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


# From the stream's begin to its first message. On a busy machine this is the loops' lag on both sides, so it only
# ends streams that will never say anything; a connection has few of those (`transport.server_options`).
_HELLO_WITHIN_S = 120.0
# Agents that are being welcomed at one time: enough that the journal takes many at once, few enough that the first of
# ten thousand are there while the last still wait.
_WELCOMES_AT_ONCE = 64
# Reconnects a second that agents are spread over: an estimate for a controller on a busy core, not a measurement.
_RECONNECTS_PER_S = 500.0
_SESSIONS_MOST = 100_000
# Events of one node: 50 at once, then 5 a second. A node whose eight devices all fail and come back has 16.
_EVENTS_PER_S = 5.0
_EVENTS_AHEAD_S = 10.0
_DETAIL_SHOWN_MOST = 300
# Reports of one node that the journal has not written yet: those that come together are one commit.
_REPORTS_AHEAD_MOST = 16
# How soon it is looked whether plans may be sent again, after the lease could not be renewed.
_LEADS_AGAIN_S = 0.5
# Of one node at a time, and how long an agent may take beyond what it was told to wait.
_STREAM_REQUESTS_MOST = 256
_LOG_WITHIN_S = 10.0


def cadence_of(policy: Policy) -> Cadence:
    """How the policy wants agents to sample and send."""
    return Cadence(sample_interval_s=policy.sample_interval_s, send_interval_s=policy.send_interval_s)


def batches_per_acknowledgement(cadence: Cadence, lease_s: float) -> int:
    """Batches to one acknowledgement; see the module's theory."""
    if cadence.send_interval_s >= 2.0:
        return 1
    return max(1, min(4, cadence.window // 2, int(lease_s / 3.0 / cadence.send_interval_s)))


class AgentSession:
    """One stream, and the marks of what is to be told to its agent."""

    def __init__(self, node_name: str, plan_epoch: int) -> None:
        self.node_name = node_name
        self.sent_epoch = plan_epoch
        self.sequence = 0
        self.unacknowledged = 0
        self.is_acknowledgement_due = False
        self.is_plan_wanted = True
        # The agent let its plan go when the lease ran out: the same epoch is to be sent again.
        self.is_plan_forgotten = False
        self.cadence: Cadence | None = None
        self.energy: EnergyAcknowledgement | None = None
        self.ack_every = 1
        self.plan_not_before_s = 0.0
        # By when the events so far would have come at the pace that a node may have.
        self.event_due_s = 0.0
        self.wake = asyncio.Event()
        self.is_over = False
        self.end: Exception | None = None
        # What the opening claims, until the agent has answered Welcome: see core/nodes.py.
        self.claim: PlanClaim | None = None
        # Reports of processes that are queued and not on disk.
        self.reports: set[asyncio.Future[int]] = set()
        # Requests for output and chunks of input to send, and the answers that somebody waits for.
        self.stream_requests: deque[LogRequest | InputChunk] = deque()
        self._stream_answers: dict[int, asyncio.Future[LogChunk | InputResult]] = {}
        self._stream_numbers = itertools.count(1)

    def close(self, reason: Exception | None) -> None:
        """End the stream; the first reason stands."""
        if not self.is_over:
            self.is_over = True
            self.end = reason
            for answer in self._stream_answers.values():
                if not answer.done():
                    answer.set_exception(Unavailable(f"the agent of {self.node_name} is away; read the output again"))
        self.wake.set()

    async def read_log(self, request: LogRequest) -> LogChunk:
        """Asks the agent for output; raises Unavailable where it does not answer."""
        answer = await self._exchange(request, within_s=request.wait_s + _LOG_WITHIN_S)
        assert isinstance(answer, LogChunk)
        return answer

    async def write_input(self, chunk: InputChunk) -> InputResult:
        """Sends input and waits until the process has taken it, however long; raises Unavailable with the stream."""
        answer = await self._exchange(chunk, within_s=None)
        assert isinstance(answer, InputResult)
        return answer

    async def _exchange(self, request: LogRequest | InputChunk, *, within_s: float | None) -> LogChunk | InputResult:
        if self.is_over:
            raise Unavailable(f"the agent of {self.node_name} is away; read the output again")
        if len(self._stream_answers) >= _STREAM_REQUESTS_MOST:
            problem = f"{_STREAM_REQUESTS_MOST} readers of output of {self.node_name} wait; read it later"
            raise ResourceExhausted(problem)
        number = next(self._stream_numbers)
        answer: asyncio.Future[LogChunk | InputResult] = asyncio.get_running_loop().create_future()
        self._stream_answers[number] = answer
        self.stream_requests.append(replace(request, request_id=number))
        self.wake.set()
        try:
            async with asyncio.timeout(within_s):
                return await answer
        except TimeoutError:
            raise Unavailable(f"the agent of {self.node_name} sends no output; read it again") from None
        finally:
            del self._stream_answers[number]

    def on_stream_answer(self, found: LogChunk | InputResult) -> None:
        """An answer came; one that nobody waits for any more is dropped."""
        answer = self._stream_answers.get(found.request_id)
        if answer is not None and not answer.done():
            answer.set_result(found)

    def request_plan(self, *, not_before_s: float) -> None:
        """The node's plan changed; what changes until then goes with it."""
        if not self.is_plan_wanted:
            self.is_plan_wanted = True
            self.plan_not_before_s = not_before_s
            self.wake.set()

    def resend_plan(self) -> None:
        """The plan goes again, whatever its epoch."""
        self.is_plan_forgotten = True
        self.request_plan(not_before_s=0.0)

    def on_windows_written(self, energy: EnergyAcknowledgement) -> None:
        """Energy windows are on disk; the newest covers those before, and refusals that were not told yet go with it."""
        if self.energy is not None and self.energy.refused:
            refused, reason = self.energy.refused + energy.refused, energy.refused_reason or self.energy.refused_reason
            energy = replace(energy, refused=refused, refused_reason=reason)
        self.energy = energy
        self.wake.set()

    def on_batch(self, sequence: int) -> None:
        """A batch came; acknowledge when enough have."""
        self.sequence = max(self.sequence, sequence)
        self.unacknowledged += 1
        if self.unacknowledged >= self.ack_every:
            self.is_acknowledgement_due = True
            self.wake.set()


# Logged once per loss and return, by whichever way the news comes first: the event, or the inventory.
_LOGGED = {NodeChangeKind.GPU_LOST: "gpu_lost", NodeChangeKind.GPU_RETURNED: "gpu_returned"}
# What a device reports that works with errors; the overview shows it for a while.
_DEVICE_FAULTS = frozenset((NodeEventKind.XID, NodeEventKind.HEALTH, NodeEventKind.GPU_HUNG))
_DEVICE_FAULTS_MOST = 4096
_LOGGED_BY_COMMIT = frozenset((NodeEventKind.GPU_LOST, NodeEventKind.GPU_RETURNED))


class RegistrationGuard:
    """Limits how many new nodes one certificate, or address, may register, and counts what it refuses."""

    def __init__(
        self, most: int, *, caller_of: Callable[[Any], Caller | None] | None, monotonic_s: Callable[[], float]
    ) -> None:
        self._limits = RegistrationLimiter(most, now_s=monotonic_s())
        self._caller_of, self._monotonic_s = caller_of, monotonic_s
        self._refused = Counter(peer=0, all=0)

    def check_registration(self, node_name: str, context: Any) -> None:
        """Counts the registration of a new node; raises RegistrationRefused."""
        caller = None if self._caller_of is None else self._caller_of(context)
        if caller is not None and caller.nodes:
            # Such a certificate can register only the nodes that it names.
            return
        peer = peer_address(context).rpartition(":")[0] if caller is None else caller.subject or "(no name)"
        try:
            self._limits.register_node(node_name, peer, now_s=self._monotonic_s())
        except RegistrationRefused as refusal:
            self._refused[refusal.limit] += 1
            raise

    def families(self) -> Iterator[MetricFamily]:
        """Yields the metric of refused registrations."""
        yield build_family("eelgrid_registrations_refused_total", dict(self._refused))


class AgentService:
    """Serves every agent; implements `eelgrid_protos.rpc.AGENT_SERVICE`."""

    def __init__(
        self,
        *,
        loop: ControllerLoop,
        telemetry: Telemetry,
        energy: LedgerWriter,
        log: logging.Logger,
        monotonic_s: Callable[[], float],
        may_lead: Callable[[], bool] = lambda: True,
        admit_node: Callable[[str, Context], None] | None = None,
        register: Callable[[str, Context], None] | None = None,
    ) -> None:
        self._admit_node = admit_node
        # Asked when a node says Hello that was never seen.
        self._register = register
        self.events: Counter[NodeEventKind] = Counter()
        # The newest fault that was reported of a device, by node and UUID, with the monotonic time of its receipt.
        self.device_faults: OrderedDict[tuple[str, str], tuple[float, NodeEvent]] = OrderedDict()
        self.plans_sent = 0
        self.refused_batches = 0
        # Reports of processes that their workloads no longer have.
        self.stale_attempts = 0
        self.delayed_events = 0
        # Called with a node's name and a plan as it goes out, or what the agent says of one.
        self.listeners: list[Callable[[str, NodePlan | PlanApplied], None]] = []
        # Called with a batch that was not here before, and the node's inventory.
        self.batch_listeners: list[Callable[[Inventory, SampleBatch], None]] = []
        # Called with a stream's context and its session when its agent is welcomed.
        self.welcome_listeners: list[Callable[[Context, AgentSession], None]] = []
        self._loop = loop
        self._telemetry = telemetry
        self._energy = energy
        self._log = log
        self._monotonic_s = monotonic_s
        self.devices = DeviceReports(monotonic_s=monotonic_s)
        self.claims = LeaderClaims(loop, may_lead=may_lead, monotonic_s=monotonic_s, log=log)
        self._sessions: dict[str, AgentSession] = {}
        # Asyncio's semaphore lets in whoever came first.
        self._turns = asyncio.Semaphore(_WELCOMES_AT_ONCE)
        self._waiting = 0
        # By node: the fingerprint of its inventory, and the inventory that it was made of.
        self._digests: dict[str, tuple[Inventory | None, str]] = {}
        self._met: set[str] = set()  # nodes whose agents have said what they have, to this process
        self._policy = loop.core.state.policy
        telemetry.set_send_interval(self._policy.send_interval_s)
        self._changes = NodeChanges()
        self._changes.reset(loop.core.state.nodes)
        loop.listeners.append(self._on_commit)

    @property
    def connected(self) -> int:
        """Streams that are open."""
        return len(self._sessions)

    def is_connected(self, node_name: str) -> bool:
        """Whether the node's agent is here."""
        return node_name in self._sessions

    async def read_log(self, node_name: str, request: LogRequest) -> LogChunk:
        """Asks the agent of a node for output of a process; raises Unavailable while it is away."""
        session = self._sessions.get(node_name)
        if session is None:
            raise Unavailable(f"the agent of {node_name}, which has the output, is away; read it when it is back")
        return await session.read_log(request)

    async def write_input(self, node_name: str, chunk: InputChunk) -> InputResult:
        """Sends input to a process of a node; raises Unavailable while its agent is away."""
        session = self._sessions.get(node_name)
        if session is None:
            raise Unavailable(f"the agent of {node_name}, where the process runs, is away; attach when it is back")
        return await session.write_input(chunk)

    def is_node_reported(self, node_name: str) -> bool:
        """Whether an agent tells what a node is: one that is connected, or whose inventory is the newest."""
        record = self._loop.core.state.nodes.get(node_name)
        return node_name in self._sessions or (record is not None and record.inventory.agent_version != "")

    def is_report_pending(self, node_name: str) -> bool:
        """Whether an agent speaks for a node and has not said yet, to this process, what the node has now."""
        return node_name not in self._met and self.is_node_reported(node_name)

    def close(self) -> None:
        """End every stream, so that the server can stop at once."""
        for session in self._sessions.values():
            session.close(NotLeader("the controller is stopping; connect again"))

    def _on_commit(self, committed: CommitResult) -> None:
        now_s, nodes = self._monotonic_s(), self._loop.core.state.nodes
        not_before_s = now_s + self._loop.config.plan_interval_s
        for name in committed.nodes:
            session = self._sessions.get(name)
            if session is not None:
                # A process starts in milliseconds: its GPU does not wait for other changes.
                runs_processes = name in nodes and nodes[name].inventory.runs_processes
                session.request_plan(not_before_s=now_s if runs_processes else not_before_s)
        for event in committed.events:
            for change in self._changes.observe(event):
                if change.kind in _LOGGED:
                    self._log.warning(
                        "node=%s event=%s gpu=%s index=%s",
                        change.node_name,
                        _LOGGED[change.kind],
                        change.gpu_uuid,
                        "-" if change.gpu_index is None else change.gpu_index,
                    )
        for event in committed.events:
            if isinstance(event, NodesRemoved):
                for name in event.node_names:
                    self._forget_node(name)
        policy = self._loop.core.state.policy
        if policy.revision != self._policy.revision:
            self._policy = policy
            self._telemetry.set_send_interval(policy.send_interval_s)
            for session in self._sessions.values():
                session.cadence = cadence_of(policy)
                session.ack_every = batches_per_acknowledgement(session.cadence, policy.lease_s)
                session.request_plan(not_before_s=not_before_s)

    def _forget_node(self, node_name: str) -> None:
        """A node is no more; what its agent told is dropped, and an agent that is here begins anew."""
        if node_name in self._loop.core.state.nodes:
            # Joined again in the same commit.
            return
        self._telemetry.forget_node(node_name)
        self.devices.newest.pop(node_name, None)
        session = self._sessions.get(node_name)
        if session is not None:
            session.close(Aborted("the node was removed by an operator; connect again to register it anew"))

    async def connect(
        self, requests: AsyncIterator[ConnectRequest], context: Context
    ) -> AsyncIterator[ConnectResponse]:
        """One agent's stream."""
        opening = await _opening(requests)
        name = opening.node_name if isinstance(opening, Resume) else opening.inventory.node_name
        if self._admit_node is not None:
            self._admit_node(name, context)
        if self._register is not None and name not in self._loop.core.state.nodes:
            self._register(name, context)
        await self.claims.check(name, opening.term)
        # Before it takes the place of an honest stream.
        await self._loop.read(lambda core: check_plan_epoch(core.state, name, opening.plan_epoch))
        session = AgentSession(name, opening.plan_epoch)
        older = self._sessions.get(name)
        if older is None and len(self._sessions) >= _SESSIONS_MOST:
            raise ResourceExhausted(f"{_SESSIONS_MOST} agents are connected already; add a controller")
        self._sessions[name] = session
        if older is not None:
            self._log.warning("node=%s stream=replaced", name)
            older.close(Aborted(f"another stream said Hello as {name}; give each agent its own --node-name"))
        self._loop.presence.mark_connected(name)
        reader: asyncio.Task[None] | None = None
        try:
            if isinstance(opening, Resume) and await self._known(opening) is None:
                yield ConnectResponse(message=HelloReceived(inventory_wanted=True))
                opening = await _hello(requests, name)
            if self._turns.locked():
                yield ConnectResponse(message=HelloReceived(ahead=self._waiting))
            welcome = await self._welcome(session, opening)
            for listener in self.welcome_listeners:
                listener(context, session)
            yield ConnectResponse(message=welcome)
            reader = asyncio.create_task(self._read(session, requests))
            async for message in self._outgoing(session):
                yield ConnectResponse(message=message)
        finally:
            session.close(None)
            if reader is not None:
                reader.cancel()
            if self._sessions.get(name) is session:
                del self._sessions[name]
                grace_s = self._loop.config.away_grace_s + self._spread_s()
                self._loop.presence.mark_disconnected(name, deadline_s=self._monotonic_s() + grace_s)

    async def _known(self, opening: Resume) -> Inventory | None:
        """The inventory that an agent means by its fingerprint; None where we need to be told all of it.

        An agent whose plan is beyond what we know of tells what it holds, too: see core/nodes.py.
        """
        record = await self._loop.read(lambda core: core.state.nodes.get(opening.node_name))
        if record is None:
            self._digests.pop(opening.node_name, None)
            return None
        if opening.plan_epoch > known_epoch(record):
            return None
        inventory, known = self._digests.get(opening.node_name, (None, ""))
        if inventory is not record.inventory:
            known = codec.digest_message(record.inventory)
            self._digests[opening.node_name] = record.inventory, known
        return record.inventory if known == opening.inventory_digest else None

    async def _welcome(self, session: AgentSession, opening: Hello | Resume) -> Welcome:
        """Takes a node in, in turn; nothing ends the wait but the end of the stream."""
        self._waiting += 1
        try:
            async with self._turns:
                inventory = await self._known(opening) if isinstance(opening, Resume) else opening.inventory
                if inventory is None:
                    raise Aborted("the node was described anew by another stream; connect again")
                await self._join(session, inventory, opening)
                session.sequence = self._telemetry.open_stream(inventory, opening.incarnation)
        finally:
            self._waiting -= 1
        cadence = cadence_of(self._policy)
        session.ack_every = batches_per_acknowledgement(cadence, self._policy.lease_s)
        return Welcome(
            acknowledged_sequence=session.sequence,
            cadence=cadence,
            resumes=True,
            reconnect_spread_s=self._spread_s(),
            term=self._loop.term,
            wants_ended_attempts=self._loop.core.state.losses.withholds_starts,
        )

    def _spread_s(self) -> float:
        """Over how long all agents should come back."""
        return min(RECONNECT_SPREAD_S_MOST, len(self._loop.core.state.nodes) / _RECONNECTS_PER_S)

    async def _join(self, session: AgentSession, inventory: Inventory, opening: Hello | Resume) -> None:
        """Take the node in; an agent ahead of the journal says that this lost entries."""
        name, epoch = inventory.node_name, opening.plan_epoch
        held = opening.held if isinstance(opening, Hello) else None
        # Under an engine that lists what runs, that listing is the truth, and a takeover finds agents of its predecessor.
        claim = (
            PlanClaim(epoch=epoch, held=None if held is None else held.assignments)
            if self._loop.config.kubernetes is None
            else None
        )
        await self._loop.register_node(inventory, plan_epoch=epoch, claim=claim)
        session.claim = claim if may_be_old(self._loop.core.state.nodes.get(name), claim) else None
        self._met.add(name)
        if session.claim is None:
            self._log_loss(name, epoch)

    def _confirm_claim(self, session: AgentSession) -> None:
        """The agent has answered Welcome: what its opening claims is compared with the journal now, if it was not before."""
        claim, session.claim = session.claim, None
        if claim is None:
            return
        try:
            answer = self._loop.queue_confirmation(session.node_name, claim)
        except Fault as fault:
            session.close(fault)
        else:
            answer.add_done_callback(partial(self._on_claim_compared, session, claim.epoch))

    def _on_claim_compared(self, session: AgentSession, epoch: int, answer: asyncio.Future[None]) -> None:
        if answer.cancelled():
            return
        if (fault := answer.exception()) is not None:
            session.close(fault if isinstance(fault, Exception) else None)
            return
        self._log_loss(session.node_name, epoch)
        session.request_plan(not_before_s=0.0)

    def _log_loss(self, name: str, epoch: int) -> None:
        record = self._loop.core.state.nodes.get(name)
        if record is not None and record.ahead is not None:
            self._log.error(
                "node=%s ahead_of_journal=yes agent_epoch=%d unknown_assignments=%s workloads=%s "
                "action=nothing_placed remedy='the journal lost entries: look at what runs there, then eelctl reconcile'",
                name,
                epoch,
                "?" if record.ahead.assignments is None else record.ahead.assignments,
                ",".join(record.ahead.workload_ids) or "-",
            )

    async def _outgoing(
        self, session: AgentSession
    ) -> AsyncIterator[Acknowledgement | Cadence | NodePlan | EnergyAcknowledgement | LogRequest | InputChunk]:
        """What is to be told, in its newest form, until the session is over."""
        while not session.is_over:
            session.wake.clear()
            if session.is_acknowledgement_due:
                session.is_acknowledgement_due = False
                session.unacknowledged = 0
                yield Acknowledgement(sequence=session.sequence)
            if session.cadence is not None:
                cadence, session.cadence = session.cadence, None
                yield cadence
            if session.energy is not None:
                energy, session.energy = session.energy, None
                yield energy
            while session.stream_requests:
                yield session.stream_requests.popleft()
            if session.is_plan_wanted:
                wait_s = session.plan_not_before_s - self._monotonic_s()
                if not self._loop.may_lead:
                    # The database may be back, or this process ends.
                    wait_s = _LEADS_AGAIN_S
                if wait_s > 0.0:
                    asyncio.get_running_loop().call_later(wait_s, session.wake.set)
                else:
                    session.is_plan_wanted = False
                    plan = await self._loop.read(lambda core: core.plan_to_send(session.node_name))
                    if plan is None:
                        continue
                    if plan.epoch > session.sent_epoch or (plan.epoch and session.is_plan_forgotten):
                        session.is_plan_forgotten = False
                        session.sent_epoch = plan.epoch
                        self.plans_sent += 1
                        self._trace_plan_message(session.node_name, plan)
                        yield plan
            if not session.is_over:
                await session.wake.wait()
        if session.end is not None:
            raise session.end

    async def _read(self, session: AgentSession, requests: AsyncIterator[ConnectRequest]) -> None:
        """Take what the agent says until it stops or breaks the contract."""
        try:
            async for request in requests:
                await self._handle_message(session, request)
                if session.is_over:
                    return
        except Exception as error:  # noqa: BLE001  # the stream ends with it; rpc turns it into a status
            session.close(error)
        else:
            session.close(None)

    async def _handle_message(self, session: AgentSession, request: ConnectRequest) -> None:
        self._confirm_claim(session)
        match request.message:
            case SampleBatch() as batch:
                self._sample(session, batch)
            case Inventory() as inventory:
                if inventory.node_name != session.node_name:
                    raise _invalid("inventory.node_name", f"is {inventory.node_name}", f"stay {session.node_name}")
                await self._loop.register_node(inventory)
                self._telemetry.update_inventory(inventory)
            case EnergyWindow() as window:
                inventory = self._loop.core.state.nodes[session.node_name].inventory
                self._energy.add_window(inventory, window, session.on_windows_written)
            case NodeEvent() as event:
                await self._event(session, event)
            case PlanApplied() as applied:
                if applied.epoch > session.sent_epoch:
                    raise _invalid("applied.epoch", f"is {applied.epoch}, a plan never sent", "name a plan that came")
                self._telemetry.record_plan_applied(session.node_name, applied)
                self._trace_plan_message(session.node_name, applied)
            case AttemptReport() as report:
                # Before it may end a workload: of a job's own node alone.
                workloads = self._loop.core.state.workloads
                for status in report.attempts:
                    if not is_stale(workloads.get(status.workload_id), session.node_name, status):
                        self._telemetry.progress.record(status)
                await self._queue_report(session, report)
            case LogChunk() | InputResult() as answer:
                session.on_stream_answer(answer)
            case HeldDevices() as held:
                self.devices.record_report(session.node_name, held)
            case TermRefused() as told:
                await self.claims.on_refusal(session.node_name, told)
                raise Aborted("the agent obeys another leader; it connects again")
            case Hello() | Resume():
                raise _invalid("hello", "comes a second time", "send Hello once, first")
            case None:
                # A newer agent says something that this version does not know.
                pass

    async def _queue_report(self, session: AgentSession, report: AttemptReport) -> None:
        """Queues a report, and lets the stream be read on: what follows may go to disk with it."""
        if len(session.reports) >= _REPORTS_AHEAD_MOST:
            await asyncio.wait(session.reports, return_when=asyncio.FIRST_COMPLETED)
        if session.is_over:
            return
        answer = self._loop.queue_attempts(session.node_name, report.attempts)
        session.reports.add(answer)
        answer.add_done_callback(partial(self._on_report_written, session))

    def _on_report_written(self, session: AgentSession, answer: asyncio.Future[int]) -> None:
        """A report is on disk, or was refused: then the agent tells it again, on another stream."""
        session.reports.discard(answer)
        if answer.cancelled():
            return
        if (fault := answer.exception()) is not None:
            session.close(fault if isinstance(fault, Exception) else None)
        else:
            self.stale_attempts += answer.result()

    def _trace_plan_message(self, node_name: str, message: NodePlan | PlanApplied) -> None:
        for listener in self.listeners:
            listener(node_name, message)

    def receive_tick(self, session: AgentSession, tick: PackedTick) -> bool:
        """Receives a batch whose last tick an ingest process hands on; False if it is left out, and its stream ends."""
        self._confirm_claim(session)
        if session.is_over:
            return False
        try:
            receipt = self._telemetry.receive_tick(session.node_name, tick, now_s=self._monotonic_s())
        except BatchRefused as error:
            session.close(self._refuse_batch(session, tick.sequence, error))
            return False
        self._tell_batch(session, receipt, tick)
        return True

    @property
    def ack_every(self) -> int:
        """Batches to one acknowledgement under the policy in force."""
        return batches_per_acknowledgement(cadence_of(self._policy), self._policy.lease_s)

    def _refuse_batch(self, session: AgentSession, sequence: int, error: BatchRefused) -> Fault:
        self.refused_batches += 1
        self._log.warning("node=%s sequence=%d batch=refused reason=%s", session.node_name, sequence, error)
        return _invalid(error.field, error.problem, error.remedy)

    def _sample(self, session: AgentSession, batch: SampleBatch) -> None:
        try:
            receipt = self._telemetry.receive_batch(session.node_name, batch, now_s=self._monotonic_s())
        except BatchRefused as error:
            raise self._refuse_batch(session, batch.sequence, error) from error
        session.on_batch(receipt.sequence)
        self._tell_batch(session, receipt, batch)

    def _tell_batch(self, session: AgentSession, receipt: BatchReceipt, batch: SampleBatch | PackedTick) -> None:
        if not self.batch_listeners or receipt.verdict is not BatchVerdict.TAKEN:
            return
        record = self._loop.core.state.nodes.get(session.node_name)
        if record is not None:
            batch = batch.to_batch() if isinstance(batch, PackedTick) else batch
            for listener in self.batch_listeners:
                listener(record.inventory, batch)

    async def _event(self, session: AgentSession, event: NodeEvent) -> None:
        self.events[event.kind] += 1
        if event.kind in _DEVICE_FAULTS and event.gpu_uuid:
            key = session.node_name, event.gpu_uuid
            self.device_faults[key] = self._monotonic_s(), event
            self.device_faults.move_to_end(key)
            while len(self.device_faults) > _DEVICE_FAULTS_MOST:
                self.device_faults.popitem(last=False)
        wait_s = session.event_due_s - self._monotonic_s()
        if wait_s > _EVENTS_AHEAD_S:
            # The stream is not read on meanwhile, so who sends more waits at home.
            self.delayed_events += 1
            await asyncio.sleep(wait_s - _EVENTS_AHEAD_S)
        session.event_due_s = max(session.event_due_s, self._monotonic_s()) + 1.0 / _EVENTS_PER_S
        if event.kind not in _LOGGED_BY_COMMIT:
            self._log.info(
                "node=%s event=%s gpu=%s detail=%s",
                session.node_name,
                event.kind.name.lower(),
                event.gpu_uuid or "-",
                event.detail[:_DETAIL_SHOWN_MOST] or "-",
            )
        try:
            if event.kind is NodeEventKind.GPU_LOST:
                await self._loop.mark_gpu_lost(session.node_name, event.gpu_uuid)
            elif event.kind is NodeEventKind.GPU_RETURNED:
                await self._loop.mark_gpu_returned(session.node_name, event.gpu_uuid)
            elif event.kind is NodeEventKind.LEASE_EXPIRED:
                session.resend_plan()
        except NotFound:
            # The device has left the inventory since: it is gone already, and the agent did nothing wrong.
            self._log.info(
                "node=%s gpu=%s event=passed_over reason=not_in_inventory", session.node_name, event.gpu_uuid
            )


async def _opening(requests: AsyncIterator[ConnectRequest]) -> Hello | Resume:
    """The first message; a stream that does not begin with Hello in time is closed."""
    try:
        async with asyncio.timeout(_HELLO_WITHIN_S):
            first = await anext(requests, None)
    except TimeoutError:
        raise _invalid("hello", f"did not come within {_HELLO_WITHIN_S:g} s", "send Hello first") from None
    if first is None or not isinstance(first.message, Hello | Resume):
        raise _invalid("hello", "is not the first message", "send Hello first")
    return first.message


async def _hello(requests: AsyncIterator[ConnectRequest], node_name: str) -> Hello:
    """Hello of the same node, which we asked for."""
    hello = await _opening(requests)
    if not isinstance(hello, Hello) or hello.inventory.node_name != node_name:
        raise _invalid("hello", f"is none of {node_name}", "answer inventory_wanted with Hello")
    return hello


def _invalid(field: str, problem: str, remedy: str) -> Fault:
    return InvalidArgument("the stream breaks the contract", (Violation(field, problem, remedy),))
