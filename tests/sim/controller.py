"""The controller's machine: a journal that outlives processes, and the process that runs now, if one does.

Owns starting and crashing. A crash takes everything but the journal, at any
moment between two events, thus also between a commit and its answers.
"""

from typing import Any

from eelgrid_controller.errors import JournalLost, LostEntries
from eelgrid_controller.placement.migration_planner import build_migration_problem, recommend_moves
from eelgrid_controller.state.cordons import DrainTerms
from eelgrid_protos.codec import encode_message
from eelgrid_protos.faults import Fault, NotFound
from eelgrid_protos.messages import (
    ApplyMovesRequest,
    ApplyMovesResponse,
    CancelWorkloadRequest,
    CancelWorkloadResponse,
    DrainNodeRequest,
    DrainNodeResponse,
    GetPolicyRequest,
    GetPolicyResponse,
    Node,
    Recommendation,
    RecommendMovesRequest,
    RecommendMovesResponse,
    ReconcileNodeRequest,
    ReconcileNodeResponse,
    ScaleWorkloadRequest,
    ScaleWorkloadResponse,
    SubmitWorkloadRequest,
    SubmitWorkloadResponse,
    UncordonNodeRequest,
    UncordonNodeResponse,
    UpdatePolicyRequest,
    UpdatePolicyResponse,
)
from tests.sim.broken import demand
from tests.sim.clock import Clock
from tests.sim.disk import Disk
from tests.sim.ledger import Ledger
from tests.sim.life import Apply, Life
from tests.sim.network import CONTROLLER, Connection, End, Network
from tests.sim.sessions import Sessions
from tests.sim.timeline import Timeline
from tests.sim.users import Reply

__all__ = ["Controller"]


class Controller:
    """See the module."""

    address = ""

    def __init__(
        self, timeline: Timeline, network: Network, ledger: Ledger, disk: Disk, life_type: type[Life], *, drift_ppm: int
    ) -> None:
        self.timeline = timeline
        self.ledger = ledger
        self.disk = disk
        self.clock = Clock(lambda: timeline.now_ns, drift_ppm=drift_ppm)
        self.life: Life | None = None
        self.sessions: Sessions
        self.crashes = 0
        # What the disk lost below its mark since the last start.
        self.untold: LostEntries | None = None
        # What a start told last, and how many entries there were.
        self._told: tuple[LostEntries, int] | None = None
        # What operators were recommended; a process that dies forgets it.
        self._kept: dict[str, Recommendation] = {}
        self._life_type = life_type
        self._network = network

    def start(self) -> None:
        """A process starts from what the journal holds, unless one runs; where entries are gone, somebody accepts it."""
        if self.life is not None:
            return
        try:
            journal = self.disk.open()
        except JournalLost as error:
            self.timeline.note(f"controller refused to start: {error.lost}")
            # A start whose first entry never reached the disk is followed by one that tells the same again.
            is_again = self.untold is None and (error.lost, len(self.ledger.entries)) == self._told
            demand(9, is_again or error.lost == self.untold, f"{error.lost} was told, {self.untold} was lost")
            self._told = error.lost, len(self.ledger.entries)
            journal = self.disk.open(accepts_loss=True)
        else:
            demand(9, self.untold is None, f"{self.untold} was lost and acknowledged, and the start says nothing")
        self.untold = None
        life = self._life_type(self.timeline, self.clock, journal, self.ledger)
        self.ledger.recovered(life.core.state)
        self.life, self.sessions = life, Sessions(life)
        self._network.listeners[self.address] = self.accept
        self.timeline.note(f"controller started revision={life.core.state.revision}")

    def crash(self) -> None:
        """The process dies at once; the kernel ends its streams."""
        if self.life is None:
            return
        self.life.is_dead = True
        self.life = None
        self._kept.clear()
        self.crashes += 1
        self.disk.crashed()
        self._network.listeners.pop(self.address, None)
        for connection in self._network.connections:
            if connection.address == self.address:
                connection.close(CONTROLLER, "connection reset")
        self.timeline.note("controller crashed")

    def roll_back(self, *, with_mark: bool) -> None:
        """The disk of a controller that does not run goes back to an earlier commit, its mark too or not."""
        last = len(self.ledger.entries)
        left = self.disk.roll_back(self.timeline.rng, last, with_mark=with_mark)
        highest = last if self.untold is None else self.untold.last
        if self.untold is None and self._told is not None and self._told[1] == last:
            # That the loss was accepted never reached the disk.
            highest = self._told[0].last
        self.untold = None if with_mark or left == highest else LostEntries(left + 1, highest)
        if with_mark:
            # With the mark it is forgotten that anything was told.
            self._told = None
        self.ledger.rolled_back(left)
        self.timeline.note(f"controller's disk rolled back from {last} to {left}, mark {with_mark}")

    @property
    def ahead(self) -> list[str]:
        """Nodes that hold more than the journal knows, as an operator sees them who waits for agents that are to come back."""
        nodes = {} if self.life is None else self.life.core.state.nodes
        return [name for name, record in nodes.items() if record.ahead is not None and record.is_reported]

    def accept(self, connection: Connection) -> End:
        """Takes a new stream."""
        return self.sessions.accept(connection)

    # Operators

    def serve(self, request: Any, reply: Reply) -> None:
        """Answers a call once what it did is on disk; a dead process answers nobody."""
        life = self.life
        if life is None:
            return
        match request:
            case GetPolicyRequest():
                life.read(lambda: reply(encode_message(GetPolicyResponse(policy=life.core.state.policy))))
            case SubmitWorkloadRequest():
                self._change(
                    life,
                    lambda core, now_ns: core.submit(request, now_ns=now_ns),
                    lambda workload: SubmitWorkloadResponse(workload=workload),
                    reply,
                )
            case CancelWorkloadRequest():
                self._change(
                    life,
                    lambda core, now_ns: core.cancel(request.workload_id, now_ns=now_ns),
                    lambda workload: CancelWorkloadResponse(workload=workload),
                    reply,
                )
            case ScaleWorkloadRequest():
                self._change(
                    life,
                    lambda core, now_ns: core.scale(request.workload_id, request.replicas, now_ns=now_ns),
                    lambda workload: ScaleWorkloadResponse(workload=workload),
                    reply,
                )
            case RecommendMovesRequest():
                life.read(lambda: self._recommend(life, request, reply))
            case ApplyMovesRequest():
                found = self._kept.get(request.recommendation_id)
                if found is None:
                    reply(NotFound("no such recommendation"))
                    return
                self._change(
                    life,
                    lambda core, now_ns: core.apply_moves(found.moves, now_ns=now_ns),
                    lambda moved: ApplyMovesResponse(moved=moved, revision=0, modelled_power_w=0.0),
                    reply,
                )
            case ReconcileNodeRequest():
                self.ledger.asked.add(request.node_name)
                self._change(
                    life,
                    lambda core, now_ns: core.reconcile_node(request.node_name, now_ns=now_ns),
                    lambda record: ReconcileNodeResponse(node=Node(inventory=record.inventory, state=record.state)),
                    reply,
                )
            case DrainNodeRequest() | UncordonNodeRequest():
                self._set_cordon(life, request, reply)
            case UpdatePolicyRequest():
                self._change(
                    life,
                    lambda core, now_ns: core.update_policy(request.policy, now_ns=now_ns),
                    lambda policy: UpdatePolicyResponse(policy=policy),
                    reply,
                )

    def _set_cordon(self, life: Life, request: DrainNodeRequest | UncordonNodeRequest, reply: Reply) -> None:
        name, gpus = request.node_name, request.gpus
        if isinstance(request, UncordonNodeRequest):
            self._change(
                life,
                lambda core, now_ns: core.uncordon_node(name, gpus, now_ns=now_ns),
                lambda record: UncordonNodeResponse(node=Node(inventory=record.inventory, state=record.state)),
                reply,
            )
            return
        now_ns = max(1, life.clock.wall_ns())
        deadline_ns = 0 if request.grace_s is None else now_ns + int(request.grace_s * 1e9)
        drain = DrainTerms(deadline_ns=deadline_ns, force=request.force)
        self._change(
            life,
            lambda core, now_ns: core.cordon_node(name, gpus, reason=request.reason, drain=drain, now_ns=now_ns),
            lambda record: DrainNodeResponse(node=Node(inventory=record.inventory, state=record.state)),
            reply,
        )

    def _recommend(self, life: Life, request: RecommendMovesRequest, reply: Reply) -> None:
        found = recommend_moves(build_migration_problem(life.core.survey_moves(request)))
        self._kept[found.recommendation_id] = found
        reply(encode_message(RecommendMovesResponse(recommendation=found)))

    def _change(self, life: Life, apply: Apply, response: Any, reply: Reply) -> None:
        def answer(result: Any, fault: Exception | None) -> None:
            if fault is None:
                reply(encode_message(response(result)))
            else:
                assert isinstance(fault, Fault)
                reply(fault)

        life.command(apply, answer, is_audited=True)
