"""Rules that refuse or shape a setting, the thresholds of the guard, and the validation of a plan's items.

`RefusalRule` holds every value of `ApplyResult.rule` and of the label `rule`; alerts and dashboards use no other.
`GuardLimits` gives each threshold with its reason; `LocalPolicy` is the operator's. `validate_plan` decides, before any
device is read, which assignments, settings and layouts of a plan this node accepts, and by which rule it refuses the
others.
"""

from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from enum import StrEnum

from eelgrid_protos.messages import (
    AccessLevel,
    ApplyResult,
    ApplyStatus,
    Assignment,
    Gpu,
    GpuLayout,
    GpuSetting,
    NodePlan,
)
from eelgrid_protos.quantities import GPU_MILLI_WHOLE
from eelgrid_protos.values import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardLimits:
    """The thresholds of the guard.

    `tolerance_w`: drivers round a limit to a tenth of a watt or to a watt, so limits nearer than this are equal.
    `hysteresis_w`: half a percent of a 700 W part, far under the +-5 % of its sensor; a planner that wavers by less
    must not cost a write to the device and to the disk.

    `repairs_most` in `repair_window_s`: one repair mends an operator's slip and two a script that ran twice; whoever
    undoes a third means it.

    `losses_most` in `loss_window_s`: a reset is one loss and a driver upgrade may be two. Quarantine lasts
    `quarantine_s` at first and doubles with each within `quarantine_memory_s`, up to `quarantine_s_most`.
    """

    tolerance_w: float = 1.0
    hysteresis_w: float = 3.0
    slew_w: float = 100.0
    clock_step_mhz: int = 15
    clock_looks: int = 3
    repairs_most: int = 3
    repair_window_s: float = 600.0
    losses_most: int = 3
    loss_window_s: float = 600.0
    quarantine_s: float = 300.0
    quarantine_s_most: float = 21_600.0
    quarantine_memory_s: float = 86_400.0
    attempts_most: int = 6
    retry_s: float = 1.0
    retry_s_most: float = 60.0
    # Of the budget: where lowered limits aim, up to where they are released, and under what release begins.
    budget_aim: float = 0.98
    budget_raise: float = 0.97
    budget_calm: float = 0.95
    budget_window_s: float = 1.0
    budget_hold_s: float = 3.0
    # Longest sensor window (1 s) and period (0.1 s), and some: what was set is in the readings by then.
    budget_settle_s: float = 1.5

    def speed_up(self, times: float) -> "GuardLimits":
        """The same patience in a life that is so many times faster: of repairs, losses and quarantine."""
        return replace(
            self,
            repair_window_s=self.repair_window_s / times,
            loss_window_s=self.loss_window_s / times,
            quarantine_s=self.quarantine_s / times,
            quarantine_s_most=self.quarantine_s_most / times,
            quarantine_memory_s=self.quarantine_memory_s / times,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalPolicy:
    """What the operator of this node requires, whatever the controller requests.

    With `enforce` the local budget is kept even where the pool observes, since it was switched on here by hand; without
    it the node only reports.
    """

    power_budget_w: float | None = None
    enforce: bool = False


class RefusalRule(StrEnum):
    """Why an item of a plan, or a layout asked for by hand, was refused, failed or shaped."""

    # Of plans as a whole.
    EPOCH = "epoch"
    NODE_NAME = "node-name"
    OBSERVE_ONLY = "observe-only"
    LEASE = "lease"
    # Of assignments and settings.
    UNKNOWN_DEVICE = "unknown-device"
    NO_PERMISSION = "no-permission"
    NOT_SUPPORTED = "not-supported"
    CONSTRAINTS = "constraints"
    DUPLICATE = "duplicate"
    SHARES = "shares"
    SLEW = "slew"
    GANG = "gang"
    NODE_BUDGET = "node-budget"
    QUARANTINE = "quarantine"
    CLOCKS_OWNED = "clocks-owned"
    # Of MIG layouts.
    FOREIGN = "foreign"
    GEOMETRY = "geometry"
    MODE = "mode"
    PENDING = "pending"
    LOST = "lost"
    IN_USE = "in-use"
    CAPACITY = "capacity"
    SERIAL = "serial"
    ENGINE = "engine"
    # Of both.
    BUSY = "busy"
    DRIFT = "drift"
    JOURNAL = "journal"
    DEVICE = "device"


_NOWHERE = "this node has no such GPU; plan on its newest inventory"
_OBSERVED = "observe-only: seen, nothing written to the device"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanContext:
    """What a plan is validated against.

    `gpus` may lack devices of `gpu_uuids` of which only the presence is known. `held` are the assignments accepted
    before; `changing` are the devices whose MIG layout is being changed.
    """

    gpu_uuids: frozenset[str]
    gpus: tuple[Gpu, ...] = ()
    access: AccessLevel = AccessLevel.UNSPECIFIED
    has_control: bool = False
    quarantined: frozenset[str] = frozenset()
    changing: frozenset[str] = frozenset()
    tried: frozenset[str] = frozenset()
    held: tuple[Assignment, ...] = ()
    parent_of: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidatedPlan:
    """The accepted items, and a result for each item whose outcome is already known."""

    assignments: tuple[Assignment, ...]
    settings: tuple[GpuSetting, ...]
    layouts: tuple[GpuLayout, ...]
    results: tuple[ApplyResult, ...]


def map_mig_parents(gpus: tuple[Gpu, ...]) -> dict[str, str]:
    """The device that every UUID of a MIG slice belongs to."""
    return {
        compute.uuid: gpu.uuid
        for gpu in gpus
        for instance in gpu.gpu_instances
        for compute in instance.compute_instances
        if compute.uuid
    }


def validate_plan(plan: NodePlan, ground: PlanContext) -> ValidatedPlan:
    """See the module."""
    layouts, layout_results = _layouts(plan, ground)
    changing = ground.changing | {layout.gpu_uuid for layout in layouts}
    assignments, refusals = _assignments(plan.assignments, replace(ground, changing=changing))
    settings, setting_results = _settings(plan, ground)
    return ValidatedPlan(
        assignments=assignments, settings=settings, layouts=layouts, results=refusals + setting_results + layout_results
    )


def _refusal(subject: str, rule: RefusalRule, detail: str) -> ApplyResult:
    return ApplyResult(subject=subject, status=ApplyStatus.REFUSED, rule=rule.value, detail=detail)


def _assignments(
    assignments: tuple[Assignment, ...], ground: PlanContext
) -> tuple[tuple[Assignment, ...], tuple[ApplyResult, ...]]:
    """What this node can hold, and why not the rest."""
    held: dict[str, int] = {}
    seen: set[tuple[str, int]] = set()
    taken, refusals = [], []
    for assignment in assignments:
        problem = _problem(assignment, ground, held, seen)
        if problem is not None:
            refusals.append(_refusal(assignment.workload_id, *problem))
            continue
        seen.add((assignment.workload_id, assignment.replica))
        for uuid in assignment.gpu_uuids:
            held[uuid] = held.get(uuid, 0) + assignment.gpu_milli
        taken.append(assignment)
    return tuple(taken), tuple(refusals)


def _problem(
    assignment: Assignment, ground: PlanContext, held: Mapping[str, int], seen: set[tuple[str, int]]
) -> tuple[RefusalRule, str] | None:
    replica = f"replica {assignment.replica}"
    if (assignment.workload_id, assignment.replica) in seen:
        return RefusalRule.DUPLICATE, f"{replica} is assigned twice; list it once"
    if len(set(assignment.gpu_uuids)) < len(assignment.gpu_uuids):
        return RefusalRule.DUPLICATE, f"{replica} names one GPU twice; list each once"
    is_new = assignment not in ground.held
    for uuid in assignment.gpu_uuids:
        device = ground.parent_of.get(uuid, uuid)
        if device not in ground.gpu_uuids:
            return RefusalRule.UNKNOWN_DEVICE, f"{replica}: this node has no GPU {uuid}; plan on its newest inventory"
        if held.get(uuid, 0) + assignment.gpu_milli > GPU_MILLI_WHOLE:
            total = held.get(uuid, 0) + assignment.gpu_milli
            return (
                RefusalRule.SHARES,
                f"{replica}: GPU {uuid} would be shared out at {total} of {GPU_MILLI_WHOLE} milli",
            )
        if is_new and device in ground.quarantined:
            return (
                RefusalRule.QUARANTINE,
                f"{replica}: GPU {device} was lost too often and takes no new work for a while",
            )
        if is_new and device == uuid and uuid in ground.changing:
            return (
                RefusalRule.BUSY,
                f"{replica}: the MIG layout of GPU {uuid} is being changed; it is accepted when that is done",
            )
    return None


def _settings(plan: NodePlan, ground: PlanContext) -> tuple[tuple[GpuSetting, ...], tuple[ApplyResult, ...]]:
    """The settings that stand, and an outcome for each that needs no device to tell."""
    kept: dict[str, GpuSetting] = {}
    outcomes = []
    for setting in plan.gpu_settings:
        uuid = setting.gpu_uuid
        problem = _setting_problem(uuid, kept, ground, is_enforced=plan.enforce)
        if problem is not None:
            outcomes.append(_refusal(uuid, *problem))
            continue
        kept[uuid] = setting
        if not plan.enforce:
            outcomes.append(ApplyResult(subject=uuid, status=ApplyStatus.OBSERVED, detail=_OBSERVED))
    return tuple(kept.values()), tuple(outcomes)


def _setting_problem(
    uuid: str, kept: Mapping[str, GpuSetting], ground: PlanContext, *, is_enforced: bool
) -> tuple[RefusalRule, str] | None:
    if uuid not in ground.gpu_uuids:
        return RefusalRule.UNKNOWN_DEVICE, _NOWHERE
    if uuid in kept:
        return RefusalRule.DUPLICATE, "the plan sets this GPU twice; the first setting applies"
    if is_enforced and not ground.has_control:
        return (
            RefusalRule.NO_PERMISSION,
            "this agent may not control devices; allow it, or set the pool's mode to observe",
        )
    if is_enforced and ground.access not in {AccessLevel.UNSPECIFIED, AccessLevel.ROOT}:
        detail = f"limits need root and the agent has {ground.access.name.lower()}; run it as root, or only observe"
        return RefusalRule.NO_PERMISSION, detail
    return None


def _layouts(plan: NodePlan, ground: PlanContext) -> tuple[tuple[GpuLayout, ...], tuple[ApplyResult, ...]]:
    """The layouts to hand on, once each, and an outcome for those that are not; the executor sees what stands."""
    by_uuid = {gpu.uuid: gpu for gpu in ground.gpus}
    seen: set[str] = set()
    handed, outcomes = [], []
    for layout in plan.gpu_layouts:
        uuid, gpu = layout.gpu_uuid, by_uuid.get(layout.gpu_uuid)
        is_twice = uuid in seen
        seen.add(uuid)
        if uuid not in ground.gpu_uuids or gpu is None:
            outcomes.append(_refusal(uuid, RefusalRule.UNKNOWN_DEVICE, _NOWHERE))
        elif is_twice:
            outcomes.append(
                _refusal(uuid, RefusalRule.DUPLICATE, "the plan has two layouts for this GPU; the first applies")
            )
        elif not gpu.mig_capable and layout.mig_enabled:
            outcomes.append(_refusal(uuid, RefusalRule.NOT_SUPPORTED, f"{gpu.product} has no MIG; plan it whole"))
        elif not plan.enforce:
            outcomes.append(ApplyResult(subject=uuid, status=ApplyStatus.OBSERVED, detail=_OBSERVED))
        elif uuid not in ground.tried:
            problem = _layout_problem(uuid, plan.assignments, ground)
            if problem is not None:
                outcomes.append(_refusal(uuid, *problem))
            else:
                handed.append(layout)
    return tuple(handed), tuple(outcomes)


def _layout_problem(
    uuid: str, assignments: Sequence[Assignment], ground: PlanContext
) -> tuple[RefusalRule, str] | None:
    if not ground.has_control or ground.access in {AccessLevel.READ_ONLY, AccessLevel.MIG_MONITOR}:
        return (
            RefusalRule.NO_PERMISSION,
            "this agent may not change MIG here; grant it the rights, or set the pool's mode to observe",
        )
    if uuid in ground.quarantined:
        return RefusalRule.QUARANTINE, "this GPU was lost too often and is left alone for a while"
    for assignment in assignments:
        if uuid in assignment.gpu_uuids and assignment in ground.held:
            detail = f"{assignment.workload_id} holds the whole GPU; remove it first, then change the layout"
            return RefusalRule.BUSY, detail
    return None
