"""The plan that the controller gave this node: which one is in force, what of it is allowed, how long it stands.

Owns the epoch, the lease and the verdict on every item of a plan. Must not know
how assignments are carried out (the engine does) nor touch a device.

Theory. Epochs rise: a lower one is an echo of the past and is refused, an equal
one with equal content is answered as before. A plan is judged item by item, so
that one unknown GPU costs one item. The lease is a countdown that any word from
the controller renews; when it runs out, recommendations are dropped, since
nobody stands behind them any more, while running work goes on. This version
writes no limit to any device: settings are observed, and where the plan asks to
enforce them they are refused by name, never silently ignored.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from eelgrid_protos.messages import (
    ApplyResult,
    ApplyStatus,
    Assignment,
    GpuSetting,
    NodeEvent,
    NodeEventKind,
    NodePlan,
    PlanApplied,
)  # fmt: skip
from eelgrid_protos.quantities import GPU_MILLI_WHOLE

__all__ = ["Guard", "Verdict"]

_ENFORCES_NOTHING = "this agent version enforces nothing yet; set the pool's mode to observe"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What becomes of a plan: work to hand on, or an answer that is already final.

    `answer` is None when the plan is taken: the engine applies `assignments` and `Guard.settle` makes the answer.
    """

    assignments: tuple[Assignment, ...] = ()
    results: tuple[ApplyResult, ...] = ()
    answer: PlanApplied | None = None


class Guard:
    """The plan of one node."""

    def __init__(self, node_name: str) -> None:
        self._node_name = node_name
        self._settings: tuple[GpuSetting, ...] = ()
        self._lease_ends_ns: int | None = None
        self.plan: NodePlan | None = None
        self.applied: PlanApplied | None = None
        self.expired = False

    @property
    def epoch(self) -> int:
        """The last plan taken; 0 before the first."""
        return 0 if self.plan is None else self.plan.epoch

    @property
    def settings(self) -> tuple[GpuSetting, ...]:
        """Limits that the controller recommends now; none once the lease ran out."""
        return self._settings

    def offer(self, plan: NodePlan, *, gpu_uuids: frozenset[str], now_ns: int) -> Verdict:
        """Judges a plan; any plan for this node is word from the controller and renews the lease."""
        if plan.node_name != self._node_name:
            detail = f"the plan is for node {plan.node_name}; this is {self._node_name}"
            return Verdict(answer=_refused(plan, "node_name", detail))
        if plan.epoch == 0:
            return Verdict(answer=_refused(plan, "epoch", "is 0; epochs count from 1"))
        if plan.epoch < self.epoch:
            detail = f"epoch {self.epoch} is in force and epochs rise; send a higher one"
            return Verdict(answer=_refused(plan, "epoch", detail))
        if plan.epoch == self.epoch:
            if plan != self.plan:
                detail = f"epoch {plan.epoch} is in force with other content; raise the epoch"
                return Verdict(answer=_refused(plan, "epoch", detail))
            if self.applied is not None and not self.expired:
                self.renew(now_ns)
                return Verdict(answer=self.applied)
        assignments, refusals = _judge_assignments(plan.assignments, gpu_uuids)
        settings, outcomes = _judge_settings(plan, gpu_uuids)
        self.plan, self.applied = plan, None
        self._settings = settings
        self.expired = False
        self._lease_ends_ns = now_ns + int(plan.lease_s * 1e9)
        return Verdict(assignments=assignments, results=refusals + outcomes)

    def again(self, *, gpu_uuids: frozenset[str]) -> Verdict | None:
        """The plan in force judged anew, after the devices changed; None without a plan."""
        if self.plan is None:
            return None
        assignments, refusals = _judge_assignments(self.plan.assignments, gpu_uuids)
        settings, outcomes = _judge_settings(self.plan, gpu_uuids)
        if not self.expired:
            self._settings = settings
        return Verdict(assignments=assignments, results=refusals + outcomes)

    def settle(self, verdict: Verdict, engine_results: tuple[ApplyResult, ...]) -> PlanApplied:
        """The answer to the plan that was just taken, once the engine has done its part."""
        assert self.plan is not None
        results = verdict.results + engine_results
        self.applied = PlanApplied(epoch=self.plan.epoch, status=_overall(results), results=results)
        return self.applied

    def renew(self, now_ns: int) -> None:
        """Word from the controller: the lease begins anew. What has run out stays so until the plan comes again."""
        if self.plan is not None and not self.expired:
            self._lease_ends_ns = now_ns + int(self.plan.lease_s * 1e9)

    def check(self, *, now_ns: int, wall_ns: int) -> NodeEvent | None:
        """LEASE_EXPIRED, once, when the lease has run out; the recommendations are gone then."""
        if self._lease_ends_ns is None or now_ns < self._lease_ends_ns:
            return None
        assert self.plan is not None
        dropped, self._settings = len(self._settings), ()
        self._lease_ends_ns = None
        self.expired = True
        detail = (
            f"no word from the controller for {self.plan.lease_s:g} s: plan {self.plan.epoch} no longer recommends "
            f"anything ({dropped} settings dropped); running work goes on"
        )
        return NodeEvent(kind=NodeEventKind.LEASE_EXPIRED, time_ns=max(wall_ns, 0), detail=detail)

    def lease_left_s(self, now_ns: int) -> float:
        """Seconds until the lease runs out; 0 without a plan or after it."""
        return 0.0 if self._lease_ends_ns is None else max(0.0, (self._lease_ends_ns - now_ns) / 1e9)


def _refused(plan: NodePlan, subject: str, detail: str) -> PlanApplied:
    result = ApplyResult(subject=subject, status=ApplyStatus.REFUSED, detail=detail)
    return PlanApplied(epoch=plan.epoch, status=ApplyStatus.REFUSED, results=(result,))


def _overall(results: tuple[ApplyResult, ...]) -> ApplyStatus:
    """The gravest outcome of any item; items that are not listed were plainly applied."""
    gravity = (ApplyStatus.FAILED, ApplyStatus.REFUSED, ApplyStatus.OBSERVED)
    statuses = {result.status for result in results}
    return next((status for status in gravity if status in statuses), ApplyStatus.APPLIED)


def _judge_assignments(
    assignments: tuple[Assignment, ...], gpu_uuids: frozenset[str]
) -> tuple[tuple[Assignment, ...], tuple[ApplyResult, ...]]:
    """What this node can hold, and why not the rest."""
    held: dict[str, int] = {}
    seen: set[tuple[str, int]] = set()
    taken, refusals = [], []
    for assignment in assignments:
        problem = _problem(assignment, gpu_uuids, held, seen)
        if problem:
            refusals.append(ApplyResult(subject=assignment.workload_id, status=ApplyStatus.REFUSED, detail=problem))
            continue
        seen.add((assignment.workload_id, assignment.replica))
        for uuid in assignment.gpu_uuids:
            held[uuid] = held.get(uuid, 0) + assignment.gpu_milli
        taken.append(assignment)
    return tuple(taken), tuple(refusals)


def _problem(
    assignment: Assignment, gpu_uuids: frozenset[str], held: Mapping[str, int], seen: set[tuple[str, int]]
) -> str:
    if (assignment.workload_id, assignment.replica) in seen:
        return f"replica {assignment.replica} is assigned twice; list it once"
    if len(set(assignment.gpu_uuids)) < len(assignment.gpu_uuids):
        return f"replica {assignment.replica} names one GPU twice; list each once"
    for uuid in assignment.gpu_uuids:
        if uuid not in gpu_uuids:
            return f"replica {assignment.replica}: this node has no GPU {uuid}; plan on its newest inventory"
        if held.get(uuid, 0) + assignment.gpu_milli > GPU_MILLI_WHOLE:
            total = held.get(uuid, 0) + assignment.gpu_milli
            return f"replica {assignment.replica}: GPU {uuid} would be shared out at {total} of {GPU_MILLI_WHOLE} milli"
    return ""


def _judge_settings(
    plan: NodePlan, gpu_uuids: frozenset[str]
) -> tuple[tuple[GpuSetting, ...], tuple[ApplyResult, ...]]:
    """The recommendations that stand, and an outcome for every setting."""
    kept: dict[str, GpuSetting] = {}
    outcomes = []
    for setting in plan.gpu_settings:
        result = ApplyResult(subject=setting.gpu_uuid, status=ApplyStatus.REFUSED)
        if setting.gpu_uuid not in gpu_uuids:
            detail = "this node has no such GPU; plan on its newest inventory"
            outcomes.append(replace(result, detail=detail))
        elif setting.gpu_uuid in kept:
            outcomes.append(replace(result, detail="the plan sets this GPU twice; the first stands"))
        elif plan.enforce:
            outcomes.append(replace(result, detail=_ENFORCES_NOTHING))
        else:
            kept[setting.gpu_uuid] = setting
            detail = "observe-only: seen, nothing written to the device"
            outcomes.append(replace(result, status=ApplyStatus.OBSERVED, detail=detail))
    return tuple(kept.values()), tuple(outcomes)
