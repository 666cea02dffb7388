"""People at the operators' API: they submit, ask again when nobody answers, cancel, and change the policy.

Owns what users do and what they may conclude from an answer. Requests and
answers cross the network as bytes of the codec and get lost, late or doubled
there; a user with an id of his own repeats a call until it is answered.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

from eelgrid_protos.codec import decode_message, encode_message
from eelgrid_protos.faults import (
    AlreadyExists,
    FailedPrecondition,
    Fault,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
    Unavailable,
)
from eelgrid_protos.messages import (
    OBJECTIVES,
    ApplyMovesRequest,
    ApplyMovesResponse,
    BudgetScope,
    CancelWorkloadRequest,
    CancelWorkloadResponse,
    DrainNodeRequest,
    DrainNodeResponse,
    EnforcementMode,
    GetPolicyRequest,
    GetPolicyResponse,
    Mobility,
    Policy,
    PoolMode,
    PowerBudget,
    PreemptionReclaim,
    PreemptionWithin,
    Queue,
    QueuePreemption,
    QueueQuota,
    RecommendMovesRequest,
    RecommendMovesResponse,
    ReconcileNodeRequest,
    ReconcileNodeResponse,
    ResourceRequest,
    ScaleWorkloadRequest,
    ScaleWorkloadResponse,
    SubmitWorkloadRequest,
    SubmitWorkloadResponse,
    TrainingPromise,
    UncordonNodeRequest,
    UncordonNodeResponse,
    UpdatePolicyRequest,
    UpdatePolicyResponse,
    WorkloadKind,
    WorkloadSpec,
)
from tests.sim.broken import demand
from tests.sim.clock import seconds
from tests.sim.ledger import Ledger
from tests.sim.poison import extreme_spec
from tests.sim.timeline import Timeline

__all__ = ["Callee", "Users"]

_AGAIN_NS = seconds(4)
_DELAY_NS = seconds(0.05)
_LOSS_P = 0.04
_DOUBLE_P = 0.04
_GIB = 2**30
# The last digit of seeds whose clusters have queues.
QUEUES_AT = 8
# And of those whose policies have power budgets.
BUDGETS_AT = 6
_ELASTIC = TrainingPromise(profile="p", slowdown_most=0.1, replicas_least=1, replicas_most=5)
_QUEUES = (
    Queue(name="all"),
    Queue(
        name="services",
        parent="all",
        quotas=(QueueQuota(resource="gpu", nominal=6000),),
        preemption=QueuePreemption(within=PreemptionWithin.LOWER_PRIORITY, reclaim=PreemptionReclaim.NOMINAL),
    ),
    Queue(name="default", parent="all", quotas=(QueueQuota(resource="gpu", nominal=0),)),
)

Reply = Callable[[bytes | Fault], None]


class Callee(Protocol):
    """The controller's machine, as users see it."""

    def serve(self, request: Any, reply: Reply) -> None:
        """Answers at some time, or never."""

    @property
    def ahead(self) -> list[str]:
        """Nodes that hold more than the journal knows."""


def _nothing(_: Any) -> None:
    """Nothing is concluded."""


@dataclass(slots=True)
class _Call:
    """A request that is repeated until it is answered."""

    request: Any
    response: type
    then: Callable[[Any], None]
    is_repeatable: bool
    is_answered: bool = False


class Users:
    """Everybody who calls."""

    def __init__(self, timeline: Timeline, ledger: Ledger, callee: Callee, *, models: tuple[str, ...]) -> None:
        self._timeline = timeline
        self._rng = timeline.rng
        self._ledger = ledger
        self._callee = callee
        self._models = models
        self._specs: dict[str, WorkloadSpec] = {}
        self._number = 0
        self.open_calls: list[_Call] = []
        self.answers = 0
        self.refusals = 0
        # A tenth of all clusters have queues: services that lend to jobs, and reclaim; the others are as they always were.
        self._has_queues = timeline.seed % 10 == QUEUES_AT
        self._has_budgets = timeline.seed % 10 == BUDGETS_AT

    def act(self) -> None:
        """Somebody does something."""
        wants_policy = (self._has_queues and not self._ledger.policy.queues) or (
            self._has_budgets and not self._ledger.policy.budgets
        )
        if wants_policy and self._rng.random() < 0.5:
            self._change_policy()
            return
        kind = self._rng.choices(
            (
                self._submit,
                self._resubmit,
                self._contradict,
                self._imagine,
                self._cancel,
                self._change_policy,
                self._improve,
                self._scale,
                self._poison,
                self.reconcile,
                self._drain,
                self._uncordon,
            ),
            weights=(55, 8, 4, 4, 24, 5, 8, 30, 3, 3, 4, 6),
        )[0]
        kind()

    # What they do

    def _spec(self) -> WorkloadSpec:
        rng = self._rng
        gpus = rng.choices((0, 1, 2), weights=(2, 7, 2))[0]
        whole = gpus > 1 or rng.random() < (0.8 if self._has_queues else 0.4)
        request = ResourceRequest(
            cpu_milli=rng.randrange(500, 8001, 500),
            memory_bytes=rng.randrange(1, 17) * _GIB,
            gpu_count=gpus,
            gpu_milli=0 if gpus == 0 else 1000 if whole else rng.randrange(50, 1000, 50),
            gpu_models=(rng.choice(self._models),) if gpus and self._models and rng.random() < 0.2 else (),
        )
        spec = WorkloadSpec(
            name=f"job-{self._number}",
            request=request,
            replicas=rng.choice((1, 1, 1, 2, 3)),
            priority=rng.randrange(3),
            mobility=rng.choice(list(Mobility)),
            kind=rng.choice((WorkloadKind.BATCH_JOB, WorkloadKind.TRAINING_JOB)),
        )
        return self._lend(spec) if self._has_queues else spec

    def _lend(self, spec: WorkloadSpec) -> WorkloadSpec:
        """Makes it a service or a job, which may be elastic, mostly in the queue that is meant for it, rarely in any."""
        rng, kind = self._rng, spec.kind
        if rng.random() < 1.0 / 3.0:
            kind = WorkloadKind.INFERENCE_SERVICE
        is_elastic = kind is WorkloadKind.TRAINING_JOB and spec.request.gpu_milli == 1000 and rng.random() < 0.5
        queue = "services" if kind is WorkloadKind.INFERENCE_SERVICE else "default"
        if rng.random() < 0.2:
            queue = rng.choice(("", *(one.name for one in _QUEUES)))
        return replace(spec, kind=kind, queue=queue, training=_ELASTIC if is_elastic else None)

    def _submit(self) -> None:
        self._number += 1
        spec = self._spec()
        key = "" if self._rng.random() < 0.15 else f"mine-{self._number}"
        if key:
            self._specs[key] = spec
        self._send_submit(key, spec)

    def _send_submit(self, key: str, spec: WorkloadSpec) -> None:
        def then(answer: Any) -> None:
            if isinstance(answer, SubmitWorkloadResponse):
                self._ledger.answered_submit(answer.workload, spec, key)
            else:
                known = isinstance(answer, InvalidArgument) and key not in self._ledger.accepted
                known = known or key in self._ledger.lost
                demand(2, known or not key, f"submitting {key} was refused: {answer}")

        request = SubmitWorkloadRequest(spec=spec, workload_id=key)
        self._call(_Call(request, SubmitWorkloadResponse, then, is_repeatable=bool(key)))

    def _poison(self) -> None:
        """Submits what the contract allows and nobody sends."""
        self._number += 1
        key = f"poison-{self._number}"

        def request(spec: WorkloadSpec) -> SubmitWorkloadRequest:
            return SubmitWorkloadRequest(spec=spec, workload_id=key)

        def then(answer: Any) -> None:
            if isinstance(answer, SubmitWorkloadResponse):
                self._ledger.answered_submit(answer.workload, spec, key)
            else:
                fine = isinstance(answer, InvalidArgument | FailedPrecondition | NotFound)
                demand(2, fine or key in self._ledger.lost, f"submitting {spec} was answered with {answer!r}")

        spec = extreme_spec(self._rng, self._spec(), request)
        self._call(_Call(request(spec), SubmitWorkloadResponse, then, is_repeatable=True))

    def reconcile(self) -> None:
        """An operator gives up what nodes hold beyond the journal."""
        for name in self._callee.ahead:
            self._call(_Call(ReconcileNodeRequest(node_name=name), ReconcileNodeResponse, _nothing, is_repeatable=True))

    def _resubmit(self) -> None:
        if self._specs:
            key = self._rng.choice(list(self._specs))
            self._send_submit(key, self._specs[key])

    def _contradict(self) -> None:
        """Takes an id that is in use for something else."""
        if not self._ledger.accepted:
            return
        key = self._rng.choice(list(self._ledger.accepted))
        other = replace(self._ledger.accepted[key].spec, name="other")

        def then(answer: Any) -> None:
            if key in self._ledger.lost or not isinstance(answer, Fault):
                # It may have been free by then, and is taken for the other now.
                demand(2, key in self._ledger.lost, f"{key} was taken for another spec: {answer}")
                return
            demand(2, isinstance(answer, AlreadyExists), f"{key} was taken for another spec: {answer}")

        request = SubmitWorkloadRequest(spec=other, workload_id=key)
        self._call(_Call(request, SubmitWorkloadResponse, then, is_repeatable=True))

    def _imagine(self) -> None:
        request = SubmitWorkloadRequest(spec=self._spec(), workload_id=f"dream-{self._number}", dry_run=True)
        self._call(_Call(request, SubmitWorkloadResponse, lambda _: None, is_repeatable=True))

    def _cancel(self) -> None:
        keys = [key for key in self._ledger.accepted if key not in self._ledger.cancelled]
        key = self._rng.choice(keys) if keys and self._rng.random() < 0.95 else "nobody"

        def then(answer: Any) -> None:
            if isinstance(answer, CancelWorkloadResponse):
                self._ledger.answered_cancel(answer.workload)
            else:
                known = key == "nobody" or key in self._ledger.lost
                demand(2, isinstance(answer, NotFound) and known, f"cancelling {key} was refused: {answer}")

        self._call(_Call(CancelWorkloadRequest(workload_id=key), CancelWorkloadResponse, then, is_repeatable=True))

    def _change_policy(self) -> None:
        def then(answer: Any) -> None:
            if isinstance(answer, GetPolicyResponse):
                changed = UpdatePolicyRequest(policy=self._changed(answer.policy))
                self._call(_Call(changed, UpdatePolicyResponse, self._policy_answered, is_repeatable=True))

        self._call(_Call(GetPolicyRequest(), GetPolicyResponse, then, is_repeatable=True))

    def _improve(self) -> None:
        """Asks for moves and, a little later, for their execution; by then they may hold no longer."""

        def applied(answer: Any) -> None:
            fine = isinstance(answer, ApplyMovesResponse | NotFound | FailedPrecondition)
            demand(2, fine, f"moves were answered with {answer}")

        def then(answer: Any) -> None:
            if isinstance(answer, RecommendMovesResponse) and answer.recommendation.moves:
                asked = ApplyMovesRequest(recommendation_id=answer.recommendation.recommendation_id)
                self._call(_Call(asked, ApplyMovesResponse, applied, is_repeatable=True))

        asked = RecommendMovesRequest(moves_most=self._rng.choice((1, 3, 20)), restart_s=0.0)
        self._call(_Call(asked, RecommendMovesResponse, then, is_repeatable=False))

    def _scale(self) -> None:
        """Wants more or fewer replicas of something, which may wait, or be over."""
        keys = [key for key in self._ledger.accepted if key in self._ledger.placed or self._rng.random() < 0.1]
        if not keys:
            return
        asked = ScaleWorkloadRequest(workload_id=self._rng.choice(keys), replicas=self._rng.randrange(1, 6))

        def then(answer: Any) -> None:
            fine = isinstance(answer, ScaleWorkloadResponse | NotFound | FailedPrecondition)
            # Rogues submit work with bounds of its own, and users scale whatever is there.
            fine = fine or (isinstance(answer, InvalidArgument) and "promised otherwise" in str(answer))
            demand(2, fine, f"scaling was answered with {answer}")

        self._call(_Call(asked, ScaleWorkloadResponse, then, is_repeatable=True))

    def _target(self) -> tuple[str, tuple[str, ...]]:
        """A node, perhaps of none, and all of it or one GPU."""
        nodes = self._ledger.shadow.nodes
        name = self._rng.choice(sorted(nodes) or ["nobody"])
        gpus = nodes[name].inventory.gpus if name in nodes and self._rng.random() < 0.3 else ()
        return name, (str(self._rng.choice(gpus).index),) if gpus else ()

    def _drain(self) -> None:
        """Takes a node or GPU out of service, for a while or until its work has ended."""
        name, gpus = self._target()
        grace_s = self._rng.choice((None, 0.0, 2.0, 20.0))
        force = grace_s is not None and self._rng.random() < 0.5
        asked = DrainNodeRequest(node_name=name, gpus=gpus, reason="repair", grace_s=grace_s, force=force)
        self._call(_Call(asked, DrainNodeResponse, self._cordon_answered, is_repeatable=True))

    def _uncordon(self) -> None:
        cordoned = [name for name, record in sorted(self._ledger.shadow.nodes.items()) if record.cordon is not None]
        name, gpus = (self._rng.choice(cordoned), ()) if cordoned else self._target()
        asked = UncordonNodeRequest(node_name=name, gpus=gpus)
        self._call(_Call(asked, UncordonNodeResponse, self._cordon_answered, is_repeatable=True))

    def _cordon_answered(self, answer: Any) -> None:
        # A node, or a GPU of it, may be gone by then.
        fine = isinstance(answer, DrainNodeResponse | UncordonNodeResponse | NotFound)
        demand(2, fine, f"a cordon was answered with {answer}")

    def _changed(self, policy: Policy) -> Policy:
        rng = self._rng
        objective = rng.choice(list(OBJECTIVES))
        mode = rng.choice((EnforcementMode.OBSERVE, EnforcementMode.ENFORCE))
        return replace(
            policy,
            objective=objective,
            weights=OBJECTIVES[objective],
            lease_s=rng.choice((8.0, 20.0, 60.0)),
            pools=(PoolMode(pool="a", mode=mode),),
            send_interval_s=rng.choice((1.0, 2.0, 5.0)),
            sample_interval_s=rng.choice((0.5, 1.0, 2.0)),
            queues=_QUEUES if self._has_queues else (),
            budgets=self._draw_budgets() if self._has_budgets else (),
        )

    def _draw_budgets(self) -> tuple[PowerBudget, ...]:
        """None, or a part of what GPUs draw at their default limits, on some nodes and in the cluster."""
        rng, drawn = self._rng, list[PowerBudget]()
        whole_w = 0.0
        for name, record in sorted(self._ledger.shadow.nodes.items()):
            default_w = sum(gpu.power_limit_default_w or 0.0 for gpu in record.inventory.gpus)
            whole_w += default_w
            if rng.random() < 0.7:
                limit_w = rng.choice((0.4, 0.7, 1.1)) * default_w
                drawn.append(PowerBudget(scope=BudgetScope.NODE, name=name, limit_w=limit_w))
        drawn.append(PowerBudget(scope=BudgetScope.CLUSTER, limit_w=rng.choice((0.5, 0.8)) * whole_w))
        return tuple(drawn[: rng.randint(0, len(drawn))])

    def _policy_answered(self, answer: Any) -> None:
        if isinstance(answer, UpdatePolicyResponse):
            self._ledger.answered_policy(answer.policy)

    # Calling

    def _call(self, call: _Call) -> None:
        self.open_calls.append(call)
        self._attempt(call)

    def _attempt(self, call: _Call) -> None:
        if call.is_answered:
            return
        for _ in range(2 if self._timeline.chance(_DOUBLE_P) else 1):
            self._send(call, encode_message(call.request))
        if call.is_repeatable:
            self._timeline.after(_AGAIN_NS, lambda: self._attempt(call))
        else:
            self._timeline.after(_AGAIN_NS, lambda: self._over(call))

    def _send(self, call: _Call, data: bytes) -> None:
        self._timeline.mark(data)
        if self._timeline.chance(_LOSS_P):
            return

        rollbacks = self._ledger.rollbacks

        def reply(answer: bytes | Fault) -> None:
            # What a controller said whose disk lost it since concludes nothing; the call is repeated.
            if rollbacks == self._ledger.rollbacks and not self._timeline.chance(_LOSS_P):
                self._timeline.after(
                    self._timeline.draw_ns(_DELAY_NS),
                    lambda: self._answered(call, answer) if rollbacks == self._ledger.rollbacks else None,
                )

        request = decode_message(type(call.request), data)
        self._timeline.after(self._timeline.draw_ns(_DELAY_NS), lambda: self._callee.serve(request, reply))

    def _answered(self, call: _Call, answer: bytes | Fault) -> None:
        """An answer, to this or to an earlier attempt; each that says yes is a promise."""
        is_first = not call.is_answered
        if isinstance(answer, Unavailable | ResourceExhausted):
            self.refusals += 1
            return
        self.answers += 1
        if isinstance(answer, Fault):
            if is_first:
                self._over(call)
                call.then(answer)
            return
        self._over(call)
        if is_first or call.response is not GetPolicyResponse:
            call.then(decode_message(call.response, answer))

    def _over(self, call: _Call) -> None:
        if not call.is_answered:
            call.is_answered = True
            self.open_calls.remove(call)
