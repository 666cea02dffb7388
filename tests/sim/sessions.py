"""The controller's side of the agents' streams, transcribed from `eelgrid_controller.server.grpc.agent_service`.

Owns who is connected and what is still to be told to each, with the real codec,
telemetry and rules of cadence. A session takes one message at a time: while a
command waits for its commit, what follows waits behind it.
"""

from collections import deque
from typing import Any

from eelgrid_controller.core.nodes import PlanClaim, check_plan_epoch, may_be_old
from eelgrid_controller.errors import BatchRefused
from eelgrid_controller.server.grpc.agent_service import batches_per_acknowledgement, cadence_of
from eelgrid_protos.codec import decode_message, encode_message
from eelgrid_protos.errors import ContractError
from eelgrid_protos.faults import InvalidArgument, NotFound
from eelgrid_protos.messages import (
    Acknowledgement,
    Cadence,
    ConnectRequest,
    ConnectResponse,
    Hello,
    Inventory,
    LeaderTerm,
    NodeEvent,
    NodeEventKind,
    PlanApplied,
    SampleBatch,
    Welcome,
)
from tests.sim.clock import seconds
from tests.sim.life import AWAY_GRACE_S, Committed, Life
from tests.sim.network import CONTROLLER, Connection
from tests.sim.poison import ROGUE

__all__ = ["Session", "Sessions"]

PLAN_INTERVAL_S = 0.1
HELLO_WITHIN_S = 10.0


class Session:
    """One stream."""

    def __init__(self, owner: "Sessions", connection: Connection) -> None:
        self._owner = owner
        self._life = owner.life
        self._connection = connection
        self._inbox: deque[bytes] = deque()
        self._is_taking = False
        self.hello: Hello | None = None
        # What Hello claims; after Welcome, only what is to be compared when the agent has answered.
        self._claim: PlanClaim | None = None
        self.is_welcomed = False
        self.is_over = False
        self.sequence = 0
        self.sent_epoch = 0
        self.unacknowledged = 0
        self.ack_every = 1
        self.is_acknowledgement_due = False
        self.is_plan_wanted = True
        self.is_plan_forgotten = False
        self.cadence: Cadence | None = None
        self._plan_not_before_s = 0.0
        self._life.later(seconds(HELLO_WITHIN_S), self._hello_overdue)

    # The stream's end

    def received(self, data: bytes) -> None:
        """The next message."""
        self._inbox.append(data)
        self._take()

    def closed(self, reason: str) -> None:
        """The agent is gone."""
        self.end(reason)

    def end(self, reason: str) -> None:
        """The stream is over."""
        if self.is_over or self._life.is_dead:
            return
        self.is_over = True
        name = self.hello.inventory.node_name if self.hello else "-"
        self._life.timeline.note(f"controller session over node={name} reason={reason}")
        self._connection.close(CONTROLLER, reason)
        self._owner.left(self)

    def _accuse(self, problem: str) -> None:
        """The agent breaks the contract; in fair weather a real agent never does."""
        if self.hello is None or not self.hello.inventory.node_name.startswith(ROGUE):
            self._life.ledger.accused(problem)
        self.end(problem)

    def _hello_overdue(self) -> None:
        if self.hello is None:
            self.end("Hello did not come")

    # Taking

    def _take(self) -> None:
        """Messages in order, one at a time."""
        while self._inbox and not self._is_taking and not self.is_over and not self._life.is_dead:
            try:
                message = decode_message(ConnectRequest, self._inbox.popleft()).message
                if self.hello is None:
                    self._greet(message)
                else:
                    self._handle(message)
            except (ContractError, BatchRefused) as error:
                self._accuse(str(error))

    def _command(self, apply: Any, then: Any, *, pass_over: bool = False) -> None:
        """A change; what follows on the stream waits for it."""
        self._is_taking = True

        def answered(_: Any, fault: Exception | None) -> None:
            self._is_taking = False
            if isinstance(fault, NotFound) and pass_over:
                then()
            elif isinstance(fault, NotFound | InvalidArgument):
                self._accuse(str(fault))
            elif fault is not None:
                self.end(str(fault))
            elif not self.is_over:
                then()
            self._take()

        self._life.command(apply, answered)

    def _greet(self, message: Any) -> None:
        if not isinstance(message, Hello):
            self._accuse("Hello is not the first message")
            return
        self.hello = message
        self.sent_epoch = message.plan_epoch
        try:
            check_plan_epoch(self._life.core.state, message.inventory.node_name, message.plan_epoch)
        except InvalidArgument as error:
            self.hello = None
            self.end(str(error))
            return
        self._owner.arrived(self)
        epoch = message.plan_epoch
        claim = self._claim = PlanClaim(epoch=epoch, held=None if message.held is None else message.held.assignments)
        self._command(
            lambda core, now_ns: core.register_node(message.inventory, now_ns=now_ns, plan_epoch=epoch, claim=claim),
            self._welcome,
        )

    def _welcome(self) -> None:
        assert self.hello is not None
        record = self._life.core.state.nodes[self.hello.inventory.node_name]
        if not may_be_old(record, self._claim):
            self._claim = None
            self._life.ledger.joined(self.hello, record)
        self.sequence = self._life.telemetry.open_stream(self.hello.inventory, self.hello.incarnation)
        policy = self._owner.policy
        cadence = cadence_of(policy)
        self.ack_every = batches_per_acknowledgement(cadence, policy.lease_s)
        self._send(Welcome(acknowledged_sequence=self.sequence, cadence=cadence, term=self._owner.term))
        self.is_welcomed = True
        self.pump()

    def _confirm_claim(self) -> None:
        """The agent has answered: what it claims is compared before anything that it says."""
        claim, self._claim = self._claim, None
        if claim is not None and self.hello is not None:
            name = self.hello.inventory.node_name
            self._life.command(
                lambda core, now_ns: core.confirm_claim(name, claim, now_ns=now_ns),
                lambda _, fault: self._on_claim_compared(fault),
            )

    def _on_claim_compared(self, fault: Exception | None) -> None:
        if self.is_over or self.hello is None:
            return
        if fault is not None:
            self.end(str(fault))
            return
        record = self._life.core.state.nodes.get(self.hello.inventory.node_name)
        if record is not None:
            self._life.ledger.joined(self.hello, record)
        self.is_plan_wanted = True
        self.pump()

    def _handle(self, message: Any) -> None:
        assert self.hello is not None
        self._confirm_claim()
        name = self.hello.inventory.node_name
        match message:
            case SampleBatch():
                if name.startswith(ROGUE):
                    receipt = self._life.telemetry.receive_batch(name, message, now_s=self._life.clock.monotonic_s())
                else:
                    receipt = self._life.ledger.receive(self._life.telemetry, self.hello, message, self._life.clock)
                self._took(receipt.sequence)
            case Inventory() if message.node_name != name:
                self._accuse("another node's inventory")
            case Inventory():
                telemetry = self._life.telemetry
                self._command(
                    lambda core, now_ns: core.register_node(message, now_ns=now_ns),
                    lambda: telemetry.update_inventory(message),
                )
            case NodeEvent():
                self._event(name, message)
            case PlanApplied():
                if message.epoch > self.sent_epoch:
                    self._accuse(f"epoch {message.epoch} was never sent")
                else:
                    self._life.telemetry.record_plan_applied(name, message)
            case Hello():
                self._accuse("Hello comes a second time")
            case _:
                pass

    def _event(self, name: str, event: NodeEvent) -> None:
        def turn(core: Any, now_ns: int) -> Any:
            method = core.mark_gpu_lost if event.kind is NodeEventKind.GPU_LOST else core.mark_gpu_returned
            return method(name, event.gpu_uuid, now_ns=now_ns)

        if event.kind in (NodeEventKind.GPU_LOST, NodeEventKind.GPU_RETURNED):
            # A device that has left the inventory is gone already.
            self._command(turn, lambda: None, pass_over=True)
        elif event.kind is NodeEventKind.LEASE_EXPIRED:
            self.is_plan_forgotten = self.is_plan_wanted = True
            self.pump()

    def _took(self, sequence: int) -> None:
        self.sequence = max(self.sequence, sequence)
        self.unacknowledged += 1
        if self.unacknowledged >= self.ack_every:
            self.is_acknowledgement_due = True
            self.pump()

    # Telling

    def pump(self) -> None:
        """What is to be told, in its newest form."""
        if self.is_over or not self.is_welcomed or self._life.is_dead:
            return
        if self.is_acknowledgement_due:
            self.is_acknowledgement_due = False
            self.unacknowledged = 0
            self._send(Acknowledgement(sequence=self.sequence))
        if self.cadence is not None:
            cadence, self.cadence = self.cadence, None
            self._send(cadence)
        if self.is_plan_wanted:
            wait_s = self._plan_not_before_s - self._life.clock.monotonic_s()
            if wait_s > 0.0:
                # Rounding up, since a timer that is early by a nanosecond would be set again and again.
                self._life.later(seconds(wait_s) + 1000, self.pump)
            else:
                self.is_plan_wanted = False
                self._life.read(self._tell_plan)

    def _tell_plan(self) -> None:
        assert self.hello is not None
        plan = self._life.core.plan_to_send(self.hello.inventory.node_name)
        if plan is None:
            return
        if self.is_over or (plan.epoch <= self.sent_epoch and not self.is_plan_forgotten) or not plan.epoch:
            return
        self.is_plan_forgotten = False
        self.sent_epoch = plan.epoch
        self._plan_not_before_s = self._life.clock.monotonic_s() + PLAN_INTERVAL_S
        self._life.ledger.plan_sent(plan)
        self._send(plan)

    def _send(self, message: Any) -> None:
        self._connection.send(CONTROLLER, encode_message(ConnectResponse(message=message)))


class Sessions:
    """Every stream of one life of the controller."""

    session_type: type[Session] = Session

    @property
    def term(self) -> LeaderTerm | None:
        """What agents are told of the term; nothing where no other can lead."""
        return None

    def __init__(self, life: Life) -> None:
        self.life = life
        self.policy = life.core.state.policy
        self.by_node: dict[str, Session] = {}
        life.listeners.append(self._on_commit)

    def accept(self, connection: Connection) -> Session:
        """A new stream, from somebody yet unknown."""
        return self.session_type(self, connection)

    def arrived(self, session: Session) -> None:
        """Said Hello; the second stream of one node wins."""
        assert session.hello is not None
        name = session.hello.inventory.node_name
        older = self.by_node.get(name)
        self.by_node[name] = session
        if older is not None:
            older.end("replaced by another stream")
        self.life.presence.mark_connected(name)

    def left(self, session: Session) -> None:
        """Its stream is over."""
        name = session.hello.inventory.node_name if session.hello else ""
        if self.by_node.get(name) is session:
            del self.by_node[name]
            self.life.presence.mark_disconnected(name, deadline_s=self.life.clock.monotonic_s() + AWAY_GRACE_S)

    def _on_commit(self, committed: Committed) -> None:
        # In the order of connecting, since the order of a set differs between processes.
        for name, session in list(self.by_node.items()):
            if name in committed.nodes:
                session.is_plan_wanted = True
                session.pump()
        policy = self.life.core.state.policy
        if policy.revision != self.policy.revision:
            self.policy = policy
            self.life.telemetry.set_send_interval(policy.send_interval_s)
            for session in list(self.by_node.values()):
                session.cadence = cadence_of(policy)
                session.ack_every = batches_per_acknowledgement(session.cadence, policy.lease_s)
                session.is_plan_wanted = True
                session.pump()
