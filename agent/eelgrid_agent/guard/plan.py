"""The plan that the controller gave this node: which one is in force, what of it is allowed, how long it stands.

Owns the epoch, the lease, the verdict on every item of a plan and the answer to
it; what is enforced it hands to the core, and the core's orders to the shell.
Must not know how assignments are carried out (the engine does) nor touch a
device.

Theory. Epochs rise: a lower one is an echo of the past and is refused, an equal
one with equal content is answered as before. A plan is judged item by item, so
that one unknown GPU costs one item. The lease is a countdown that any word from
the controller renews; when it runs out, recommendations are dropped and what
was set is put back, since nobody stands behind them any more, while running
work goes on. The answer to a plan follows the devices: a setting is applied
once it was read back, so an answer may come again with other results.
"""

from collections import Counter, deque
from dataclasses import dataclass

from eelgrid_agent.guard.core import GuardState, step
from eelgrid_agent.guard.events import (
    Announce,
    Command,
    DeviceRecord,
    Event,
    Executed,
    PlanGone,
    PlanInForce,
    Started,
    Stopped,
    Tick,
    Turned,
)  # fmt: skip
from eelgrid_agent.guard.gangs import gangs_of, wishes_of
from eelgrid_agent.guard.judge import Ground, Judged, judge, parents
from eelgrid_agent.guard.report import UNDER_WAY, enforced
from eelgrid_agent.guard.rules import GuardLimits, LocalPolicy
from eelgrid_agent.refusal import Rule
from eelgrid_protos.messages import (
    AccessLevel,
    ApplyResult,
    ApplyStatus,
    Assignment,
    Gpu,
    GpuLayout,
    GpuSetting,
    NodeEvent,
    NodeEventKind,
    NodePlan,
    PlanApplied,
)  # fmt: skip

__all__ = ["Guard", "Verdict"]

_EVENTS_MOST = 256
# Looks a second while a budget is kept: a rise is seen within half a second, which leaves the device the other half.
_CYCLE_S = 1.0
_BUDGET_CYCLE_S = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What becomes of a plan: work to hand on, or an answer that is already final.

    `answer` is None when the plan is taken: the engine applies `assignments` and `Guard.settle` makes the answer.
    """

    assignments: tuple[Assignment, ...] = ()
    results: tuple[ApplyResult, ...] = ()
    answer: PlanApplied | None = None


class Guard:
    """The plan of one node. `has_control` says that somebody carries out what `tick` orders."""

    def __init__(
        self, node_name: str, *, has_control: bool = False, local: LocalPolicy | None = None,
        limits: GuardLimits | None = None,
    ) -> None:  # fmt: skip
        self._node_name = node_name
        self._has_control = has_control
        self._limits = limits or GuardLimits()
        self._state = GuardState(local=local or LocalPolicy())
        self._settings: tuple[GpuSetting, ...] = ()
        self._enforced: tuple[str, ...] = ()
        self._held: tuple[Assignment, ...] = ()
        self._gpus: tuple[Gpu, ...] = ()
        self._access = AccessLevel.UNSPECIFIED
        self._lease_ends_ns: int | None = None
        self._now_ns = 0
        self._settled: tuple[ApplyResult, ...] = ()
        self._layouts_due: dict[str, GpuLayout] = {}
        self._changing: frozenset[str] = frozenset()
        self._layout_results: dict[str, ApplyResult] = {}
        self._laid: dict[str, GpuLayout] = {}
        self._events: deque[NodeEvent] = deque(maxlen=_EVENTS_MOST)
        self._answer_due = False
        self.plan: NodePlan | None = None
        self.applied: PlanApplied | None = None
        self.expired = False
        # By field and by rule, since the agent began.
        self.repairs_total: Counter[str] = Counter()
        self.refusals_total: Counter[str] = Counter()

    @property
    def epoch(self) -> int:
        """The last plan taken; 0 before the first."""
        return 0 if self.plan is None else self.plan.epoch

    @property
    def settings(self) -> tuple[GpuSetting, ...]:
        """Settings of the plan that stand now, recommended or enforced; none once the lease ran out."""
        return self._settings

    @property
    def state(self) -> GuardState:
        """What the core knows of the devices and of the budget."""
        return self._state

    @property
    def is_enforcing(self) -> bool:
        """Whether the plan in force may change devices."""
        return self.plan is not None and self.plan.enforce and not self.expired and self._has_control

    @property
    def has_business(self) -> bool:
        """Whether `tick` has something to do; without, no device need be asked anything."""
        budget_w, _ = self._state.budget_now()
        return budget_w is not None or self._state.is_involved or bool(self._layouts_due)

    @property
    def held(self) -> tuple[Assignment, ...]:
        """The assignments that were taken."""
        return self._held

    def laid(self, gpu_uuid: str) -> GpuLayout | None:
        """The layout of the plan in force that was handed on for this device."""
        return self._laid.get(gpu_uuid) if gpu_uuid in self._layout_results else None

    @property
    def layouts_unmet(self) -> frozenset[str]:
        """Devices whose MIG layout is asked for and was not reached: due, under way, refused or failed.

        None of a plan that is only to be observed, or whose lease ran out.
        """
        if self.plan is None or self.expired or not self.plan.enforce:
            return frozenset()
        # A copy is whole, for it is made without giving the interpreter away: scrapes come from another thread.
        results = self._layout_results.copy()
        met = {uuid for uuid, result in results.items() if result.status is ApplyStatus.APPLIED}
        return frozenset(layout.gpu_uuid for layout in self.plan.gpu_layouts) - met

    @property
    def cycle_s(self) -> float:
        """How often `tick` wants to be called: a budget needs it often."""
        budget_w, _ = self._state.budget_now()
        return _CYCLE_S if budget_w is None else _BUDGET_CYCLE_S

    # Plans and their lease

    def adopt(self, gpus: tuple[Gpu, ...], access: AccessLevel) -> None:
        """The newest inventory; `again` judges the plan on it."""
        self._gpus, self._access = gpus, access

    def offer(self, plan: NodePlan, *, gpu_uuids: frozenset[str], now_ns: int) -> Verdict:
        """Judges a plan; any plan for this node is word from the controller and renews the lease."""
        self._now_ns = now_ns
        if plan.node_name != self._node_name:
            detail = f"the plan is for node {plan.node_name}; this is {self._node_name}"
            return Verdict(answer=_refused(plan, Rule.NODE_NAME, "node_name", detail))
        if plan.epoch == 0:
            return Verdict(answer=_refused(plan, Rule.EPOCH, "epoch", "is 0; epochs count from 1"))
        if plan.epoch < self.epoch:
            detail = f"epoch {self.epoch} is in force and epochs rise; send a higher one"
            return Verdict(answer=_refused(plan, Rule.EPOCH, "epoch", detail))
        if plan.epoch == self.epoch:
            if plan != self.plan:
                detail = f"epoch {plan.epoch} is in force with other content; raise the epoch"
                return Verdict(answer=_refused(plan, Rule.EPOCH, "epoch", detail))
            if self.applied is not None and not self.expired:
                self.renew(now_ns)
                return Verdict(answer=self.applied)
        self.plan, self.applied = plan, None
        self.expired = False
        # What was laid out as wanted is kept so by the executor, and not handed on again.
        self._layout_results = {
            layout.gpu_uuid: result
            for layout in plan.gpu_layouts
            if self._laid.get(layout.gpu_uuid) == layout
            and (result := self._layout_results.get(layout.gpu_uuid)) is not None
            and result.status is ApplyStatus.APPLIED
        }
        self._lease_ends_ns = now_ns + int(plan.lease_s * 1e9)
        return self._judge(plan, gpu_uuids)

    def again(self, *, gpu_uuids: frozenset[str]) -> Verdict | None:
        """The plan in force judged anew, after the devices changed; None without a plan."""
        return None if self.plan is None else self._judge(self.plan, gpu_uuids)

    def settle(self, verdict: Verdict, engine_results: tuple[ApplyResult, ...]) -> PlanApplied:
        """The answer to the plan that was just taken, once the engine has done its part."""
        before, self._settled = self.applied, verdict.results + engine_results
        self._answer_due = False
        self.applied = self._answer()
        self._count(before, self.applied)
        return self.applied

    def renew(self, now_ns: int) -> None:
        """Word from the controller: the lease begins anew. What has run out stays so until the plan comes again."""
        if self.plan is not None and not self.expired:
            self._lease_ends_ns = now_ns + int(self.plan.lease_s * 1e9)

    def check(self, *, now_ns: int, wall_ns: int) -> NodeEvent | None:
        """LEASE_EXPIRED, once, when the lease has run out; the recommendations are gone then."""
        self._now_ns = max(self._now_ns, now_ns)
        if self._lease_ends_ns is None or now_ns < self._lease_ends_ns:
            return None
        assert self.plan is not None
        dropped, self._settings = len(self._settings), ()
        self._lease_ends_ns = None
        self.expired = True
        self._layouts_due = {}
        self._feed(PlanGone())
        detail = (
            f"no word from the controller for {self.plan.lease_s:g} s: plan {self.plan.epoch} no longer recommends "
            f"anything ({dropped} settings dropped); running work goes on"
        )
        return NodeEvent(kind=NodeEventKind.LEASE_EXPIRED, time_ns=max(wall_ns, 0), detail=detail)

    def lease_left_s(self, now_ns: int) -> float:
        """Seconds until the lease runs out; 0 without a plan or after it."""
        return 0.0 if self._lease_ends_ns is None else max(0.0, (self._lease_ends_ns - now_ns) / 1e9)

    # Devices

    def quarantines(self, now_ns: int) -> dict[str, str]:
        """Devices that take no new work for now, and why."""
        return {
            uuid: "lost too often, quarantined for a while: see to its bus, its power and its driver"
            for uuid, device in self._state.devices.items()
            if device.is_quarantined(now_ns)
        }

    def asks(self, gpu_uuid: str) -> bool:
        """Whether a cycle wants the settings of this device; where a budget is only watched, once is enough."""
        _, is_enforced = self._state.budget_now()
        return is_enforced or self._state.is_involved or self._state.device(gpu_uuid).settings is None

    def start(self, records: tuple[DeviceRecord, ...]) -> tuple[Command, ...]:
        """What the journal of the run before asks to be put back."""
        return self._feed(Started(records=records))

    def turned(self, gpu_uuid: str, *, lost: bool, now_ns: int, wall_ns: int) -> None:
        """A device was lost, or came back."""
        self._feed(Turned(gpu_uuid=gpu_uuid, lost=lost, now_ns=now_ns, wall_ns=wall_ns))

    def tick(self, tick: Tick) -> tuple[Command, ...]:
        """One cycle; the commands are to be carried out in order and told back by `executed`."""
        self._now_ns = max(self._now_ns, tick.now_ns)
        commands = self._feed(tick)
        for check in tick.gpus:
            self.repairs_total.update(self._state.device(check.gpu_uuid).repaired)
        return commands

    def executed(self, executed: Executed) -> tuple[Command, ...]:
        """What became of commands; what is returned goes before those of the next tick."""
        return self._feed(executed)

    def take_layouts(self) -> tuple[GpuLayout, ...]:
        """MIG layouts that are to be made now, which takes long; each is told back by `laid_out`."""
        due, self._layouts_due = self._layouts_due, {}
        self._changing |= due.keys()
        return tuple(due.values())

    def laid_out(self, layout: GpuLayout, result: ApplyResult) -> None:
        """What became of a layout."""
        self._changing -= {layout.gpu_uuid}
        self._layout_results[layout.gpu_uuid] = result
        self._laid[layout.gpu_uuid] = layout
        self._answer_anew()

    def stop(self) -> tuple[Command, ...]:
        """Puts back everything that is changed; nothing is ordered afterwards."""
        self._layouts_due = {}
        return self._feed(Stopped())

    def take_events(self) -> tuple[NodeEvent, ...]:
        """What befell since the call before."""
        events = tuple(self._events)
        self._events.clear()
        return events

    def take_answer(self) -> PlanApplied | None:
        """The answer to the plan in force, when it has changed since it was last given."""
        due, self._answer_due = self._answer_due, False
        return self.applied if due else None

    def _feed(self, event: Event) -> tuple[Command, ...]:
        self._state, commands = step(self._state, event, self._limits)
        self._events.extend(command.event for command in commands if isinstance(command, Announce))
        self._answer_anew()
        return tuple(command for command in commands if not isinstance(command, Announce))

    def _answer_anew(self) -> None:
        """What became of the plan's items, to be told where it changed."""
        if self.applied is None:
            return
        answer = self._answer()
        # Watts that move with the budget are in the samples; an answer is for what became of an item.
        if _gist(answer) != _gist(self.applied):
            self._answer_due = True
            self._count(self.applied, answer)
        self.applied = answer if self._answer_due else self.applied

    def _count(self, before: PlanApplied | None, after: PlanApplied) -> None:
        """Refusals that are new."""
        known = () if before is None else _gist(before)
        for item in _gist(after):
            if item[1] is ApplyStatus.REFUSED and item[2] and item not in known:
                self.refusals_total[item[2]] += 1

    def _judge(self, plan: NodePlan, gpu_uuids: frozenset[str]) -> Verdict:
        parent_of = parents(self._gpus)
        quarantined = frozenset(
            uuid for uuid, device in self._state.devices.items() if device.is_quarantined(self._now_ns)
        )
        ground = Ground(
            gpu_uuids=gpu_uuids, gpus=self._gpus, access=self._access, has_control=self._has_control,
            quarantined=quarantined, changing=self._changing, tried=frozenset(self._layout_results),
            held=self._held, parent_of=parent_of,
        )  # fmt: skip
        judged = judge(plan, ground)
        self._held = judged.assignments
        if not self.expired:
            self._settings = judged.settings
            self._layouts_due = {layout.gpu_uuid: layout for layout in judged.layouts}
            self._take(plan, judged, parent_of)
        return Verdict(assignments=judged.assignments, results=judged.results)

    def _take(self, plan: NodePlan, judged: Judged, parent_of: dict[str, str]) -> None:
        gangs = gangs_of(judged.assignments, parent_of)
        before = {uuid: device.wish for uuid, device in self._state.devices.items()}
        wishes = wishes_of(judged.settings, gangs, before, self._limits) if plan.enforce else {}
        self._enforced = tuple(wishes)
        is_enforced = plan.enforce and self._has_control
        self._state, _ = step(
            self._state,
            PlanInForce(wishes=wishes, gangs=gangs, budget_w=plan.power_budget_w, enforce=is_enforced),
            self._limits,
        )

    def _answer(self) -> PlanApplied:
        assert self.plan is not None
        told = enforced(
            self._state, self._enforced, now_ns=self._now_ns, is_expired=self.expired, limits=self._limits
        )  # fmt: skip
        under_way = tuple(
            ApplyResult(subject=uuid, status=UNDER_WAY, detail="the MIG layout is under way")
            for uuid in sorted(self._layouts_due.keys() | self._changing)
        )
        layouts = tuple(result for _, result in sorted(self._layout_results.items()))
        results = self._settled + told + under_way + layouts
        return PlanApplied(epoch=self.plan.epoch, status=_overall(results), results=results)


def _gist(applied: PlanApplied) -> tuple[tuple[str, ApplyStatus, str], ...]:
    return tuple((result.subject, result.status, result.rule) for result in applied.results)


def _refused(plan: NodePlan, rule: Rule, subject: str, detail: str) -> PlanApplied:
    result = ApplyResult(subject=subject, status=ApplyStatus.REFUSED, detail=detail, rule=rule.value)
    return PlanApplied(epoch=plan.epoch, status=ApplyStatus.REFUSED, results=(result,))


def _overall(results: tuple[ApplyResult, ...]) -> ApplyStatus:
    """The gravest outcome of any item; items that are not listed were plainly applied."""
    gravity = (ApplyStatus.FAILED, ApplyStatus.REFUSED, UNDER_WAY, ApplyStatus.OBSERVED)
    statuses = {result.status for result in results}
    return next((status for status in gravity if status in statuses), ApplyStatus.APPLIED)
