"""The cost of preempting a Kueue Workload, as a bounded boost of its priority.

With G GPUs and t seconds of work that would be lost,

    c = G t / (G t + HALF_COST_GPU_S)    p = min(1, t / left)    boost = max * floor(4 (1 - (1 - c)^(1 + p))) / 4

where `left` is what the promise can still bear. Only admitted Workloads are boosted. BOOST_HYSTERESIS keeps the steps
from flapping. A boost that somebody else set is left alone.

Source: KEP-7990 of Kueue.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NamedTuple

from eelgrid_controller.engines.kubernetes.model import annotations, well_known
from eelgrid_controller.engines.kubernetes.model.quantities import KubernetesUnreadable, pod_requests

HALF_COST_GPU_S = 8 * 3600.0  # GPU seconds: half of the boost for an hour of a node of eight
BOOST_STEPS = 4
BOOST_HYSTERESIS = 0.05
MAX_BOOST = 1_000_000
_SLOWDOWN_OF_LEAST_S = 3600.0  # a slowdown is borne over an hour at least


@dataclass(frozen=True, slots=True, kw_only=True)
class InterruptibleWorkload:
    """A workload as its interruption would find it."""

    gpus: int
    ran_s: float
    grace_s: float | None = None  # that it takes to save itself; None: all is lost
    deadline_left_s: float | None = None
    slowdown_most: float | None = None
    is_wasteful: bool = False


class WorkloadBoost(NamedTuple):
    """A Workload's boosts: the one in force, and the one that we wrote; None where there is none."""

    present: str | None
    ours: str | None

    @property
    def is_foreign(self) -> bool:
        """Whether somebody else set it, or took ours over."""
        return self.present is not None and self.present != self.ours


def compute_boost(run: InterruptibleWorkload, most: int, before: int = 0) -> int:
    """The boost, from 0 to `most`; `before` is the one that it has, at which it stays near a step's edge."""
    if run.is_wasteful or most <= 0:
        return 0
    lost_s = max(0.0, run.ran_s if run.grace_s is None else min(run.grace_s, run.ran_s))
    cost = run.gpus * lost_s / (run.gpus * lost_s + HALF_COST_GPU_S)
    share = 1.0 - (1.0 - cost) ** (1.0 + _pressure(run, lost_s))
    step = int(share * BOOST_STEPS)
    held = round(before * BOOST_STEPS / most)
    if abs(step - held) == 1:
        # Near the edge between the two it stays as it is.
        edge = max(step, held) / BOOST_STEPS
        if abs(share - edge) < BOOST_HYSTERESIS:
            step = held
    return most * min(step, BOOST_STEPS) // BOOST_STEPS


def _pressure(run: InterruptibleWorkload, lost_s: float) -> float:
    """How much of what its promise can bear the interruption would use up, 0 to 1."""
    bears = [left_s for left_s in (run.deadline_left_s,) if left_s is not None]
    if run.slowdown_most is not None:
        bears.append(run.slowdown_most * max(run.ran_s, _SLOWDOWN_OF_LEAST_S))
    left_s = min(bears, default=None)
    if left_s is None or lost_s <= 0.0:
        return 0.0
    return 1.0 if left_s <= lost_s else lost_s / left_s


def max_boost_of(queue: Mapping[str, Any]) -> int:
    """The largest boost in a ClusterQueue; 0 without the annotation, or with one that says nothing."""
    text = (queue["metadata"].get("annotations") or {}).get(well_known.ANNOTATION_PREEMPTION_BOOST, "")
    return min(MAX_BOOST, int(text)) if text.isascii() and text.isdigit() and len(text) < 10 else 0


def parse_boost(workload: Mapping[str, Any]) -> WorkloadBoost:
    """The boosts that a Workload has."""
    notes = workload["metadata"].get("annotations") or {}
    return WorkloadBoost(notes.get(well_known.KUEUE_PRIORITY_BOOST), notes.get(well_known.ANNOTATION_PREEMPTION_BOOST))


def parse_interruptible(
    workload: Mapping[str, Any], *, now_s: float, is_wasteful: bool = False
) -> InterruptibleWorkload | None:
    """A Workload that runs and opted in; None for all others. Raises KubernetesUnreadable."""
    status = workload.get("status") or {}
    since = {one.get("type"): one for one in status.get("conditions") or () if one.get("status") == "True"}
    admitted = since.get("Admitted")
    if admitted is None or "Finished" in since or "Evicted" in since:
        return None
    gpus, notes, is_managed = 0, dict[str, str](), False
    for part in (workload.get("spec") or {}).get("podSets") or ():
        metadata = part["template"].get("metadata") or {}
        is_managed |= (metadata.get("labels") or {}).get(well_known.LABEL_MANAGED) == well_known.MANAGED
        notes |= metadata.get("annotations") or {}
        amounts = pod_requests(part["template"]["spec"])
        gpus += int(part.get("count", 1)) * sum(amounts.count(name) for name in well_known.RESOURCES_GPU)
    if not is_managed:
        return None
    try:
        start_s = datetime.fromisoformat(str(admitted.get("lastTransitionTime"))).timestamp()
    except ValueError:
        raise KubernetesUnreadable("status.conditions", "has no time", "give what the API server gave") from None
    deadline_ns = annotations.parse_deadline_ns(notes, start_s)
    return InterruptibleWorkload(
        gpus=gpus,
        ran_s=max(0.0, now_s - start_s),
        grace_s=annotations.parse_duration_s(notes, well_known.ANNOTATION_CHECKPOINT_GRACE),
        deadline_left_s=None if deadline_ns is None else max(0.0, deadline_ns / 1e9 - now_s),
        slowdown_most=annotations.parse_fraction(notes, well_known.ANNOTATION_SLOWDOWN),
        is_wasteful=is_wasteful,
    )


def boost_patch(workload: Mapping[str, Any], value: int) -> dict[str, Any] | None:
    """The merge patch that gives a Workload this boost, 0 for none; None where it has it, or another's."""
    has = parse_boost(workload)
    wanted = str(value) if value else None
    if has.is_foreign or (has.present == wanted and has.ours == wanted):
        return None
    metadata = workload["metadata"]
    notes = {well_known.KUEUE_PRIORITY_BOOST: wanted, well_known.ANNOTATION_PREEMPTION_BOOST: wanted}
    return {"metadata": {"uid": metadata["uid"], "resourceVersion": metadata["resourceVersion"], "annotations": notes}}
