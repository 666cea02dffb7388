"""Moves of running pods: the order queue, make-before-break (surge) and break-before-make (evict), and what asks for it.

Orders start in order of request, at most so many at once and an hour, one at a time per owner; a moved pod stays for a
while, and a pod that is fixed or in an observe-only pool is never moved. Each step is one write, and a note on the
objects says which, so a restart continues. A surge adds a replica, waits until it is ready, makes the old pod the
cheapest to delete and removes one replica. An eviction notifies first, then asks within the disruption budgets; a
gang goes as a whole, so whether the budgets allow all of it is checked here, while the eviction API checks pod by pod.

A node is drained where its administrators cordoned and annotated it, or an operator did so by `eelctl drain`; a note
says what of it is the latter's. The taint of a node that is being repartitioned
is changed by a JSON patch that tests the list it was read from.

Sources: kubernetes pkg/controller/controller_utils.go (ActivePodsWithRanks); KEP-2255; policy/v1 PodDisruptionBudget;
labels.Selector of apimachinery.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Any, NamedTuple

from eelgrid_controller.engines.kubernetes.model.annotations import parse_duration_s
from eelgrid_controller.engines.kubernetes.model.inference_service import SERVICE_UNIT_PREFIX
from eelgrid_controller.engines.kubernetes.model.node_affinity import matches_labels
from eelgrid_controller.engines.kubernetes.model.objects import Pod
from eelgrid_controller.engines.kubernetes.model.pod_group import PodKey
from eelgrid_controller.engines.kubernetes.model.quantities import AnnotationUnreadable
from eelgrid_controller.engines.kubernetes.model.selectors import parse_label_selector
from eelgrid_controller.engines.kubernetes.model.well_known import (
    ANNOTATION_CHECKPOINT_GRACE,
    ANNOTATION_CORDONED,
    ANNOTATION_DRAIN,
    ANNOTATION_MOVED_AT,
    DELETION_COST,
    TAINT_REPARTITION,
)
from eelgrid_controller.engines.kubernetes.pods.plan_annotation import MoveNote, parse_move_note
from eelgrid_protos.messages import Mobility


def find_blocking_budget(budgets: Sequence[Mapping[str, Any]], labels: Sequence[Mapping[str, str]]) -> str:
    """The budget that does not allow all ready pods with these labels to go, and why; empty where all allow it."""
    for budget in budgets:
        selector = (budget.get("spec") or {}).get("selector")
        count = sum(_selects(selector, one) for one in labels)
        allowed = int((budget.get("status") or {}).get("disruptionsAllowed") or 0)
        if count > allowed:
            return f"PodDisruptionBudget {budget['metadata']['name']} allows {allowed} disruptions now, and {count} are needed"
    return ""


def _selects(selector: Mapping[str, Any] | None, labels: Mapping[str, str]) -> bool:
    try:
        return matches_labels(parse_label_selector(selector), labels)
    except KeyError:
        return True  # what cannot be read counts as meant: rather one pod too many under a budget


_PATH = "/spec/taints"


class DrainProgress(NamedTuple):
    """What is on a node that is to be emptied."""

    leaving: int = 0
    staying: tuple[str, ...] = ()  # pods that nothing here may move, with the reason
    foreign_gpus: int = 0


class TaintTimers:
    """Since when each node is kept from new pods, and when that is too long."""

    def __init__(self, most_s: float = 1800.0) -> None:
        """A layout that does not come to stand within `most_s` keeps its node no longer."""
        self.most_s = most_s
        self._since_s: dict[str, float] = {}

    def taint_changes(self, wanted: Collection[str], tainted: Collection[str], now_s: float) -> dict[str, bool]:
        """Which nodes have to get the taint (True) or lose it, whoever put it there."""
        for name in [name for name in self._since_s if name not in wanted]:
            del self._since_s[name]
        for name in wanted:
            self._since_s.setdefault(name, now_s)
        kept = {name for name in wanted if now_s - self._since_s[name] <= self.most_s}
        return dict.fromkeys(sorted(kept - set(tainted)), True) | dict.fromkeys(sorted(set(tainted) - kept), False)

    def is_timed_out(self, name: str, now_s: float) -> bool:
        """Whether a node's layout has not come to stand in time."""
        return now_s - self._since_s.get(name, now_s) > self.most_s


def is_drain_requested(node: Mapping[str, Any]) -> bool:
    """Whether a node's people want it empty: it is cordoned and annotated."""
    annotations = node["metadata"].get("annotations") or {}
    return annotations.get(ANNOTATION_DRAIN) == "true" and bool((node.get("spec") or {}).get("unschedulable"))


class CordonMarks(NamedTuple):
    """What of a node's cordon and drain is an operator's of Eelgrid, by its annotation."""

    cordon: bool = False
    drain: bool = False


def cordon_marks(node: Mapping[str, Any]) -> CordonMarks:
    """Reads what Eelgrid wrote to a node."""
    text = (node["metadata"].get("annotations") or {}).get(ANNOTATION_CORDONED, "")
    words = text.split(",")
    return CordonMarks("cordon" in words, "drain" in words)


def cordon_patch(node: Mapping[str, Any], wanted: CordonMarks) -> dict[str, Any]:
    """A merge patch that gives a node this cordon and drain, or takes away what Eelgrid wrote; empty if it is so already.

    A node that its people cordoned stays cordoned, and one that they drain stays drained.
    """
    annotations = node["metadata"].get("annotations") or {}
    had, is_closed = cordon_marks(node), bool((node.get("spec") or {}).get("unschedulable"))
    is_drained = annotations.get(ANNOTATION_DRAIN) == "true"
    own = CordonMarks(wanted.cordon and (had.cordon or not is_closed), wanted.drain and (had.drain or not is_drained))
    changes: dict[str, str | None] = {}
    spec: dict[str, Any] = {}
    if wanted.cordon and not is_closed:
        spec["unschedulable"] = True
    elif had.cordon and not wanted.cordon and is_closed:
        spec["unschedulable"] = None
    if wanted.drain and not is_drained:
        changes[ANNOTATION_DRAIN] = "true"
    elif had.drain and not wanted.drain and is_drained:
        changes[ANNOTATION_DRAIN] = None
    text = ",".join(name for name, is_ours in own._asdict().items() if is_ours)
    if text != annotations.get(ANNOTATION_CORDONED, ""):
        changes[ANNOTATION_CORDONED] = text or None
    return ({"metadata": {"annotations": changes}} if changes else {}) | ({"spec": spec} if spec else {})


def drain_status(found: DrainProgress) -> str:
    """How far it is, in a sentence."""
    if not found.leaving and not found.staying:
        rest = f"; other pods hold {found.foreign_gpus} GPUs" if found.foreign_gpus else ""
        return f"empty of managed pods{rest}"
    parts = [f"{found.leaving} to move"] if found.leaving else []
    if found.staying:
        more = f" and {len(found.staying) - 3} more" if len(found.staying) > 3 else ""
        parts.append(f"{len(found.staying)} stay: {', '.join(found.staying[:3])}{more}")
    return "; ".join(parts)


def is_tainted(node: Mapping[str, Any]) -> bool:
    """Whether our taint is on a node."""
    return any(one.get("key") == TAINT_REPARTITION for one in _taints(node))


def taint_patch(node: Mapping[str, Any], *, wanted: bool) -> list[dict[str, Any]]:
    """A JSON patch that puts our taint on, or takes it off; empty where that is so already."""
    had = _taints(node)
    kept = [one for one in had if one.get("key") != TAINT_REPARTITION]
    if wanted == is_tainted(node):
        return []
    new = [*kept, {"key": TAINT_REPARTITION, "effect": "NoSchedule"}] if wanted else kept
    # An absent list tests as null on no server alike: there the object's version is what is tested.
    version = node["metadata"]["resourceVersion"]
    test = {"op": "test", "path": _PATH, "value": had} if had else _same(version)
    if not new:
        return [test, {"op": "remove", "path": _PATH}]
    return [test, {"op": "replace" if had else "add", "path": _PATH, "value": new}]


def _same(version: str) -> dict[str, Any]:
    return {"op": "test", "path": "/metadata/resourceVersion", "value": version}


def _taints(node: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    return list((node.get("spec") or {}).get("taints") or ())


LOW_DELETION_COST = "-1000"


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveTimeouts:
    """How long the steps of a move may take, in seconds."""

    begin_s: float = 30.0  # for a Deployment to be at rest, before its first step
    ready_s: float = 600.0  # until the pod that was made before is ready
    settle_s: float = 1.0  # for the ReplicaSet's controller to hear of a deletion cost
    gone_s: float = 120.0  # until the old one goes after the Deployment was made smaller
    retry_s: float = 10.0  # until an eviction that a budget forbade is asked for again
    budget_s: float = 600.0  # for which budgets may forbid it
    arrive_s: float = 120.0  # for the pod that is made anew to come


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """A Deployment, as far as a move of one of its pods has to know."""

    uid: str
    namespace: str
    name: str
    version: str
    replicas: int
    is_settled: bool  # its controller has seen the newest spec, and every pod is of it
    is_paused: bool = False
    is_going: bool = False
    note: MoveNote | None = None


def parse_deployment(found: Mapping[str, Any]) -> Deployment:
    """The Deployment in an object of the API."""
    metadata, spec, status = found["metadata"], found.get("spec") or {}, found.get("status") or {}
    replicas = spec.get("replicas")
    replicas = 1 if replicas is None else int(replicas)
    counts = {int(status.get(key) or 0) for key in ("replicas", "updatedReplicas")}
    return Deployment(
        uid=str(metadata["uid"]),
        namespace=str(metadata["namespace"]),
        name=str(metadata["name"]),
        version=str(metadata["resourceVersion"]),
        replicas=replicas,
        is_settled=int(status.get("observedGeneration") or 0) >= int(metadata.get("generation") or 0)
        and counts == {replicas},
        is_paused=bool(spec.get("paused")),
        is_going=metadata.get("deletionTimestamp") is not None,
        note=parse_move_note(metadata.get("annotations") or {}),
    )


class SurgeState(NamedTuple):
    """All that the next step is read from: the Deployment, and the pods of the old one's ReplicaSet."""

    deployment: Deployment | None
    pods: Sequence[Pod]
    autoscaler: str = ""  # that would scale it, too; looked for before the first step only


# Steps


class WaitStep(NamedTuple):
    """Nothing is to be done now."""

    why: str


class MarkPod(NamedTuple):
    """Write a note and a deletion cost onto a pod; None removes either."""

    pod: Pod
    note: MoveNote | None
    cost: str | None
    evict_s: float | None = None


class MoveEnded(NamedTuple):
    """The move has ended."""

    is_done: bool
    why: str


class ScaleDeployment(NamedTuple):
    """Write a note onto the Deployment, None to remove it, with so many replicas; None leaves them.

    With `over` the move has ended when this has been written.
    """

    deployment: Deployment
    note: MoveNote | None
    replicas: int | None
    over: MoveEnded | None = None


MoveStep = WaitStep | MarkPod | ScaleDeployment | MoveEnded


def next_surge_step(note: MoveNote, scene: SurgeState, pace: MoveTimeouts, now_s: float) -> MoveStep:
    """What comes next of a move."""
    deployment = scene.deployment
    if deployment is None or deployment.is_going:
        return MoveEnded(is_done=False, why="its Deployment is gone")
    if deployment.note is None or deployment.note.uid != note.uid:
        return _begin_move(note, deployment, scene, pace, now_s)
    match deployment.note.step:
        case "surge":
            return _surging(deployment, deployment.note, scene, pace, now_s)
        case "shrink":
            return _shrinking(deployment, deployment.note, scene, pace, now_s)
        case "undo":
            return _undoing(deployment, deployment.note, scene, pace, now_s)
    return ScaleDeployment(deployment, None, None)


def _begin_move(
    note: MoveNote, deployment: Deployment, scene: SurgeState, pace: MoveTimeouts, now_s: float
) -> MoveStep:
    old = _old(note, scene)
    told = parse_move_note(old.annotations) if old is not None else None
    if old is None or old.is_deleting:
        # Of a Deployment without a note the pod goes last of all: it was the move that took it.
        is_done = told is not None and told.step == "cost"
        return MoveEnded(is_done=is_done, why="moved" if is_done else "the pod went by itself")
    if told is not None and told.uid == note.uid and told.step == "over":
        return MoveEnded(is_done=False, why=told.cause or "it was undone")
    if refused := _find_surge_obstacle(deployment, scene):
        return MoveEnded(is_done=False, why=refused)
    if busy := _busy(note, deployment, scene):
        # Status lags behind: what has just ended looks as if it went on.
        return WaitStep(busy) if now_s - note.since_s <= pace.begin_s else MoveEnded(is_done=False, why=busy)
    if now_s - note.since_s > pace.ready_s:
        return MoveEnded(is_done=False, why=f"it could not begin within {pace.ready_s:g} s")
    if told is None or told.uid != note.uid:
        return MarkPod(old, replace(note, step="told", step_s=now_s), old.annotations.get(DELETION_COST))
    begun = replace(note, step="surge", step_s=now_s, replicas=deployment.replicas)
    return ScaleDeployment(deployment, begun, deployment.replicas + 1)


def _find_surge_obstacle(deployment: Deployment, scene: SurgeState) -> str:
    """Why a Deployment may not be scaled."""
    if deployment.is_paused:
        return "its Deployment is paused"
    if scene.autoscaler:
        return f"{scene.autoscaler} scales its Deployment, and would undo the move"
    return ""


def _busy(note: MoveNote, deployment: Deployment, scene: SurgeState) -> str:
    """Why one replica more would not be only that."""
    if deployment.note is not None:
        return "another pod of its Deployment is being moved"
    others = _others(note, scene)
    if not deployment.is_settled or len(others) + 1 != deployment.replicas:
        return "its Deployment is being rolled out or scaled"
    unready = [pod.name for pod in others if not pod.is_ready]
    return f"{unready[0]} of its Deployment is not ready" if unready else ""


def _surging(deployment: Deployment, note: MoveNote, scene: SurgeState, pace: MoveTimeouts, now_s: float) -> MoveStep:
    old, others = _old(note, scene), _others(note, scene)
    if deployment.replicas != note.replicas + 1:
        return _let_go(deployment, note, old, "somebody else scales its Deployment")
    if old is None or old.is_deleting:
        return ScaleDeployment(
            deployment, replace(note, step="undo", step_s=now_s, cause="the pod went by itself"), None
        )
    unready = [pod.name for pod in others if not pod.is_ready]
    if len(others) != note.replicas or unready:
        if now_s - note.since_s <= pace.ready_s:
            return WaitStep(f"{unready[0]} is not ready" if unready else "the other pod has not come")
        why = f"{unready[0]} was not ready" if unready else "no replacement pod was created"
        why = f"{why} within {pace.ready_s:g} s"
        return ScaleDeployment(deployment, replace(note, step="undo", step_s=now_s, cause=why), None)
    told = parse_move_note(old.annotations)
    if told is None or told.step != "cost" or old.annotations.get(DELETION_COST) != LOW_DELETION_COST:
        before = told.cost if told is not None and told.step == "cost" else old.annotations.get(DELETION_COST, "")
        return MarkPod(old, replace(note, step="cost", step_s=now_s, cost=before), LOW_DELETION_COST)
    if now_s - told.step_s < pace.settle_s:
        return WaitStep("the deletion cost becomes known")
    return ScaleDeployment(deployment, replace(note, step="shrink", step_s=now_s), note.replicas)


def _shrinking(deployment: Deployment, note: MoveNote, scene: SurgeState, pace: MoveTimeouts, now_s: float) -> MoveStep:
    old = _old(note, scene)
    if old is None or old.is_deleting:
        return ScaleDeployment(deployment, None, None, MoveEnded(is_done=True, why="moved"))
    if deployment.replicas != note.replicas or now_s - note.step_s > pace.gone_s:
        return _let_go(deployment, note, old, "another pod than the old one went")
    return WaitStep("the old pod goes")


def _undoing(deployment: Deployment, note: MoveNote, scene: SurgeState, pace: MoveTimeouts, now_s: float) -> MoveStep:
    old, others = _old(note, scene), _others(note, scene)
    if back := _back(note, old):
        return back
    if deployment.replicas != note.replicas + 1:
        is_whole = deployment.replicas != note.replicas or len(others) + (old is not None) <= note.replicas
        if is_whole or now_s - note.step_s > pace.gone_s:
            return ScaleDeployment(deployment, None, None, MoveEnded(is_done=False, why=note.cause))
        return WaitStep("the other pod goes")
    # Whoever is not bound or not ready goes first anyway; the cost decides among those that are alike.
    spare = max(others, key=lambda pod: (not pod.is_ready, pod.created_s or 0.0, pod.name), default=None)
    if old is not None and spare is not None and spare.annotations.get(DELETION_COST) != LOW_DELETION_COST:
        return MarkPod(spare, parse_move_note(spare.annotations), LOW_DELETION_COST)
    if now_s - note.step_s < pace.settle_s:
        return WaitStep("the deletion cost becomes known")
    return ScaleDeployment(deployment, replace(note, step_s=now_s), note.replicas)


def _back(note: MoveNote, old: Pod | None) -> MarkPod | None:
    """The old pod is as it was, where it is not yet."""
    told = parse_move_note(old.annotations) if old is not None else None
    if old is None or old.is_deleting or told is None or told.step == "over":
        return None
    cost = told.cost if told.step == "cost" else old.annotations.get(DELETION_COST, "")
    return MarkPod(old, replace(note, step="over", step_s=0.0), cost or None)


def _let_go(deployment: Deployment, note: MoveNote, old: Pod | None, why: str) -> MoveStep:
    """Somebody else decides how many pods there are: only our marks are removed."""
    return _back(replace(note, cause=why), old) or ScaleDeployment(
        deployment, None, None, MoveEnded(is_done=False, why=why)
    )


def _old(note: MoveNote, scene: SurgeState) -> Pod | None:
    return next((pod for pod in scene.pods if pod.uid == note.uid and not pod.is_terminal), None)


def _others(note: MoveNote, scene: SurgeState) -> list[Pod]:
    """Pods beside the old one that count for the ReplicaSet."""
    return [pod for pod in scene.pods if pod.uid != note.uid and not pod.is_terminal and not pod.is_deleting]


class EvictPods(NamedTuple):
    """Ask for all of these to go, or for none."""

    pods: tuple[Pod, ...]


def next_eviction_step(
    notes: Sequence[MoveNote],
    pods: Mapping[str, Pod],
    pace: MoveTimeouts,
    now_s: float,
    *,
    arrived: bool,
    last: str = "",
) -> WaitStep | MarkPod | EvictPods | MoveEnded:
    """What comes next for the pods of these notes; `pods` holds those that are there, by uid.

    `arrived` says that all kept places have pods again, `last` why the last eviction did not succeed.
    """
    here = [pods[note.uid] for note in notes if note.uid in pods and not pods[note.uid].is_terminal]
    staying = [pod for pod in here if not pod.is_deleting]
    evict_s = max(note.evict_s for note in notes)
    has_begun = len(staying) < len(notes)
    for note in notes:
        pod = pods.get(note.uid)
        told = parse_move_note(pod.annotations) if pod is not None else None
        if pod is not None and not has_begun and (told is None or told.uid != note.uid):
            return MarkPod(pod, replace(note, step="told", step_s=now_s), None, evict_s)
    if staying:
        if now_s < evict_s:
            return WaitStep("it saves its work")
        if now_s > evict_s + pace.budget_s * (2.0 if has_begun else 1.0):
            why = last or "the eviction did not come about"
            return MoveEnded(is_done=False, why=f"{why}; tried for {pace.budget_s:g} s")
        return EvictPods(tuple(staying))
    if here:
        return WaitStep("it goes")
    if not arrived and now_s <= evict_s + pace.budget_s + pace.arrive_s:
        return WaitStep("its owner makes it anew")
    return MoveEnded(is_done=True, why="evicted")


def survives_evictions(job: Mapping[str, Any], pods: int) -> bool:
    """Whether a Job goes on after so many of its pods were evicted: each may count as a failure."""
    spec, status = job.get("spec") or {}, job.get("status") or {}
    for rule in (spec.get("podFailurePolicy") or {}).get("rules") or ():
        met = {one.get("type") for one in rule.get("onPodConditions") or () if one.get("status", "True") == "True"}
        if "DisruptionTarget" in met and rule.get("action") in ("Ignore", "FailJob"):
            return bool(rule["action"] == "Ignore")
    limit = spec.get("backoffLimit")
    return int(status.get("failed") or 0) + pods <= (6 if limit is None else int(limit))


_ORDERS_MOST = 4_096
_HOUR_S = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveLimits:
    """How much may move."""

    at_once: int = 4  # of one owner: one
    per_hour: int = 60
    again_s: float = 600.0  # until a pod that came by a move may move again
    wait_s: float = 3600.0  # for its turn; what waits longer gives its place back
    gang_most: int = 256
    preempted_at_once: int = 256  # units; bounded by what one preemption may stop
    grace_most_s: float = 3600.0


class MoveMethod(Enum):
    """How a pod is moved."""

    SURGE = auto()
    EVICT = auto()


class MovingPod(NamedTuple):
    """One pod that is to go, and the node where its replica has its place now; empty where none is kept."""

    uid: str
    key: PodKey
    replica: int
    node_name: str
    to: str = ""


def moves_alone(unit: str, manner: MoveMethod) -> bool:
    """Whether a pod is moved without the others of its unit: services are no gangs."""
    return manner is MoveMethod.SURGE or unit.startswith(SERVICE_UNIT_PREFIX)


class MoveOrder(NamedTuple):
    """One move: a pod alone, or a gang as a whole."""

    unit: str
    workload: str  # empty where no place is kept
    manner: MoveMethod
    goes: tuple[MovingPod, ...]
    owner_kind: str
    owner_name: str
    owner_uid: str
    grace_s: float = 0.0
    cause: str = "requested by an operator"
    is_preemption: bool = False  # others wait for it: it goes at once, beside all other moves
    is_forced: bool = False  # it goes although there is no room for it elsewhere

    @property
    def name(self) -> str:
        """What it is known by: whatever asks for these pods to go asks for the same."""
        return f"{self.unit}#{self.goes[0].uid}" if moves_alone(self.unit, self.manner) else self.unit


def checkpoint_grace_s(annotations: Mapping[str, str]) -> float:
    """For how long a pod is told before it is evicted, by its annotation."""
    try:
        return parse_duration_s(annotations, ANNOTATION_CHECKPOINT_GRACE) or 0.0
    except AnnotationUnreadable:
        return 0.0


def move_method_of(mobility: Mobility, owner_kind: str) -> MoveMethod | None:
    """How what has this mobility is moved; None for what stays."""
    if mobility is Mobility.FIXED or not owner_kind:
        return None
    if mobility is Mobility.RESTARTABLE:
        return MoveMethod.EVICT
    return MoveMethod.SURGE if owner_kind == "ReplicaSet" else None


def mobility_of(pod: Pod) -> Mobility:
    """How its owner lets a pod go that another leader placed, so that nobody here knows what was asked for it."""
    kind = pod.owner.kind if pod.owner is not None else ""
    if kind == "ReplicaSet":
        return Mobility.MOVABLE
    is_saved = ANNOTATION_CHECKPOINT_GRACE in pod.annotations
    return Mobility.RESTARTABLE if kind == "StatefulSet" or (kind and is_saved) else Mobility.FIXED


def resumed_order(note: MoveNote, pod: Pod, cause: str = "the leader before began it") -> MoveOrder:
    """The order behind the note of a make-before-break that another process began."""
    owner = pod.owner
    return MoveOrder(
        note.unit,
        note.workload,
        MoveMethod.EVICT if note.evict_s else MoveMethod.SURGE,
        (MovingPod(note.uid, PodKey(pod.namespace, pod.name), note.replica, pod.node_name, note.to),),
        owner.kind if owner else "",
        owner.name if owner else "",
        note.owner,
        0.0,
        cause,
    )


class MoveQueue:
    """Orders, from being asked for to their end."""

    def __init__(self, bounds: MoveLimits) -> None:
        self.bounds = bounds
        self.waiting: dict[str, MoveOrder] = {}
        self.running: dict[str, MoveOrder] = {}
        self.done = 0
        self.failed = 0
        self._offered_s: dict[str, float] = {}
        self._starts_s: deque[float] = deque()
        self._expected: dict[str, list[tuple[MoveOrder, MovingPod]]] = {}  # by the owner of the pod to come
        self._claims: dict[str, tuple[MoveOrder, MovingPod]] = {}  # uid of a pod that came -> in whose stead

    def has_order(self, order: MoveOrder) -> bool:
        """Whether the same is asked for, or under way."""
        return order.name in self.waiting or order.name in self.running

    def request_move(self, order: MoveOrder, now_s: float) -> bool:
        """Ask for a move; False if it is asked for already, or too many are."""
        if self.has_order(order) or len(self.waiting) >= _ORDERS_MOST:
            return False
        self.waiting[order.name] = order
        self._offered_s[order.name] = now_s
        return True

    def withdraw_order(self, name: str) -> None:
        """What has not begun is not asked for any more."""
        self.waiting.pop(name, None)
        self._offered_s.pop(name, None)

    def overdue_orders(self, now_s: float) -> list[MoveOrder]:
        """Orders that have waited for too long."""
        return [one for one in self.waiting.values() if now_s - self._offered_s[one.name] > self.bounds.wait_s]

    def start_due_orders(self, pods: Callable[[str], Pod | None], now_s: float) -> Iterable[MoveOrder]:
        """Orders that may begin now; each counts as begun when it is given."""
        while self._starts_s and now_s - self._starts_s[0] >= _HOUR_S:
            self._starts_s.popleft()
        for order in [one for one in self.waiting.values() if one.is_preemption]:
            if sum(one.is_preemption for one in self.running.values()) >= self.bounds.preempted_at_once:
                break
            self.mark_started(order)
            yield order
        moving = [order for order in self.running.values() if not order.is_preemption]
        owners = {order.owner_uid for order in moving}
        at_once = len(moving)
        for order in [one for one in self.waiting.values() if not one.is_preemption]:
            if at_once >= self.bounds.at_once or len(self._starts_s) >= self.bounds.per_hour:
                return
            if order.owner_uid in owners or self.is_cooling_down(order, pods, now_s):
                continue
            owners.add(order.owner_uid)
            at_once += 1
            self._starts_s.append(now_s)
            self.mark_started(order)
            yield order

    def is_cooling_down(self, order: MoveOrder, pods: Callable[[str], Pod | None], now_s: float) -> bool:
        """Whether one of its pods came by a move a short while ago."""
        for going in order.goes:
            pod = pods(going.uid)
            came_s = _number(pod.annotations.get(ANNOTATION_MOVED_AT, "")) if pod is not None else None
            if came_s is not None and 0.0 <= now_s - came_s < self.bounds.again_s:
                return True
        return False

    def mark_started(self, order: MoveOrder) -> None:
        """A move is under way: pods that come in the stead of its own may claim the kept places."""
        self.withdraw_order(order.name)
        self.running[order.name] = order
        if order.workload and len(order.goes) == 1:
            self._expected.setdefault(order.owner_uid, []).append((order, order.goes[0]))

    def finish_order(self, order: MoveOrder, *, is_done: bool) -> None:
        """A move has ended."""
        if self.running.pop(order.name, None) is None:
            return
        self.done += is_done
        self.failed += not is_done
        left = [one for one in self._expected.pop(order.owner_uid, ()) if one[0].name != order.name]
        if left:
            self._expected[order.owner_uid] = left
        for uid in [uid for uid, one in self._claims.items() if one[0].name == order.name]:
            del self._claims[uid]

    def claim_place(self, pod: Pod) -> str:
        """The unit whose kept place a pod that is new and waits comes to; empty where there is none."""
        if pod.owner is None or not pod.awaits_placement or pod.is_deleting or pod.uid in self._claims:
            return ""
        expected = self._expected.get(pod.owner.uid, [])
        for index, (order, going) in enumerate(expected):
            # A StatefulSet makes the pod of the same name again; whoever else makes pods makes any.
            is_named = order.owner_kind != "StatefulSet" or pod.name == going.key.name
            if pod.uid != going.uid and is_named:
                self._claims[pod.uid] = expected.pop(index)
                return order.unit
        return ""

    def release_claim(self, uid: str) -> None:
        """A pod is no more; a place that it had claimed may be claimed again."""
        claimed = self._claims.pop(uid, None)
        if claimed is not None and claimed[0].name in self.running:
            self._expected.setdefault(claimed[0].owner_uid, []).append(claimed)

    def claimant_uids(self, order: MoveOrder) -> list[str]:
        """Uids of the pods that came in the stead of an order's."""
        return [uid for uid, one in self._claims.items() if one[0].name == order.name]


def _number(text: str) -> float | None:
    try:
        return float(text) if 0 < len(text) < 32 else None
    except ValueError:
        return None
