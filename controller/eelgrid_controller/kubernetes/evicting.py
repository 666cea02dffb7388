"""Break before make: pods that are told, given time to save their work, and then evicted.

Owns what comes next, read from the pods as they are. Must not know budgets or how an
eviction is sent: it says when to ask, and the eviction API says whether.

Theory. What restarts from a checkpoint is told first: an annotation says when it will go, and
an Event says it to people. After that, the eviction is asked for; where a
PodDisruptionBudget forbids it, again and again, for a bounded time. A gang goes as a whole:
none is evicted before all may be. The note on each pod says since when; so a restart goes
on, and what was told is kept.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from eelgrid_controller.kubernetes.move_notes import Note, note_of
from eelgrid_controller.kubernetes.surging import Mark, Over, Pace, Wait
from eelgrid_controller.kubernetes.views import Pod

__all__ = ["Evict", "evict", "survives"]


class Evict(NamedTuple):
    """Ask for all of these to go, or for none."""

    pods: tuple[Pod, ...]


def evict(
    notes: Sequence[Note], pods: Mapping[str, Pod], pace: Pace, now_s: float, *, arrived: bool, last: str = ""
) -> Wait | Mark | Evict | Over:
    """What comes next for the pods of these notes; `pods` holds those that are there, by uid.

    `arrived` says that all kept places have pods again, `last` why the last eviction did not succeed.
    """
    here = [pods[note.uid] for note in notes if note.uid in pods and not pods[note.uid].is_terminal]
    staying = [pod for pod in here if not pod.is_going]
    evict_s = max(note.evict_s for note in notes)
    has_begun = len(staying) < len(notes)
    for note in notes:
        pod = pods.get(note.uid)
        told = note_of(pod.annotations) if pod is not None else None
        if pod is not None and not has_begun and (told is None or told.uid != note.uid):
            return Mark(pod, replace(note, step="told", step_s=now_s), None, evict_s)
    if staying:
        if now_s < evict_s:
            return Wait("it saves its work")
        if now_s > evict_s + pace.budget_s * (2.0 if has_begun else 1.0):
            why = last or "the eviction did not come about"
            return Over(is_done=False, why=f"{why}; tried for {pace.budget_s:g} s")
        return Evict(tuple(staying))
    if here:
        return Wait("it goes")
    if not arrived and now_s <= evict_s + pace.budget_s + pace.arrive_s:
        return Wait("its owner makes it anew")
    return Over(is_done=True, why="evicted")


def survives(job: Mapping[str, Any], pods: int) -> bool:
    """Whether a Job goes on after so many of its pods were evicted: each may count as a failure."""
    spec, status = job.get("spec") or {}, job.get("status") or {}
    for rule in (spec.get("podFailurePolicy") or {}).get("rules") or ():
        met = {one.get("type") for one in rule.get("onPodConditions") or () if one.get("status", "True") == "True"}
        if "DisruptionTarget" in met and rule.get("action") in ("Ignore", "FailJob"):
            return bool(rule["action"] == "Ignore")
    limit = spec.get("backoffLimit")
    return int(status.get("failed") or 0) + pods <= (6 if limit is None else int(limit))
