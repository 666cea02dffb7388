"""The controller's machine: a journal that outlives processes, and the process that runs now, if one does.

Owns starting and crashing. A crash takes everything but the journal, at any
moment between two events, thus also between a commit and its answers.
"""

from typing import Any

from eelgrid_controller.moves import recommend
from eelgrid_protos.codec import encode
from eelgrid_protos.faults import Fault, NotFound
from eelgrid_protos.messages import (
    ApplyMovesRequest,
    ApplyMovesResponse,
    CancelWorkloadRequest,
    CancelWorkloadResponse,
    GetPolicyRequest,
    GetPolicyResponse,
    Recommendation,
    RecommendMovesRequest,
    RecommendMovesResponse,
    ScaleWorkloadRequest,
    ScaleWorkloadResponse,
    SubmitWorkloadRequest,
    SubmitWorkloadResponse,
    UpdatePolicyRequest,
    UpdatePolicyResponse,
)  # fmt: skip
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
        # What operators were recommended; a process that dies forgets it.
        self._kept: dict[str, Recommendation] = {}
        self._life_type = life_type
        self._network = network

    def start(self) -> None:
        """A process starts from what the journal holds, unless one runs."""
        if self.life is not None:
            return
        life = self._life_type(self.timeline, self.clock, self.disk.open(), self.ledger)
        self.ledger.ticks.controller_started()
        self.ledger.recovered(life.core.state)
        self.life, self.sessions = life, Sessions(life)
        self._network.listener = self._accept
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
        self._network.listener = None
        for connection in self._network.connections:
            connection.close(CONTROLLER, "connection reset")
        self.timeline.note("controller crashed")

    def _accept(self, connection: Connection) -> End:
        return self.sessions.accept(connection)

    # Operators

    def serve(self, request: Any, reply: Reply) -> None:
        """Answers a call once what it did is on disk; a dead process answers nobody."""
        life = self.life
        if life is None:
            return
        match request:
            case GetPolicyRequest():
                life.read(lambda: reply(encode(GetPolicyResponse(policy=life.core.state.policy))))
            case SubmitWorkloadRequest():
                self._change(
                    life, lambda core, now_ns: core.submit(request, now_ns=now_ns),
                    lambda workload: SubmitWorkloadResponse(workload=workload), reply,
                )  # fmt: skip
            case CancelWorkloadRequest():
                self._change(
                    life, lambda core, now_ns: core.cancel(request.workload_id, now_ns=now_ns),
                    lambda workload: CancelWorkloadResponse(workload=workload), reply,
                )  # fmt: skip
            case ScaleWorkloadRequest():
                self._change(
                    life, lambda core, now_ns: core.scale(request.workload_id, request.replicas, now_ns=now_ns),
                    lambda workload: ScaleWorkloadResponse(workload=workload), reply,
                )  # fmt: skip
            case RecommendMovesRequest():
                life.read(lambda: self._recommend(life, request, reply))
            case ApplyMovesRequest():
                found = self._kept.get(request.recommendation_id)
                if found is None:
                    reply(NotFound("no such recommendation"))
                    return
                self._change(
                    life, lambda core, now_ns: core.apply_moves(found.moves, now_ns=now_ns),
                    lambda moved: ApplyMovesResponse(moved=moved, revision=0, modelled_power_w=0.0), reply,
                )  # fmt: skip
            case UpdatePolicyRequest():
                self._change(
                    life, lambda core, now_ns: core.update_policy(request.policy, now_ns=now_ns),
                    lambda policy: UpdatePolicyResponse(policy=policy), reply,
                )  # fmt: skip

    def _recommend(self, life: Life, request: RecommendMovesRequest, reply: Reply) -> None:
        found = recommend(life.core.survey_moves(request))
        self._kept[found.recommendation_id] = found
        reply(encode(RecommendMovesResponse(recommendation=found)))

    def _change(self, life: Life, apply: Apply, response: Any, reply: Reply) -> None:
        def answer(result: Any, fault: Exception | None) -> None:
            if fault is None:
                reply(encode(response(result)))
            else:
                assert isinstance(fault, Fault)
                reply(fault)

        life.command(apply, answer)
