"""What preempting a workload of Kueue would cost, as a bounded boost of its priority.

Owns the cost, its steps, and which Workloads have one. Must not know who writes it.

Theory. Kueue adds the integer in `kueue.x-k8s.io/priority-boost` to a Workload's priority, both where it
orders who waits and where it looks for whom to preempt (KEP-7990, alpha since 0.17, behind the feature
gate PriorityBoost; a text that is no integer is refused). So a boost is given only to who is admitted, and taken back
when it is not any more: who waits must not jump the queue for what it once held. With G GPUs and t seconds
of work that an interruption would lose (all since the start, or what saving takes where the pods say that they save
themselves), the lost share and the boost are

    c = G t / (G t + HALF)        p = min(1, t / left)         boost = most * floor(4 (1 - (1 - c)^(1 + p))) / 4

where `left` is what the promise can still bear: the time to the deadline, or the promised slowdown of what ran so far.
Who wastes (a smaller request was recommended and is not taken) has none. Four steps, each taken
STICKY past its edge only, so that a Workload is written a few times in its life: Kueue asks of who
sets a boost that it does not flap. `most` is an annotation on the ClusterQueue; without it nothing is
boosted there. A boost of somebody else is left alone.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NamedTuple

from eelgrid_controller.kubernetes import annotations, names
from eelgrid_controller.kubernetes.amounts import pod_amounts
from eelgrid_controller.kubernetes.errors import KubernetesUnreadable

__all__ = ["Boosted", "Interrupted", "boost", "boosted_of", "boosting", "interrupted_of", "most_of"]

HALF = 8 * 3600.0  # GPU seconds: half of the boost for an hour of a node of eight
STEPS = 4
STICKY = 0.05
MOST = 1_000_000
_SLOWDOWN_OF_LEAST_S = 3600.0  # a slowdown is borne over an hour at least


@dataclass(frozen=True, slots=True, kw_only=True)
class Interrupted:
    """A workload as its interruption would find it."""

    gpus: int
    ran_s: float
    grace_s: float | None = None  # that it takes to save itself; None: all is lost
    deadline_left_s: float | None = None
    slowdown_most: float | None = None
    is_wasteful: bool = False


class Boosted(NamedTuple):
    """A Workload's boosts: the one in force, and the one that we wrote; None where there is none."""

    present: str | None
    ours: str | None

    @property
    def is_foreign(self) -> bool:
        """Whether somebody else set it, or took ours over."""
        return self.present is not None and self.present != self.ours


def boost(run: Interrupted, most: int, before: int = 0) -> int:
    """The boost, from 0 to `most`; `before` is the one that it has, at which it stays near a step's edge."""
    if run.is_wasteful or most <= 0:
        return 0
    lost_s = max(0.0, run.ran_s if run.grace_s is None else min(run.grace_s, run.ran_s))
    cost = run.gpus * lost_s / (run.gpus * lost_s + HALF)
    share = 1.0 - (1.0 - cost) ** (1.0 + _pressure(run, lost_s))
    step = int(share * STEPS)
    held = round(before * STEPS / most)
    if abs(step - held) == 1:
        # Near the edge between the two it stays as it is.
        edge = max(step, held) / STEPS
        if abs(share - edge) < STICKY:
            step = held
    return most * min(step, STEPS) // STEPS


def _pressure(run: Interrupted, lost_s: float) -> float:
    """How much of what its promise can bear the interruption would use up, 0 to 1."""
    bears = [left_s for left_s in (run.deadline_left_s,) if left_s is not None]
    if run.slowdown_most is not None:
        bears.append(run.slowdown_most * max(run.ran_s, _SLOWDOWN_OF_LEAST_S))
    left_s = min(bears, default=None)
    if left_s is None or lost_s <= 0.0:
        return 0.0
    return 1.0 if left_s <= lost_s else lost_s / left_s


def most_of(queue: Mapping[str, Any]) -> int:
    """The largest boost in a ClusterQueue; 0 without the annotation, or with one that says nothing."""
    text = (queue["metadata"].get("annotations") or {}).get(names.ANNOTATION_PREEMPTION_BOOST, "")
    return min(MOST, int(text)) if text.isascii() and text.isdigit() and len(text) < 10 else 0


def boosted_of(workload: Mapping[str, Any]) -> Boosted:
    """The boosts that a Workload has."""
    notes = workload["metadata"].get("annotations") or {}
    return Boosted(notes.get(names.KUEUE_PRIORITY_BOOST), notes.get(names.ANNOTATION_PREEMPTION_BOOST))


def interrupted_of(workload: Mapping[str, Any], *, now_s: float, is_wasteful: bool = False) -> Interrupted | None:
    """A Workload that runs and opted in; None for all others. Raises KubernetesUnreadable."""
    status = workload.get("status") or {}
    since = {one.get("type"): one for one in status.get("conditions") or () if one.get("status") == "True"}
    admitted = since.get("Admitted")
    if admitted is None or "Finished" in since or "Evicted" in since:
        return None
    gpus, notes, is_managed = 0, dict[str, str](), False
    for part in (workload.get("spec") or {}).get("podSets") or ():
        metadata = part["template"].get("metadata") or {}
        is_managed |= (metadata.get("labels") or {}).get(names.LABEL_MANAGED) == names.MANAGED
        notes |= metadata.get("annotations") or {}
        amounts = pod_amounts(part["template"]["spec"])
        gpus += int(part.get("count", 1)) * sum(amounts.count(name) for name in names.RESOURCES_GPU)
    if not is_managed:
        return None
    try:
        start_s = datetime.fromisoformat(str(admitted.get("lastTransitionTime"))).timestamp()
    except ValueError:
        raise KubernetesUnreadable("status.conditions", "has no time", "give what the API server gave") from None
    deadline_ns = annotations.deadline_ns(notes, start_s)
    return Interrupted(
        gpus=gpus,
        ran_s=max(0.0, now_s - start_s),
        grace_s=annotations.duration_s(notes, names.ANNOTATION_CHECKPOINT_GRACE),
        deadline_left_s=None if deadline_ns is None else max(0.0, deadline_ns / 1e9 - now_s),
        slowdown_most=annotations.fraction(notes, names.ANNOTATION_SLOWDOWN),
        is_wasteful=is_wasteful,
    )


def boosting(workload: Mapping[str, Any], value: int) -> dict[str, Any] | None:
    """The merge patch that gives a Workload this boost, 0 for none; None where it has it, or another's."""
    has = boosted_of(workload)
    wanted = str(value) if value else None
    if has.is_foreign or (has.present == wanted and has.ours == wanted):
        return None
    metadata = workload["metadata"]
    notes = {names.KUEUE_PRIORITY_BOOST: wanted, names.ANNOTATION_PREEMPTION_BOOST: wanted}
    return {"metadata": {"uid": metadata["uid"], "resourceVersion": metadata["resourceVersion"], "annotations": notes}}
