"""The plan in force: epoch, lease, gang rule, and the answer to the controller.

Epochs rise: a lower one is refused, an equal one with equal content is answered as before. Each item is validated
alone. The lease is renewed by any message of the controller; when it expires, settings are restored while running
work continues, but for limits without which that work would exceed a power budget (`Assignment.limit_before_start`). A
gang (devices that share a workload) gets its lowest limit, since the slowest member sets the pace. A rise below the
hysteresis is ignored for the whole gang. A setting is applied once it was read back.

Jobs of another engine on this node (Slurm's) ask something of the devices that they hold, which stands until they end, whatever
becomes of the controller and its lease. What a plan has for such a job is of the job and not of the device: the engine chooses the
device when the job starts, and the plan names it later, so until then its limit goes where the job is. Clocks have one owner: a device whose job sets them
itself is put back as it was found and left alone; only the node's power budget, a circuit breaker, still lowers it.
"""

from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import NamedTuple

from eelgrid_agent.enforce.guard.core import GuardState, get_limit_bounds, step_guard
from eelgrid_agent.enforce.guard.device_step import DeviceState, get_target_limit_w
from eelgrid_agent.enforce.guard.events import (
    AnnounceEvent,
    CommandsExecuted,
    DesiredSettings,
    DeviceLossChanged,
    DeviceRecord,
    GuardCommand,
    GuardEvent,
    GuardStarted,
    GuardStopped,
    GuardTick,
    JobHold,
    PlanExpired,
    PlanInForce,
)
from eelgrid_agent.enforce.rules import (
    GuardLimits,
    LocalPolicy,
    PlanContext,
    RefusalRule,
    ValidatedPlan,
    map_mig_parents,
    validate_plan,
)
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
)
from eelgrid_protos.values import dataclass


def find_gangs(assignments: Iterable[Assignment], parent_of: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    """For every device of a gang all its members, sorted."""
    gang_of: dict[str, set[str]] = {}
    by_workload: dict[str, set[str]] = {}
    for assignment in assignments:
        devices = {parent_of.get(uuid, uuid) for uuid in assignment.gpu_uuids}
        by_workload.setdefault(assignment.workload_id, set()).update(devices)
    for devices in by_workload.values():
        joined = set(devices)
        for uuid in devices:
            joined |= gang_of.get(uuid, set())
        for uuid in joined:
            gang_of[uuid] = joined
    return {uuid: tuple(sorted(members)) for uuid, members in gang_of.items() if len(members) > 1}


def merge_gang_settings(
    settings: Iterable[GpuSetting],
    gangs: Mapping[str, tuple[str, ...]],
    before: Mapping[str, DesiredSettings],
    limits: GuardLimits,
) -> dict[str, DesiredSettings]:
    """Returns the desired settings of each device; `before` are the previous ones."""
    by_uuid = {setting.gpu_uuid: setting for setting in settings}
    wishes: dict[str, DesiredSettings] = {}
    for uuid in by_uuid:
        if uuid in wishes:
            continue
        members = gangs.get(uuid, (uuid,))
        asked = [by_uuid[member] for member in members if member in by_uuid]
        limit_w = min((one.power_limit_w for one in asked if one.power_limit_w is not None), default=None)
        held = {before[member].limit_w if member in before else None for member in members}
        if len(held) == 1 and limit_w is not None:
            (held_w,) = held
            # Only rises: work may start once the limit of its plan is in force, and budgets count with that.
            if held_w is not None and 0.0 <= limit_w - held_w < limits.hysteresis_w:
                limit_w = held_w
        locks = [
            (one.sm_clock_min_mhz, one.sm_clock_max_mhz)
            for one in asked
            if one.sm_clock_min_mhz is not None and one.sm_clock_max_mhz is not None
        ]
        lock = (min(low for low, _ in locks), min(high for _, high in locks)) if locks else None
        profiles = {one.power_profile for one in asked} if len(asked) == len(members) else {None}
        for member in members:
            profile = next(iter(profiles)) if len(profiles) == 1 else None
            wishes[member] = DesiredSettings(limit_w=limit_w, clocks=lock, profile=profile)
    return wishes


def find_kept_limits(plan: NodePlan, wishes: Mapping[str, DesiredSettings]) -> dict[str, DesiredSettings]:
    """Returns what stays when the lease of a plan runs out: limits without which its work would exceed a power budget."""
    limited = {uuid for one in plan.assignments if one.limit_before_start for uuid in one.gpu_uuids}
    return {
        uuid: DesiredSettings(limit_w=wish.limit_w)
        for uuid, wish in wishes.items()
        if uuid in limited and wish.limit_w is not None
    }


class PlannedJobs(NamedTuple):
    """What a plan has for work of another engine, by workload without its restart, and which of them it expects on a device."""

    limits_w: Mapping[str, float]
    expected: Mapping[str, str]


NO_PLANNED_JOBS = PlannedJobs({}, {})


def find_planned_jobs(
    assignments: Iterable[Assignment], wishes: Mapping[str, DesiredSettings], parent_of: Mapping[str, str]
) -> PlannedJobs:
    """Returns the lowest limit that the plan has for the devices of each workload, and whose each device is to be."""
    limits_w, expected = dict[str, float](), dict[str, str]()
    for one in assignments:
        # A restart of a job has an id of its own in the plan.
        name, _, _ = one.workload_id.partition(".")
        for device in one.gpu_uuids:
            uuid = parent_of.get(device, device)
            expected[uuid] = name
            wish = wishes.get(uuid)
            if wish is not None and wish.limit_w is not None:
                limits_w[name] = min(wish.limit_w, limits_w.get(name, wish.limit_w))
    return PlannedJobs(limits_w, expected)


def overlay_jobs(
    wishes: Mapping[str, DesiredSettings], holds: Mapping[str, JobHold], planned: PlannedJobs, *, has_control: bool
) -> dict[str, DesiredSettings]:
    """Returns what is wanted of each device by the plan's wishes and by the jobs that hold devices."""
    found = dict(wishes)
    handed = {hold.workload for hold in holds.values() if hold.workload}
    for uuid, hold in holds.items() if has_control else ():
        wish = found.get(uuid, DesiredSettings())
        if hold.owns_clocks:
            found.pop(uuid, None)
            continue
        planned_w = wish.limit_w
        if hold.workload in planned.limits_w:
            planned_w = planned.limits_w[hold.workload]
        elif hold.workload and planned.expected.get(uuid, hold.workload) in handed - {hold.workload}:
            # It was planned for a job that is on another device.
            planned_w = None
        limit_w = min((one for one in (planned_w, hold.limit_w) if one is not None), default=None)
        if limit_w != wish.limit_w:
            found[uuid] = replace(wish, limit_w=limit_w)
    return found


def answer_job(
    state: GuardState, uuid: str, hold: JobHold, *, has_limit: bool, has_control: bool, limits: GuardLimits
) -> str:
    """What the job that holds the device is told; empty while it is under way.

    `has_limit`: it has one of its own, or the plan has one for it.
    """
    device = state.device(uuid)
    if not has_control:
        return "this agent observes only: nothing is set" if hold.owns_clocks or has_limit else "known"
    if hold.owns_clocks:
        is_free = device.record is None and device.proposed is None and not device.is_busy
        return f"{RefusalRule.CLOCKS_OWNED}: left to the job, which sets clocks itself" if is_free else ""
    if not has_limit:
        return "known"
    if device.suspended or device.problems:
        return device.suspended or "; ".join(problem.detail for _, problem in device.problems)
    status, words = (IN_PROGRESS, "") if device.settings is None else _progress(state, device, limits)
    if status is not ApplyStatus.APPLIED or device.is_busy or device.is_restoring:
        return ""
    shown_w = None if device.settings is None else device.settings.requested_w
    return f"power limit {shown_w:g} W" + (f" ({words})" if words else "")


# Neither done nor refused: the next cycles tell.
IN_PROGRESS = ApplyStatus.UNSPECIFIED

_REFUSING = frozenset((RefusalRule.NOT_SUPPORTED, RefusalRule.NO_PERMISSION, RefusalRule.CONSTRAINTS, RefusalRule.GANG))
_ATTEMPTS_TOLD = 2


def report_enforced_settings(
    state: GuardState, uuids: Iterable[str], *, now_ns: int, is_expired: bool, limits: GuardLimits
) -> tuple[ApplyResult, ...]:
    """A result for each device that the plan, or the gang rule, sets."""
    return tuple(_result(state, state.device(uuid), now_ns, limits, is_expired=is_expired) for uuid in sorted(uuids))


def _result(
    state: GuardState, device: DeviceState, now_ns: int, limits: GuardLimits, *, is_expired: bool
) -> ApplyResult:
    settings = device.settings
    shown_w = None if settings is None else settings.enforced_w or settings.requested_w

    def told(status: ApplyStatus, detail: str, rule: RefusalRule | None = None) -> ApplyResult:
        return ApplyResult(
            subject=device.gpu_uuid,
            status=status,
            detail=detail[:2000],
            rule="" if rule is None else rule.value,
            power_limit_w=shown_w,
        )

    if is_expired:
        return told(ApplyStatus.REFUSED, "the lease expired: settings are restored", RefusalRule.LEASE)
    if device.is_quarantined(now_ns):
        return told(
            ApplyStatus.REFUSED, "this GPU was lost too often and is left alone for a while", RefusalRule.QUARANTINE
        )
    if device.suspended:
        return told(ApplyStatus.REFUSED, device.suspended, RefusalRule.DRIFT)
    if device.is_lost or device.failure is not None:
        word = "lost" if device.failure is None else device.failure.value
        return told(ApplyStatus.FAILED, f"the device does not answer: {word}", RefusalRule.DEVICE)
    if device.problems:
        rule = device.problems[0][1].rule
        detail = "; ".join(f"{field}: {problem.detail}" for field, problem in device.problems)
        return told(ApplyStatus.REFUSED if rule in _REFUSING else ApplyStatus.FAILED, detail, rule)
    if device.note is not None and device.attempts >= _ATTEMPTS_TOLD:
        return told(ApplyStatus.FAILED, device.note.detail, device.note.rule)
    if settings is None or device.is_busy or device.is_restoring:
        return told(IN_PROGRESS, "in progress: the result is reported when it was read back")
    return told(*_progress(state, device, limits))


def _progress(state: GuardState, device: DeviceState, limits: GuardLimits) -> tuple[ApplyStatus, str]:
    settings, wish = device.settings, device.wish
    assert settings is not None
    bounds = get_limit_bounds(state.devices, device)
    goal, words, is_there = get_target_limit_w(device, bounds), list[str](), True
    if goal is not None and wish.limit_w is not None:
        level_w = state.budget.level_w
        aim_w = goal if level_w is None or bounds is None else min(goal, max(level_w, bounds.low_w))
        if goal != wish.limit_w:
            words.append(f"{RefusalRule.CONSTRAINTS}: {wish.limit_w:g} W requested, the devices accept {goal:g} W")
        if aim_w < goal:
            words.append(f"{RefusalRule.NODE_BUDGET}: held at {aim_w:g} W of {goal:g} W")
        if device.gang:
            words.append(f"{RefusalRule.GANG}: one limit for {len(device.gang)} devices that work in step")
        is_there = settings.requested_w is not None and abs(settings.requested_w - aim_w) <= limits.tolerance_w
        if not is_there:
            words.append(f"{RefusalRule.SLEW}: on the way to {aim_w:g} W by {limits.slew_w:g} W a cycle")
        if device.capped_w is not None:
            words.append(f"{device.capped_w:g} W are enforced from outside the host")
    if wish.clocks is not None:
        is_there = is_there and device.clocks is not None
    if wish.profile is not None:
        is_there = is_there and settings.power_profile == wish.profile
    return ApplyStatus.APPLIED if is_there else IN_PROGRESS, "; ".join(words)


_EVENTS_MOST = 256
# Looks a second while a budget is kept: a rise is seen within half a second, which leaves the device the other half.
_CYCLE_S = 1.0
_BUDGET_CYCLE_S = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanDecision:
    """The decision on a plan: work to pass on, or a final answer.

    `answer` is None when the plan is accepted: the engine applies `assignments` and `Guard.settle` makes the answer.
    """

    assignments: tuple[Assignment, ...] = ()
    results: tuple[ApplyResult, ...] = ()
    answer: PlanApplied | None = None


class Guard:
    """The plan of one node. `has_control` says that the commands of `tick` are executed."""

    def __init__(
        self,
        node_name: str,
        *,
        has_control: bool = False,
        local: LocalPolicy | None = None,
        limits: GuardLimits | None = None,
    ) -> None:
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
        # What the plan wants by itself, and what the jobs of another engine ask of the devices that they hold.
        self._plan_wishes: Mapping[str, DesiredSettings] = {}
        self._gangs: Mapping[str, tuple[str, ...]] = {}
        self._planned = NO_PLANNED_JOBS
        self._holds: Mapping[str, JobHold] = {}
        self._events: deque[NodeEvent] = deque(maxlen=_EVENTS_MOST)
        self._answer_due = False
        self.plan: NodePlan | None = None
        self.applied: PlanApplied | None = None
        # That the lease of this plan ran out; None while it lasts.
        self.expiry: NodeEvent | None = None
        # By field and by rule, since the agent began.
        self.repairs_total: Counter[str] = Counter()
        self.refusals_total: Counter[str] = Counter()

    @property
    def expired(self) -> bool:
        """Whether the lease of the plan ran out, and it was not sent again."""
        return self.expiry is not None

    @property
    def epoch(self) -> int:
        """The last plan taken; 0 before the first."""
        return 0 if self.plan is None else self.plan.epoch

    @property
    def settings(self) -> tuple[GpuSetting, ...]:
        """Settings of the plan in force, recommended or enforced; none once the lease expired."""
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
    def has_work(self) -> bool:
        """Whether `tick` has something to do; without, no device need be asked anything."""
        budget_w, _ = self._state.current_budget()
        return budget_w is not None or self._state.is_involved or bool(self._layouts_due)

    @property
    def held_assignments(self) -> tuple[Assignment, ...]:
        """The assignments that were taken."""
        return self._held

    def requested_layout(self, gpu_uuid: str) -> GpuLayout | None:
        """The layout of the plan in force that was handed on for this device."""
        return self._laid.get(gpu_uuid) if gpu_uuid in self._layout_results else None

    @property
    def unmet_layouts(self) -> frozenset[str]:
        """Devices whose requested MIG layout was not reached: due, in progress, refused or failed.

        Empty for a plan that is only observed, or whose lease expired.
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
        budget_w, _ = self._state.current_budget()
        return _CYCLE_S if budget_w is None else _BUDGET_CYCLE_S

    # Plans and their lease

    def update_inventory(self, gpus: tuple[Gpu, ...], access: AccessLevel) -> None:
        """The newest inventory; `again` judges the plan on it."""
        self._gpus, self._access = gpus, access

    def offer_plan(self, plan: NodePlan, *, gpu_uuids: frozenset[str], now_ns: int) -> PlanDecision:
        """Judges a plan; any plan for this node is word from the controller and renews the lease."""
        self._now_ns = now_ns
        if plan.node_name != self._node_name:
            detail = f"the plan is for node {plan.node_name}; this is {self._node_name}"
            return PlanDecision(answer=_refused_result(plan, RefusalRule.NODE_NAME, "node_name", detail))
        if plan.epoch == 0:
            return PlanDecision(answer=_refused_result(plan, RefusalRule.EPOCH, "epoch", "is 0; epochs count from 1"))
        if plan.epoch < self.epoch:
            detail = f"epoch {self.epoch} is in force and epochs rise; send a higher one"
            return PlanDecision(answer=_refused_result(plan, RefusalRule.EPOCH, "epoch", detail))
        if plan.epoch == self.epoch:
            if plan != self.plan:
                detail = f"epoch {plan.epoch} is in force with other content; raise the epoch"
                return PlanDecision(answer=_refused_result(plan, RefusalRule.EPOCH, "epoch", detail))
            if self.applied is not None and not self.expired:
                self.renew_lease(now_ns)
                return PlanDecision(answer=self.applied)
        self.plan, self.applied, self.expiry = plan, None, None
        # What was laid out as wanted is kept so by the executor, and not handed on again.
        self._layout_results = {
            layout.gpu_uuid: result
            for layout in plan.gpu_layouts
            if self._laid.get(layout.gpu_uuid) == layout
            and (result := self._layout_results.get(layout.gpu_uuid)) is not None
            and result.status is ApplyStatus.APPLIED
        }
        self._lease_ends_ns = now_ns + int(plan.lease_s * 1e9)
        return self._validate_plan(plan, gpu_uuids)

    def revalidate_plan(self, *, gpu_uuids: frozenset[str]) -> PlanDecision | None:
        """Evaluates the plan in force again after the devices changed; None without a plan."""
        return None if self.plan is None else self._validate_plan(self.plan, gpu_uuids)

    def complete_plan(self, verdict: PlanDecision, engine_results: tuple[ApplyResult, ...]) -> PlanApplied:
        """The answer to the plan that was just taken, once the engine has done its part."""
        before, self._settled = self.applied, verdict.results + engine_results
        self._answer_due = False
        self.applied = self._build_answer()
        self._count(before, self.applied)
        return self.applied

    def renew_lease(self, now_ns: int) -> None:
        """Renews the lease on a message from the controller.

        A plan that expired stays expired until it is sent again.
        """
        if self.plan is not None and not self.expired:
            self._lease_ends_ns = now_ns + int(self.plan.lease_s * 1e9)

    def check_lease(self, *, now_ns: int, wall_ns: int) -> NodeEvent | None:
        """LEASE_EXPIRED, once, when the lease has run out; the recommendations are gone then."""
        self._now_ns = max(self._now_ns, now_ns)
        if self._lease_ends_ns is None or now_ns < self._lease_ends_ns:
            return None
        assert self.plan is not None
        self._plan_wishes = find_kept_limits(self.plan, self._plan_wishes)
        dropped, self._settings = sum(one.gpu_uuid not in self._plan_wishes for one in self._settings), ()
        self._lease_ends_ns = None
        kept = f", power limits of {len(self._plan_wishes)} GPUs kept for a budget" if self._plan_wishes else ""
        detail = (
            f"no message from the controller for {self.plan.lease_s:g} s: plan {self.plan.epoch} expired "
            f"({dropped} settings dropped{kept}); running work continues"
        )
        self.expiry = NodeEvent(kind=NodeEventKind.LEASE_EXPIRED, time_ns=max(wall_ns, 0), detail=detail)
        self._layouts_due = {}
        self._planned = NO_PLANNED_JOBS
        self._step(PlanExpired())
        if self._holds or self._plan_wishes:
            self._update_wishes(self._state.plan_budget_w, is_enforced=self._state.is_enforced)
        return self.expiry

    # Jobs of another engine

    def update_job_holds(self, holds: Mapping[str, JobHold], *, wall_ns: int) -> None:
        """Replaces what jobs ask of devices, by UUID; what a job that ended asked is put back."""
        if holds == self._holds:
            return
        fresh = [uuid for uuid, hold in holds.items() if hold.owns_clocks and self._holds.get(uuid) != hold]
        self._holds = dict(holds)
        for uuid in sorted(fresh) if self._has_control else ():
            detail = (
                f"{RefusalRule.CLOCKS_OWNED}: job {holds[uuid].job} sets the clocks of this GPU itself (--gpu-freq): what was "
                "set here is put back, and no limit and no clocks are set until it ends"
            )
            self._events.append(
                NodeEvent(kind=NodeEventKind.SETTING_RESTORED, time_ns=max(wall_ns, 0), gpu_uuid=uuid, detail=detail)
            )
        self._update_wishes(self._state.plan_budget_w, is_enforced=self._state.is_enforced)
        self._answer_anew()

    def answer_jobs(self) -> dict[str, str]:
        """What each job is told, a line for each device; without the jobs whose devices are not all settled."""
        answers: dict[str, list[str]] = {}
        for uuid, hold in sorted(self._holds.items()):
            has_limit = hold.limit_w is not None or hold.workload in self._planned.limits_w
            word = answer_job(
                self._state, uuid, hold, has_limit=has_limit, has_control=self._has_control, limits=self._limits
            )
            answers.setdefault(hold.job, []).append(f"{uuid}: {word}\n" if word else "")
        return {job: "".join(lines) for job, lines in answers.items() if all(lines)}

    @property
    def planned_job_limits_w(self) -> Mapping[str, float]:
        """The limit that the plan in force has for the devices of each workload, without the restart of a job."""
        return self._planned.limits_w if self._has_control else {}

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

    def needs_settings(self, gpu_uuid: str) -> bool:
        """Whether a cycle wants the settings of this device; where a budget is only watched, once is enough."""
        _, is_enforced = self._state.current_budget()
        return is_enforced or self._state.is_involved or self._state.device(gpu_uuid).settings is None

    def start(self, records: tuple[DeviceRecord, ...]) -> tuple[GuardCommand, ...]:
        """What the journal of the run before asks to be put back."""
        return self._step(GuardStarted(records=records))

    def on_device_loss(self, gpu_uuid: str, *, lost: bool, now_ns: int, wall_ns: int) -> None:
        """A device was lost, or came back."""
        self._step(DeviceLossChanged(gpu_uuid=gpu_uuid, lost=lost, now_ns=now_ns, wall_ns=wall_ns))

    def on_tick(self, tick: GuardTick) -> tuple[GuardCommand, ...]:
        """Runs one cycle; execute the commands in order and report them to `executed`."""
        self._now_ns = max(self._now_ns, tick.now_ns)
        commands = self._step(tick)
        for check in tick.gpus:
            self.repairs_total.update(self._state.device(check.gpu_uuid).repaired)
        return commands

    def on_executed(self, executed: CommandsExecuted) -> tuple[GuardCommand, ...]:
        """Records the outcomes of commands; the returned commands precede those of the next tick."""
        return self._step(executed)

    def drain_layouts(self) -> tuple[GpuLayout, ...]:
        """Returns the MIG layouts to apply now, which takes long; report each to `laid_out`."""
        due, self._layouts_due = self._layouts_due, {}
        self._changing |= due.keys()
        return tuple(due.values())

    def on_layout_result(self, layout: GpuLayout, result: ApplyResult) -> None:
        """What became of a layout."""
        self._changing -= {layout.gpu_uuid}
        self._layout_results[layout.gpu_uuid] = result
        self._laid[layout.gpu_uuid] = layout
        self._answer_anew()

    def stop(self) -> tuple[GuardCommand, ...]:
        """Puts back everything that is changed; nothing is ordered afterwards."""
        self._layouts_due = {}
        return self._step(GuardStopped())

    def drain_events(self) -> tuple[NodeEvent, ...]:
        """What befell since the call before."""
        events = tuple(self._events)
        self._events.clear()
        return events

    def pop_answer(self) -> PlanApplied | None:
        """The answer to the plan in force, when it has changed since it was last given."""
        due, self._answer_due = self._answer_due, False
        return self.applied if due else None

    def _step(self, event: GuardEvent) -> tuple[GuardCommand, ...]:
        self._state, commands = step_guard(self._state, event, self._limits)
        self._events.extend(command.event for command in commands if isinstance(command, AnnounceEvent))
        self._answer_anew()
        return tuple(command for command in commands if not isinstance(command, AnnounceEvent))

    def _answer_anew(self) -> None:
        """What became of the plan's items, to be told where it changed."""
        if self.applied is None:
            return
        answer = self._build_answer()
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

    def _validate_plan(self, plan: NodePlan, gpu_uuids: frozenset[str]) -> PlanDecision:
        parent_of = map_mig_parents(self._gpus)
        quarantined = frozenset(
            uuid for uuid, device in self._state.devices.items() if device.is_quarantined(self._now_ns)
        )
        ground = PlanContext(
            gpu_uuids=gpu_uuids,
            gpus=self._gpus,
            access=self._access,
            has_control=self._has_control,
            quarantined=quarantined,
            changing=self._changing,
            tried=frozenset(self._layout_results),
            held=self._held,
            parent_of=parent_of,
        )
        judged = validate_plan(plan, ground)
        self._held = judged.assignments
        if not self.expired:
            self._settings = judged.settings
            self._layouts_due = {layout.gpu_uuid: layout for layout in judged.layouts}
            self._adopt_plan(plan, judged, parent_of)
        return PlanDecision(assignments=judged.assignments, results=judged.results)

    def _adopt_plan(self, plan: NodePlan, judged: ValidatedPlan, parent_of: dict[str, str]) -> None:
        self._gangs = gangs = find_gangs(judged.assignments, parent_of)
        before = self._plan_wishes
        self._plan_wishes = merge_gang_settings(judged.settings, gangs, before, self._limits) if plan.enforce else {}
        self._planned = find_planned_jobs(judged.assignments, self._plan_wishes, parent_of)
        self._enforced = tuple(self._plan_wishes)
        self._update_wishes(plan.power_budget_w, is_enforced=plan.enforce and self._has_control)

    def _update_wishes(self, budget_w: float | None, *, is_enforced: bool) -> None:
        wishes = overlay_jobs(self._plan_wishes, self._holds, self._planned, has_control=self._has_control)
        event = PlanInForce(wishes=wishes, gangs=self._gangs, budget_w=budget_w, enforce=is_enforced)
        self._state, _ = step_guard(self._state, event, self._limits)

    def _build_answer(self) -> PlanApplied:
        assert self.plan is not None
        owned = {
            uuid: self._holds[uuid] for uuid in self._enforced if uuid in self._holds and self._holds[uuid].owns_clocks
        }
        enforced = set(self._enforced) - owned.keys()
        # What an expired plan still wants is in force; all else of it is restored.
        restored = enforced - self._plan_wishes.keys() if self.expired else set[str]()
        told = tuple(
            result
            for uuids, is_expired in ((restored, True), (enforced - restored, False))
            for result in report_enforced_settings(
                self._state, uuids, now_ns=self._now_ns, is_expired=is_expired, limits=self._limits
            )
        )
        told += tuple(_left_alone(uuid, hold) for uuid, hold in sorted(owned.items()))
        under_way = tuple(
            ApplyResult(subject=uuid, status=IN_PROGRESS, detail="the MIG layout is under way")
            for uuid in sorted(self._layouts_due.keys() | self._changing)
        )
        layouts = tuple(result for _, result in sorted(self._layout_results.items()))
        results = self._settled + told + under_way + layouts
        return PlanApplied(epoch=self.plan.epoch, status=_overall(results), results=results)


def _gist(applied: PlanApplied) -> tuple[tuple[str, ApplyStatus, str], ...]:
    return tuple((result.subject, result.status, result.rule) for result in applied.results)


def _left_alone(uuid: str, hold: JobHold) -> ApplyResult:
    detail = f"job {hold.job} sets the clocks of this GPU itself (--gpu-freq), and clocks have one owner: left alone"
    return ApplyResult(subject=uuid, status=ApplyStatus.REFUSED, detail=detail, rule=RefusalRule.CLOCKS_OWNED.value)


def _refused_result(plan: NodePlan, rule: RefusalRule, subject: str, detail: str) -> PlanApplied:
    result = ApplyResult(subject=subject, status=ApplyStatus.REFUSED, detail=detail, rule=rule.value)
    return PlanApplied(epoch=plan.epoch, status=ApplyStatus.REFUSED, results=(result,))


def _overall(results: tuple[ApplyResult, ...]) -> ApplyStatus:
    """The gravest outcome of any item; items that are not listed were plainly applied."""
    gravity = (ApplyStatus.FAILED, ApplyStatus.REFUSED, IN_PROGRESS, ApplyStatus.OBSERVED)
    statuses = {result.status for result in results}
    return next((status for status in gravity if status in statuses), ApplyStatus.APPLIED)
