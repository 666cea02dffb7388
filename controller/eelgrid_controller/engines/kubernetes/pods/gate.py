"""The gate: turns pod and node events into placements, pins and releases.

Level-triggered: an event updates state and marks units; each marked unit is reconciled as a whole, so lost or
reordered instructions do not matter.

    UNKNOWN --all members wait--> ASKED --> WAITING --> PLACED --all members wait or stand there--> pinned
    WAITING, PLACED --members went, a place is no more, a pod is elsewhere--> LEAVING --> UNKNOWN

A term begins with a fence: each waiting pod is changed, so that a former leader's late write against the version
before fails. Until then nothing is decided. Same events in, same instructions out; time is an argument.
"""

from bisect import bisect_right
from collections.abc import Iterable

from eelgrid_controller.engines.kubernetes.model.inference_service import InferenceService
from eelgrid_controller.engines.kubernetes.model.node_affinity import trait_name
from eelgrid_controller.engines.kubernetes.model.pod_group import attempt_of, unit_of
from eelgrid_controller.engines.kubernetes.pods.admission_pins import AdmissionPins, describe_change
from eelgrid_controller.engines.kubernetes.pods.device_consistency import fence_pod, planned_amounts, planned_pod
from eelgrid_controller.engines.kubernetes.pods.external_usage import ExternalUsageTracker, PlannedPod
from eelgrid_controller.engines.kubernetes.pods.gate_events import (
    AdmissionAbandoned,
    AdoptUnit,
    AnnotateFailed,
    AnnotatePod,
    BindPod,
    CancelUnit,
    ClaimGpusUpdated,
    DeclineAdmitted,
    DeleteFailed,
    DevicesReported,
    GateEvent,
    GateInstruction,
    GatePodView,
    GateSynced,
    GateTicked,
    InferenceServiceDeleted,
    InferenceServiceUpdated,
    KubeNodeDeleted,
    KubeNodeUpdated,
    LeadershipAcquired,
    LeadershipLost,
    MoveFinished,
    NodeAcknowledged,
    NodeReportFailed,
    PatchDone,
    PatchFailed,
    PinAdmitted,
    PodAdmitted,
    PodDeleted,
    PodUpdated,
    RecordEvent,
    RecreatePod,
    RelatedSynced,
    RelatedUpdated,
    RemoveGate,
    ReplacementStarted,
    ReportPlacement,
    RetryPending,
    ScaleUnit,
    SubmitUnit,
    UngatePod,
    UnitCancelled,
    UnitDeferred,
    UnitPlaced,
    UnitPreempted,
    UnitRefused,
    WriteFailure,
)
from eelgrid_controller.engines.kubernetes.pods.inflight import InflightPods, UnboundPodWatchdog
from eelgrid_controller.engines.kubernetes.pods.placement_unit import (
    CoreAnswer,
    GateSettings,
    PlacementPhase,
    PlacementUnit,
    UnitMember,
    apply_answer,
    is_condition_due,
    left_condition,
    on_patch_failure,
    placement_condition,
    recreate_unit,
)
from eelgrid_controller.engines.kubernetes.pods.plan_annotation import reserved_uid
from eelgrid_controller.engines.kubernetes.pods.reconcile_unit import COLLISION_RETRY_S, reconcile_unit

# API servers end a request after a minute (--request-timeout): what a former leader sent is over by then, fence or not.
FENCE_TIMEOUT_S = 60.0
# Units that are looked at in each tick although nothing was told of them: each may cost a pass over all nodes.
MAX_REFRESHED = 20


class Gate:
    """Places the gated pods of one cluster."""

    def __init__(self, settings: GateSettings) -> None:
        self.settings = settings
        self.epoch: int | None = None  # of the term in which this one leads
        self.units: dict[str, PlacementUnit] = {}
        self.others = ExternalUsageTracker()
        self.watchdog = UnboundPodWatchdog(unbound_s=settings.unbound_s)
        self.flights = InflightPods(most_s=settings.flight_s)
        self.admissions = AdmissionPins()
        self._members: dict[str, UnitMember] = {}
        self._services: dict[str, InferenceService] = {}  # by unit
        self._traits: dict[str, str] = {}  # of pods that wait, by uid
        self._adopted: dict[str, str] = {}  # uid -> the unit in whose place it comes
        self._marked: dict[str, None] = {}
        self._resting: dict[str, None] = {}  # units that are asked for again when their time has come
        self._term_begins = False
        self._unfenced: dict[str, str] = {}  # pods that waited when the term began, and their versions then
        self._fenced_s = 0.0  # when they count as fenced whatever was heard
        self._later: dict[str, float] = {}  # uid -> when a failed write is looked at again
        self._is_synced = False
        self._leaderless_s: float | None = None
        self._writes: list[GateInstruction] = []
        self._cancels: list[GateInstruction] = []
        self._submits: list[SubmitUnit | AdoptUnit] = []
        self._tells: list[GateInstruction] = []
        self._reports: list[GateInstruction] = []
        self._left: dict[str, ReportPlacement] = {}  # uid -> what is reported once its gate has gone
        self._refreshed = ""  # the unit at which the last turn over those that wait has stopped
        self._reconsidered = 0  # the revision of the rules then

    def on_events(self, events: Iterable[GateEvent], at_s: float) -> list[GateInstruction]:
        """Apply events and return the instructions that follow; `at_s` is of a monotonic clock."""
        for event in events:
            self._apply(event, at_s)
        if not self._is_synced:
            return []
        self._fence(at_s)
        told: list[GateInstruction] = list(self.others.flush_reports())
        self._reconcile_marked(at_s)
        if self.admissions.pending:
            self._decline_uncertain(at_s)
            self._reconcile_marked(at_s)
        told += self.others.flush_reports()
        # What stands, stands: before anything is placed beside it.
        self._submits.sort(key=lambda one: (isinstance(one, SubmitUnit), -one.request.spec.priority))
        told += [*self._cancels, *self._submits, *self._writes, *self._tells, *self._reports]
        self._cancels, self._submits, self._writes, self._tells, self._reports = [], [], [], [], []
        return told

    @property
    def is_synced(self) -> bool:
        """Whether the initial lists have been read."""
        return self._is_synced

    @property
    def unfenced(self) -> int:
        """Pods that a former leader might pin yet; nothing is decided while there are any."""
        return len(self._unfenced)

    @property
    def _deciding(self) -> int | None:
        """The epoch in which decisions may be made now."""
        return None if self._term_begins or self._unfenced else self.epoch

    # Events

    def _apply(self, event: GateEvent, at_s: float) -> None:
        match event:
            case PodUpdated():
                self._on_pod_updated(event, at_s)
            case PodAdmitted(sight):
                self.admissions.begin(sight.pod.uid, sight.pod.namespace)
                self._on_pod_updated(PodUpdated(sight), at_s)
            case AdmissionAbandoned(uid):
                self._abandon(uid, at_s)
            case PodDeleted(uid):
                self._adopted.pop(uid, None)
                self._gone(uid)
            case ReplacementStarted(uid, name):
                self._adopt(uid, name, at_s)
            case MoveFinished(name, uid) if name in self.units:
                self.units[name].cancel_move(uid)
                self._marked[name] = None
            case KubeNodeUpdated(node, has_agent, awaits_agent):
                self.others.update_node(node, has_agent=has_agent, awaits_agent=awaits_agent)
                self._mark_places(node.name)
            case KubeNodeDeleted(name):
                self.others.remove_node(name)
                self._mark_places(name)
            case NodeAcknowledged(name):
                self.others.on_node_acknowledged(name)
                self._on_node_known(name, at_s)
            case ClaimGpusUpdated(name, gpu_count):
                self.others.set_claim_gpus(name, gpu_count)
            case NodeReportFailed(name):
                self.others.on_report_failed(name)
            case RelatedUpdated() | RelatedSynced():
                self._on_related_objects(event)
            case GateSynced():
                self._is_synced = True
                self._marked.update(dict.fromkeys(self.units))
            case UnitPlaced() | UnitDeferred() | UnitCancelled() | UnitPreempted() | UnitRefused():
                self._core(event, at_s)
            case InferenceServiceUpdated(service):
                self._serve(service.unit_name, service)
            case InferenceServiceDeleted(name):
                self._serve(name, None)
            case LeadershipAcquired(epoch, is_continued):
                self._leaderless_s = None
                if epoch != self.epoch:
                    # A fence that was begun in a term which this one continues goes on where it was.
                    self.epoch, self._term_begins = epoch, self._term_begins or not is_continued
                    self._marked.update(dict.fromkeys(self.units))
            case LeadershipLost(is_led):
                self._not_led(at_s, is_led=is_led)
            case PatchDone(uid):
                self._later.pop(uid, None)
                self._reports += filter(None, (self._left.pop(uid, None),))
            case DevicesReported(name, steers, pods):
                self._marked.update(dict.fromkeys(self.flights.set_steered(name, is_so=steers)))
                self._marked.update(dict.fromkeys(self.flights.on_devices_reported(name, pods)))
            case PatchFailed(uid, failure, why, epoch):
                if epoch is None or epoch == self.epoch:  # of a term that is over: nothing is left to be done about it
                    self._patch_failed(uid, failure, why, at_s)
            case AnnotateFailed(uid, failure):
                self._annotate_failed(uid, failure, at_s)
            case DeleteFailed(uid, failure, why):
                self._delete_failed(uid, failure, why, at_s)
            case GateTicked():
                self._on_tick(at_s)

    def _on_pod_updated(self, event: PodUpdated, at_s: float) -> None:
        sight, change = self._confirm_reservation(event.pod)
        uid = sight.pod.uid
        if not sight.unit:
            if uid in self._members:
                self._gone(uid)
            pod = sight.pod
            node_name = "" if pod.is_terminal or pod.gates else pod.node_name or sight.pinned or pod.nominated_node
            self._plan(uid, None if not node_name else planned_amounts(pod, node_name))
            self.others.put_pod(pod, node_name)
            self.others.rules.put_pod(pod, node_name)
            return
        if uid in self._adopted and sight.plan is None:
            sight = sight._replace(unit=self._adopted[uid])
        member = self._members.get(uid)
        if member is None:
            member = self._members[uid] = UnitMember(sight)
        elif member.sight.unit != sight.unit:
            self._gone(uid)
            member = self._members[uid] = UnitMember(sight)
        member.update_view(sight)
        if not member.is_waiting or (uid in self._later and sight.pod.resource_version != member.patched_version):
            # The gate is gone, or what the patch failed on is another object now.
            member.is_patching = False
            self._later.pop(uid, None)
        unit = self.units.get(sight.unit) or self._start_unit(sight.unit)
        unit.members[uid] = member
        self._wants(member)
        if member.is_over:
            self._marked.update(dict.fromkeys(self.flights.record_end(uid)))
        self._watch_pinned(member, at_s)
        if reserved_uid(unit.name) and unit.stand is PlacementPhase.PLACED:
            unit.settle_places()  # the core counts it there from now on: nobody beside it does
        if change:
            # All of it is let go, and taken over as it stands, with what the pod requests.
            unit.is_stale = True
            text = f"changed after it was placed at its admission: it requests {change}; its plan follows"
            self._record_event(member, text, is_warning=True)
        self._account(unit, member)
        self._marked[unit.name] = None

    def _confirm_reservation(self, sight: GatePodView) -> tuple[GatePodView, str]:
        """The pod of a reservation takes its place; what it requests other than planned.

        Annotations can be copied: where another pod has come already, this one is none of ours.
        """
        reserved, uid = reserved_uid(sight.unit), sight.pod.uid
        if not reserved or reserved == uid:
            return sight, ""
        self.admissions.stop_expecting(sight.unit)
        unit, change = self.units.get(sight.unit), ""
        if reserved in self.admissions:
            change = describe_change(self._members[reserved].sight.pod, sight.pod)
            self.admissions.counts.changed += bool(change)
            self.admissions.confirm(reserved)
            self._gone(reserved)
            if unit is not None:
                unit.slots = {replica: uid if one == reserved else one for replica, one in unit.slots.items()}
        elif unit is not None and unit.members.keys() - {uid}:
            return sight._replace(unit=f"pod-{uid}" if sight.pod.awaits_placement else "", plan=None), ""
        return sight, change

    def _adopt(self, uid: str, name: str, at_s: float) -> None:
        member = self._members.get(uid)
        if member is None or member.is_waiting:
            self._adopted[uid] = name
            if member is not None:
                self._on_pod_updated(PodUpdated(member.sight), at_s)

    def _gone(self, uid: str) -> None:
        self._unfenced.pop(uid, None)
        self._plan(uid, None)
        self.others.remove_pod(uid)
        self.others.rules.remove_pod(uid)
        self.watchdog.forget_pod(uid)
        self._marked.update(dict.fromkeys(self.flights.record_end(uid)))
        self._later.pop(uid, None)
        self.others.release_demand(self._traits.pop(uid, ""))
        member = self._members.pop(uid, None)
        if member is not None:
            unit = self.units[member.sight.unit]
            unit.members.pop(uid, None)
            self._marked[unit.name] = None

    def _wants(self, member: UnitMember) -> None:
        pod = member.sight.pod
        if member.is_waiting and member.sight.spec is not None:
            if self._traits.get(member.uid) != trait_name(pod.constraint):
                self.others.release_demand(self._traits.pop(member.uid, ""))
                self._traits[member.uid] = self.others.register_demand(pod, pod.constraint)
            member.has_trait = bool(self._traits[member.uid])
        elif member.uid in self._traits:
            self.others.release_demand(self._traits.pop(member.uid))
        if self.settings.moves and member.target_node:
            self.others.register_mobile_pod(member.sight.pod)

    def _watch_pinned(self, member: UnitMember, at_s: float) -> None:
        pod = member.sight.pod
        is_stuck = bool(member.sight.pinned) and not pod.node_name and pod.unscheduled == "Unschedulable"
        if is_stuck and not pod.gates and not member.is_over:
            self.watchdog.watch_pod(member.uid, at_s)
        else:
            self.watchdog.forget_pod(member.uid)

    def _account(self, unit: PlacementUnit, member: UnitMember) -> None:
        """Count a pod as what others hold, at the devices of its plan, unless the core counts it where it is."""
        planned = None if member.is_over else planned_pod(member, unit.held_place(member))
        self._plan(member.uid, planned)
        self._put(unit, member)
        self._count_for_rules(unit, member)

    def _put(self, unit: PlacementUnit, member: UnitMember) -> None:
        sent = "" if member.sent is None or member.is_over else member.sent.node_name
        where = "" if unit.holds_member(member) else member.target_node or sent
        self.others.put_pod(member.sight.pod, where, self.others.planned.planned_devices_of(member.uid))

    def _plan(self, uid: str, planned: PlannedPod | None) -> None:
        """What a pod holds by its plan; others whose plans name the same are looked at again."""
        for other in self.others.put_planned(uid, planned):
            member = self._members.get(other)
            if member is not None:
                unit = self.units[member.sight.unit]
                self._put(unit, member)
                self._marked[unit.name] = None

    def _count_for_rules(self, unit: PlacementUnit, member: UnitMember) -> None:
        """Where a pod is, was planned, or may be by a pin that was sent counts for the rules of other pods."""
        place = (unit.place_of(member) or member.sent) if member.is_waiting else None
        self.others.rules.put_pod(member.sight.pod, member.target_node if place is None else place.node_name)

    def _account_all(self, unit: PlacementUnit) -> None:
        for member in unit.members.values():
            self._account(unit, member)

    def _start_unit(self, name: str, attempt: int = 1) -> PlacementUnit:
        unit = self.units[name] = PlacementUnit(name, attempt=attempt)
        if unit.elastic is not None:
            unit.elastic.service = self._services.get(name)
        return unit

    def _serve(self, name: str, service: InferenceService | None) -> None:
        """A service was changed, or deleted (None)."""
        if service is None:
            self._services.pop(name, None)
        else:
            self._services[name] = service
        unit = self.units.get(name)
        if unit is not None and unit.elastic is not None:
            unit.elastic.service = service
            self._marked[name] = None

    def _core(self, event: CoreAnswer, at_s: float) -> None:
        name, attempt = unit_of(event.workload_id), attempt_of(event.workload_id)
        self.others.rules.on_answer(event.workload_id)
        if isinstance(event, UnitCancelled | UnitRefused):
            self.others.rules.forget_workload(event.workload_id)
        unit = self.units.get(name)
        if unit is None:
            if isinstance(event, UnitCancelled | UnitRefused):
                return
            unit = self._start_unit(name, attempt)
            if reserved_uid(name) and isinstance(event, UnitPlaced):
                self.admissions.expect(name, at_s)
        if attempt > unit.attempt and unit.stand is PlacementPhase.UNKNOWN:
            unit.attempt = attempt
        if attempt != unit.attempt or unit.agrees_with(event):
            return
        self._marked[name] = None
        if isinstance(event, UnitPlaced):
            self.others.on_places_changed(unit.places.values(), event.places.values())
        said = apply_answer(unit, event, at_s, self.settings)
        if reserved := reserved_uid(name):
            self._drop_unplaced(reserved)
        self._judge_again(unit)
        if said is not None and (waiting := unit.waiting_members):
            self._record_event(waiting[0], said.text, is_warning=said.is_warning)
        self._account_all(unit)

    def _on_related_objects(self, event: RelatedUpdated | RelatedSynced) -> None:
        rules = self.others.rules
        if isinstance(event, RelatedSynced):
            rules.set_readable(event.kind, is_readable=event.is_readable)
            self._marked.update(
                dict.fromkeys(name for name, unit in self.units.items() if unit.stand is PlacementPhase.UNKNOWN)
            )
        else:
            rules.set_related(event.kind, event.key.namespace, event.key.name, event.value)

    def _not_led(self, at_s: float, *, is_led: bool) -> None:
        self.epoch = None
        self._leaderless_s = None if is_led else (at_s if self._leaderless_s is None else self._leaderless_s)
        for member in self._members.values():
            member.is_patching = member.is_noting = False
        self._later.clear()

    def _patch_failed(self, uid: str, failure: WriteFailure, why: str, at_s: float) -> None:
        self._left.pop(uid, None)
        member = self._members.get(uid)
        if member is None or not member.is_patching:
            return
        if failure not in (WriteFailure.BUSY, WriteFailure.CONFLICT):
            # It was never sent, or is refused for good: otherwise it may have arrived before its answer was lost.
            member.sent = None
            self._account(self.units[member.sight.unit], member)
        setback = on_patch_failure(member, failure, why, self.settings)
        if setback.text:
            self._record_event(member, setback.text, is_warning=True)
        if setback.wait_s is None:
            self._marked[member.sight.unit] = None
        else:
            self._later[uid] = at_s + setback.wait_s

    def _delete_failed(self, uid: str, failure: WriteFailure, why: str, at_s: float) -> None:
        if failure is not WriteFailure.CONFLICT:
            # Of another version: it is looked at anew, and may be overdue still.
            self.watchdog.restart_wait(uid, at_s)
        member = self._members.get(uid)
        if member is not None and failure in (WriteFailure.INVALID, WriteFailure.FORBIDDEN):
            self._record_event(member, f"cannot be recreated: {why}", is_warning=True)

    def _annotate_failed(self, uid: str, failure: WriteFailure, at_s: float) -> None:
        if failure in (WriteFailure.INVALID, WriteFailure.FORBIDDEN, WriteFailure.GONE):
            # What may not be written by us could not be by a former leader.
            self._unfenced.pop(uid, None)
        member = self._members.get(uid)
        if member is not None and member.is_noting:
            wait_s = (
                self.settings.forbidden_s
                if failure in (WriteFailure.INVALID, WriteFailure.FORBIDDEN)
                else COLLISION_RETRY_S
            )
            self._later[uid] = at_s + wait_s

    # A term's beginning

    def _fence(self, at_s: float) -> None:
        """Change all that waited when the term began, so that nothing of a former term can be written any more."""
        if self.epoch is None:
            return
        if self._term_begins:
            self._term_begins = False
            self._fenced_s = at_s + FENCE_TIMEOUT_S
            waiting = [one for uid, one in self._members.items() if one.is_waiting and uid not in self.admissions]
            # In the first term of all nobody has written before.
            is_first = self.epoch <= 1 and not any(member.sight.plan for member in self._members.values())
            versions = {} if is_first else {one.uid: one.sight.pod.resource_version for one in waiting}
            self._unfenced = versions
            for unit in self.units.values():
                unit.collisions = 0
            self._marked.update(dict.fromkeys(self.units))
        if not self._unfenced:
            return
        for uid, version in list(self._unfenced.items()):
            member = self._members.get(uid)
            is_done = member is None or not member.is_waiting or member.sight.pod.resource_version != version
            if is_done or at_s >= self._fenced_s:
                del self._unfenced[uid]
            elif member is not None and not member.is_noting:
                self._writes.append(fence_pod(member, self.epoch))
        if not self._unfenced:
            self._marked.update(dict.fromkeys(self.units))

    def _on_node_known(self, node_name: str, at_s: float) -> None:
        """The core knows a node now: what it refused of pods that stand there is asked for at once."""
        for name in self._resting:
            unit = self.units[name]
            if unit.stand is PlacementPhase.REFUSED and any(
                one.target_node == node_name for one in unit.members.values()
            ):
                unit.retry_s = at_s

    # Time

    def _on_tick(self, at_s: float) -> None:
        for uid in [uid for uid, due_s in self._later.items() if due_s <= at_s]:
            del self._later[uid]
            late = self._members[uid]
            late.is_patching = late.is_noting = False
            self._marked[late.sight.unit] = None
        self._marked.update(dict.fromkeys(self.flights.expire_overdue(at_s)))
        self._marked.update(dict.fromkeys(self.admissions.expire_expected(at_s)))
        for uid in self.admissions.expire_overdue(at_s):
            self._gone(uid)
        for name in self._resting:
            if self.units[name].retry_s <= at_s:
                self._marked[name] = None
        for name in self._services:
            if (unit := self.units.get(name)) is not None and unit.elastic is not None and unit.elastic.is_restless:
                self._marked[name] = None
        if self._is_synced and self._deciding is not None:
            for uid, waited_s in self.watchdog.overdue_pods(at_s):
                member = self._members.get(uid)
                if member is not None:
                    self._overdue(member, waited_s, at_s)
        self._refresh(at_s)
        self._open(at_s)

    def _open(self, at_s: float) -> None:
        """Without any leader for long, gates are removed, where that was asked for."""
        open_s = self.settings.open_s
        if open_s is None or self._leaderless_s is None or at_s - self._leaderless_s < open_s:
            return
        for member in self._members.values():
            if member.is_waiting and member.sight.pod.is_gated and not member.is_patching:
                pod = member.sight.pod
                member.is_patching, member.patched_version = True, pod.resource_version
                self._later[member.uid] = at_s + self.settings.busy_s
                self._writes.append(RemoveGate(member.uid, member.sight.key, pod.resource_version, None))

    def _overdue(self, member: UnitMember, waited_s: float, at_s: float) -> None:
        assert self.epoch is not None
        unit = self.units[member.sight.unit]
        for told in recreate_unit(unit, member, self.watchdog, self.epoch, waited_s=waited_s, at_s=at_s):
            if isinstance(told, RecreatePod) and told.uid == member.uid:
                self.others.rules.refusals.record_refusal(member.sight.pod, member.sight.pinned)
            if isinstance(told, RecordEvent):
                self._record_event(self._members[told.uid], told.text, is_warning=told.is_warning)
            else:
                self._marked[unit.name] = None
                self._writes.append(told)

    # Pods that are being admitted

    def may_pin_admitted(self, namespace: str, at_s: float) -> bool:
        """Whether a pod of a namespace may be placed at its admission now; else it is placed when it is seen."""
        if not (self._is_synced and self._deciding is not None and self.admissions.may_begin(namespace, at_s)):
            return False
        # Who comes in the stead of a pod that moves gets the place that is kept for it, and is known only when seen.
        return not (self.settings.moves and any(unit.moving for unit in self.units.values()))

    def _decline_uncertain(self, at_s: float) -> None:
        """Reviews that have no place now are answered without: nothing that has to be waited for is certain."""
        for uid in self.admissions.pending:
            unit = self.units[self._members[uid].sight.unit]
            if unit.stand is PlacementPhase.ASKED and self._deciding is not None:
                continue
            self.admissions.decline(uid, at_s, is_full=unit.stand is PlacementPhase.WAITING)
            self._gone(uid)
            self._writes.append(DeclineAdmitted(uid))

    def _pin_admitted(self, told: BindPod, unit: PlacementUnit, at_s: float) -> None:
        if self.flights.is_under_way(told.uid):
            return  # its node tells pods apart by when they come, which nobody knows yet
        if self.admissions.is_pending(told.uid):
            self.admissions.give(told.uid, at_s)
            self._writes.append(PinAdmitted(told.uid, told.node_name, told.plan, told.epoch))
        self._account(unit, self._members[told.uid])

    def _abandon(self, uid: str, at_s: float) -> None:
        """The answer comes too late: what the core decides is kept for the pod, if it decides on a place."""
        self.admissions.abandon(uid, at_s)
        self._drop_unplaced(uid)

    def _drop_unplaced(self, uid: str) -> None:
        member = self._members.get(uid)
        if member is None or uid not in self.admissions or self.admissions.is_pending(uid):
            return
        if self.units[member.sight.unit].stand not in (PlacementPhase.ASKED, PlacementPhase.PLACED):
            self.admissions.drop(uid)
            self._gone(uid)

    # Looking

    def _reconcile_marked(self, at_s: float) -> None:
        marked, self._marked = self._marked, {}
        for name in marked:
            unit = self.units.get(name)
            if unit is not None and (unit.members or not self.admissions.is_expected(name)):
                self._reconcile_unit(unit, at_s)

    def _reconcile_unit(self, unit: PlacementUnit, at_s: float) -> None:
        before = unit.stand
        for told in reconcile_unit(unit, self.others, self.flights, self._deciding, at_s):
            match told:
                case BindPod(uid) if uid in self.admissions:
                    self._pin_admitted(told, unit, at_s)
                case AnnotatePod(uid) if uid in self.admissions:
                    pass  # nothing is there that could be written to; its end is told by its pod, or by time
                case UngatePod(uid) | BindPod(uid) | AnnotatePod(uid):
                    if isinstance(told, UngatePod):
                        self._left.pop(uid, None)  # of a gate whose removal failed in a term before
                    self._writes.append(told)
                    self._account(unit, self._members[uid])
                case CancelUnit() | ScaleUnit():
                    self._cancels.append(told)
                case SubmitUnit() | AdoptUnit():
                    self._submits.append(told)
                case RecordEvent(uid, _, text, is_warning):
                    self._record_event(self._members[uid], text, is_warning=is_warning)
                case RemoveGate(uid, key, _, _, why):
                    self._left[uid] = ReportPlacement(uid, key, left_condition(self._members[uid], why))
                    self._writes.append(told)
                case _:
                    self._writes.append(told)
        if unit.stand is not before:
            self._account_all(unit)
        elif unit.stand is PlacementPhase.PLACED:
            for member in unit.members.values():
                if member.is_waiting:
                    self._count_for_rules(unit, member)
        self._report(unit, at_s)
        self._resting.pop(unit.name, None)
        if unit.stand is PlacementPhase.REFUSED or unit.retry_s > at_s:
            self._resting[unit.name] = None
        if not unit.members and unit.stand in (PlacementPhase.UNKNOWN, PlacementPhase.REFUSED):
            self._resting.pop(unit.name, None)
            del self.units[unit.name]

    def _report(self, unit: PlacementUnit, at_s: float) -> None:
        """Pods whose status does not say why they wait, or that they are placed."""
        if self._deciding is None:
            return
        if unit.stand is PlacementPhase.WAITING and unit.lacks_traits and not unit.no_node and unit.size == 1:
            return  # a node would do by now: the core is about to try it again
        is_whole = unit.elastic is not None or unit.is_complete or unit.stand is PlacementPhase.PLACED
        for member in unit.members.values():
            if member.uid in self.admissions:
                continue
            wanted = placement_condition(unit, member, is_whole=is_whole, why=unit.no_node)
            if wanted is not None and is_condition_due(member, wanted, at_s):
                member.reported, member.reported_s = wanted, at_s
                self._reports.append(ReportPlacement(member.uid, member.sight.key, wanted))

    def _refresh(self, at_s: float) -> None:
        """A few of those that wait, in turn: whether a node will do for them by now, and what is told of it."""
        rules = self.others.rules
        stands = (PlacementPhase.WAITING, PlacementPhase.REFUSED, PlacementPhase.UNKNOWN)
        waiting = sorted(name for name, unit in self.units.items() if unit.stand in stands)
        if not waiting or self._deciding is None or not self._is_synced:
            return
        if rules.revision != self._reconsidered and any(
            rules.has_rules_for(self.units[name].workload_id) for name in waiting
        ):
            self._reconsidered = rules.revision
            self._cancels.append(RetryPending())
        begin = bisect_right(waiting, self._refreshed) % len(waiting)
        for name in (waiting[begin:] + waiting[:begin])[:MAX_REFRESHED]:
            self._refreshed = name
            self._judge_again(self.units[name])
            self._report(self.units[name], at_s)

    def _judge_again(self, unit: PlacementUnit) -> None:
        """Why no node will do for a unit that waits; one that only kube-scheduler can judge is taken back."""
        rules = self.others.rules
        is_judged = rules.has_rules_for(unit.workload_id)
        if unit.stand is not PlacementPhase.WAITING or not (is_judged or unit.lacks_traits):
            return
        verdicts = [rules.evaluate_pod(member.sight.pod) for member in unit.waiting_members[:MAX_REFRESHED]]
        unit.no_node = next((one.text for one in verdicts if one.text), "")
        if is_judged and any(one.left for one in verdicts):
            unit.is_stale = True
            self._marked[unit.name] = None

    def _mark_places(self, node_name: str) -> None:
        """Units that are to go to a node; those that stand there are left alone."""
        for uid in self._traits if self._is_synced else ():
            member = self._members[uid]
            unit = self.units[member.sight.unit]
            place = unit.place_of(member)
            if place is not None and place.node_name == node_name:
                self._marked[unit.name] = None

    def _record_event(self, member: UnitMember, text: str, *, is_warning: bool = False) -> None:
        if member.told != text and member.uid not in self.admissions:
            member.told = text
            self._tells.append(RecordEvent(member.uid, member.sight.key, text, is_warning))
