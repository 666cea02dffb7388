"""Make before break: a pod of a Deployment goes when another one of it is ready.

Owns what comes next, read from the Deployment and its pods as they are. Must not know how
anything is written, nor who asked for the move.

Theory. Every step is one write, and what was written says which step it was:

    note on the old pod -> note and one replica more on the Deployment, in one patch
    -> all other pods ready -> the old one is cheapest to delete -> one replica less
    -> the old one has gone -> no note on the Deployment

A ReplicaSet that is to shrink takes pods that are not bound or not ready first, then the one
of least deletion cost. So it is shrunk only when every other pod is ready, and only the old
one may go; the ready pods are never fewer than before. Where the other is not ready in time,
the same way leads back: the old one's cost is as before, the youngest that is not ready is
the cheapest, and there is one replica less. A number of replicas that is neither of ours is
somebody else's decision: then nothing is scaled any more. Same objects and time in, same
step out, so a restart goes on wherever the one before ended.

Sources: kubernetes `pkg/controller/controller_utils.go` (ActivePodsWithRanks), KEP-2255.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from eelgrid_controller.kubernetes.move_notes import Note, note_of
from eelgrid_controller.kubernetes.names import DELETION_COST
from eelgrid_controller.kubernetes.views import Pod

__all__ = ["CHEAP", "Deployment", "Mark", "Over", "Pace", "Scale", "Scene", "Step", "Wait", "deployment_of", "surge"]

CHEAP = "-1000"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
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
    note: Note | None = None


def deployment_of(found: Mapping[str, Any]) -> Deployment:
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
        note=note_of(metadata.get("annotations") or {}),
    )


class Scene(NamedTuple):
    """All that the next step is read from: the Deployment, and the pods of the old one's ReplicaSet."""

    deployment: Deployment | None
    pods: Sequence[Pod]
    autoscaler: str = ""  # that would scale it, too; looked for before the first step only


# Steps


class Wait(NamedTuple):
    """Nothing is to be done now."""

    why: str


class Mark(NamedTuple):
    """Write a note and a deletion cost onto a pod; None removes either."""

    pod: Pod
    note: Note | None
    cost: str | None
    evict_s: float | None = None


class Over(NamedTuple):
    """The move has ended."""

    is_done: bool
    why: str


class Scale(NamedTuple):
    """Write a note onto the Deployment, None to remove it, with so many replicas; None leaves them.

    With `over` the move has ended when this has been written.
    """

    deployment: Deployment
    note: Note | None
    replicas: int | None
    over: Over | None = None


Step = Wait | Mark | Scale | Over


def surge(note: Note, scene: Scene, pace: Pace, now_s: float) -> Step:
    """What comes next of a move."""
    deployment = scene.deployment
    if deployment is None or deployment.is_going:
        return Over(is_done=False, why="its Deployment is gone")
    if deployment.note is None or deployment.note.uid != note.uid:
        return _begin(note, deployment, scene, pace, now_s)
    match deployment.note.step:
        case "surge":
            return _surging(deployment, deployment.note, scene, pace, now_s)
        case "shrink":
            return _shrinking(deployment, deployment.note, scene, pace, now_s)
        case "undo":
            return _undoing(deployment, deployment.note, scene, pace, now_s)
    return Scale(deployment, None, None)


def _begin(note: Note, deployment: Deployment, scene: Scene, pace: Pace, now_s: float) -> Step:
    old = _old(note, scene)
    told = note_of(old.annotations) if old is not None else None
    if old is None or old.is_going:
        # Of a Deployment without a note the pod goes last of all: it was the move that took it.
        is_done = told is not None and told.step == "cost"
        return Over(is_done=is_done, why="moved" if is_done else "the pod went by itself")
    if told is not None and told.uid == note.uid and told.step == "over":
        return Over(is_done=False, why=told.cause or "it was undone")
    if refused := _refused(deployment, scene):
        return Over(is_done=False, why=refused)
    if busy := _busy(note, deployment, scene):
        # Status lags behind: what has just ended looks as if it went on.
        return Wait(busy) if now_s - note.since_s <= pace.begin_s else Over(is_done=False, why=busy)
    if now_s - note.since_s > pace.ready_s:
        return Over(is_done=False, why=f"it could not begin within {pace.ready_s:g} s")
    if told is None or told.uid != note.uid:
        return Mark(old, replace(note, step="told", step_s=now_s), old.annotations.get(DELETION_COST))
    begun = replace(note, step="surge", step_s=now_s, replicas=deployment.replicas)
    return Scale(deployment, begun, deployment.replicas + 1)


def _refused(deployment: Deployment, scene: Scene) -> str:
    """Why a Deployment may not be scaled."""
    if deployment.is_paused:
        return "its Deployment is paused"
    if scene.autoscaler:
        return f"{scene.autoscaler} scales its Deployment, and would scale against the move"
    return ""


def _busy(note: Note, deployment: Deployment, scene: Scene) -> str:
    """Why one replica more would not be only that."""
    if deployment.note is not None:
        return "another pod of its Deployment is being moved"
    others = _others(note, scene)
    if not deployment.is_settled or len(others) + 1 != deployment.replicas:
        return "its Deployment is being rolled out or scaled"
    unready = [pod.name for pod in others if not pod.is_ready]
    return f"{unready[0]} of its Deployment is not ready" if unready else ""


def _surging(deployment: Deployment, note: Note, scene: Scene, pace: Pace, now_s: float) -> Step:
    old, others = _old(note, scene), _others(note, scene)
    if deployment.replicas != note.replicas + 1:
        return _let_go(deployment, note, old, "somebody else scales its Deployment")
    if old is None or old.is_going:
        return Scale(deployment, replace(note, step="undo", step_s=now_s, cause="the pod went by itself"), None)
    unready = [pod.name for pod in others if not pod.is_ready]
    if len(others) != note.replicas or unready:
        if now_s - note.since_s <= pace.ready_s:
            return Wait(f"{unready[0]} is not ready" if unready else "the other pod has not come")
        why = f"{unready[0]} was not ready" if unready else "no other pod came"
        why = f"{why} within {pace.ready_s:g} s"
        return Scale(deployment, replace(note, step="undo", step_s=now_s, cause=why), None)
    told = note_of(old.annotations)
    if told is None or told.step != "cost" or old.annotations.get(DELETION_COST) != CHEAP:
        before = told.cost if told is not None and told.step == "cost" else old.annotations.get(DELETION_COST, "")
        return Mark(old, replace(note, step="cost", step_s=now_s, cost=before), CHEAP)
    if now_s - told.step_s < pace.settle_s:
        return Wait("the deletion cost becomes known")
    return Scale(deployment, replace(note, step="shrink", step_s=now_s), note.replicas)


def _shrinking(deployment: Deployment, note: Note, scene: Scene, pace: Pace, now_s: float) -> Step:
    old = _old(note, scene)
    if old is None or old.is_going:
        return Scale(deployment, None, None, Over(is_done=True, why="moved"))
    if deployment.replicas != note.replicas or now_s - note.step_s > pace.gone_s:
        return _let_go(deployment, note, old, "another pod than the old one went")
    return Wait("the old pod goes")


def _undoing(deployment: Deployment, note: Note, scene: Scene, pace: Pace, now_s: float) -> Step:
    old, others = _old(note, scene), _others(note, scene)
    if back := _back(note, old):
        return back
    if deployment.replicas != note.replicas + 1:
        is_whole = deployment.replicas != note.replicas or len(others) + (old is not None) <= note.replicas
        if is_whole or now_s - note.step_s > pace.gone_s:
            return Scale(deployment, None, None, Over(is_done=False, why=note.cause))
        return Wait("the other pod goes")
    # Whoever is not bound or not ready goes first anyway; the cost decides among those that are alike.
    spare = max(others, key=lambda pod: (not pod.is_ready, pod.created_s or 0.0, pod.name), default=None)
    if old is not None and spare is not None and spare.annotations.get(DELETION_COST) != CHEAP:
        return Mark(spare, note_of(spare.annotations), CHEAP)
    if now_s - note.step_s < pace.settle_s:
        return Wait("the deletion cost becomes known")
    return Scale(deployment, replace(note, step_s=now_s), note.replicas)


def _back(note: Note, old: Pod | None) -> Mark | None:
    """The old pod is as it was, where it is not yet."""
    told = note_of(old.annotations) if old is not None else None
    if old is None or old.is_going or told is None or told.step == "over":
        return None
    cost = told.cost if told.step == "cost" else old.annotations.get(DELETION_COST, "")
    return Mark(old, replace(note, step="over", step_s=0.0), cost or None)


def _let_go(deployment: Deployment, note: Note, old: Pod | None, why: str) -> Step:
    """Somebody else decides how many pods there are: only our marks are removed."""
    return _back(replace(note, cause=why), old) or Scale(deployment, None, None, Over(is_done=False, why=why))


def _old(note: Note, scene: Scene) -> Pod | None:
    return next((pod for pod in scene.pods if pod.uid == note.uid and not pod.is_terminal), None)


def _others(note: Note, scene: Scene) -> list[Pod]:
    """Pods beside the old one that count for the ReplicaSet."""
    return [pod for pod in scene.pods if pod.uid != note.uid and not pod.is_terminal and not pod.is_going]
