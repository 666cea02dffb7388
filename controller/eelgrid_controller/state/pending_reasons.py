"""Pending reasons: the closed union of the constraints that work may wait for, their precedence and their sentences.

To add a constraint, add a member to `PendingConstraint` at the place of its precedence: its name, what helps in general,
and its sentences. Metrics, lists, hints and the tests that hold for all constraints follow. Must not know when a
constraint holds: whoever holds work back calls `describe`.

A reason is `CONSTRAINT: SENTENCE`. Its sentence is short, without numbers, and identical for similar cases, so that
reasons can be counted; the numbers are in the explanation. Of several constraints that hold work back the first is named.
A name is part of the API: it is never changed, and never used for another constraint.
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import Self

_CAPACITY = "wait for work to end there, or add nodes"


class PendingConstraint(StrEnum):
    """A constraint that work waits for, in order of precedence.

    `hint` is what helps in general. `sentences` are the templates of the reason, by case; most have one, under "".
    """

    hint: str
    sentences: Mapping[str, str]

    def __new__(cls, name: str, hint: str, sentences: Mapping[str, str]) -> Self:
        """Creates a member from its row."""
        found = str.__new__(cls, name)
        found._value_ = name
        found.hint, found.sentences = hint, sentences
        return found

    # Before all others: work for which others make room, and work that was preempted or evicted, which says so until it
    # is tried next.
    PREEMPTING = (
        "preempting",
        "nothing is needed: it is placed when those have stopped, at the latest after their grace",
        {"": "waits for {victims} to stop"},
    )
    PREEMPTED = (
        "preempted",
        "nothing is needed: it is tried again, at the place in the queue that it had",
        {"": "for {gainer} of queue {queue}", "gone": "its place is gone"},
    )
    EVICTED = (
        "evicted",
        "nothing is needed: it is tried again, at the place in the queue that it had",
        {
            "": "node {node} was drained{cause}",
            "gpu_lost": "its GPU on node {node} was lost",
            "node_fault": "attempt {attempt} ended with its node: {why}",
            "requeued": "it was requeued{cause}",
            "held": "it had not begun: {why}",
            "gone_on": "it has run on {node} by entries that the journal has lost",
        },
    )
    # Before its turn, whatever room and quota there is.
    UNKNOWN_RUN = (
        "unknown_run",
        "look at what runs on that node, then `eelctl reconcile` it, which stops that run",
        {"": "runs on node {node}, of which the journal has lost the start"},
    )
    HELD = ("held", "release it with `eelctl release`", {"": "by {user}"})
    DEPENDENCY = (
        "dependency",
        "wait for what it depends on to end",
        {"": "waits for {parents} to end"},
    )
    BEGIN_TIME = ("begin_time", "wait for its begin time", {"": "not before {time}"})
    RETRY = (
        "retry",
        "wait for its next attempt, or cancel it",
        {"": "{failures} failed; the next starts not before {time}", "failed": "attempt {attempt} failed: {why}"},
    )
    GANG = (
        "gang",
        "submit the missing parts of its gang, or see with `eelctl explain` what its other parts wait for",
        {
            "": "waits for {parts} of gang {gang}",
            "part": "waits for part {part} of gang {gang}, which may not start yet",
            "turn": "is tried with the other parts of gang {gang}",
        },
    )
    ARRAY = (
        "array",
        "wait for elements of its array to end, or submit it with a higher limit",
        {"": "its array runs as many elements at once as it may", "turn": "is tried after the elements before it"},
    )
    # Whatever room and quota there is.
    SPENDING = (
        "spending",
        "wait for the next period, or raise the limit with `eelctl policy set --spend`",
        {"": "{subject} has spent its {unit} of the {period}"},
    )
    PARTITIONS = (
        "partitions",
        "see what `eelctl partition plan` finds, and apply it",
        {"": "waits for the partition planner"},
    )
    # By its queue, whatever room there is.
    QUEUE = (
        "queue",
        "move it to a queue with `eelctl queue move`",
        {"": "no queue {queue} holds work", "unnamed": "it names none"},
    )
    MAX_QUOTA = (
        "max_quota",
        "raise its quota with `eelctl queue apply`, or cancel the work",
        {"": "queue {queue} can never have so much {resource}"},
    )
    QUOTA = (
        "quota",
        "wait for work of that queue to end, or raise its quota with `eelctl queue apply`",
        {
            "quota": "queue {queue} has too little {resource} quota left",
            "borrowing": "queue {queue} may not borrow so much {resource}",
            "usage": "queue {queue} may not use so much more {resource}",
        },
    )
    # There is room, but not for this now.
    FAIR_SHARE = (
        "fair_share",
        "wait: room is held for a bounded time, and then free for everybody again",
        {"": "there is room, but it is held for queue {queue}, which has used less than its share"},
    )
    BACKFILL = (
        "backfill",
        "wait, or say how long it runs with --expect, so that it can start before others",
        {"": "there is room, but it would delay work that goes before it"},
    )
    RESERVATION = (
        "reservation",
        "wait for the reservation to end, or say how long it runs with --expect",
        {
            "": "the nodes that would do are reserved, and full",
            "held": "there is room, but on nodes that reservation {reservation} holds",
        },
    )
    # There is room, but no power for it.
    BUDGET = (
        "budget",
        "wait for work to end below that budget, or raise it with `eelctl policy set`",
        {"": "waits for watts of {budget}"},
    )
    # No node has room: what is nearest to a fit comes first.
    REPLICAS = ("replicas", _CAPACITY, {"": "there is room for some replicas, not for all"})
    CPU_AND_MEMORY = (
        "cpu+memory",
        _CAPACITY,
        {"": "nodes with free GPUs lack CPU or memory", "no_gpu": "no node has enough CPU and memory free"},
    )
    CPU = ("cpu", _CAPACITY, {"": "nodes with free GPUs lack CPU", "no_gpu": "no node has enough CPU free"})
    MEMORY = ("memory", _CAPACITY, {"": "nodes with free GPUs lack memory", "no_gpu": "no node has enough memory free"})
    GPU_SHARE = ("gpu_share", _CAPACITY, {"": "no GPU has so large a share free"})
    INTERFERENCE = (
        "interference",
        "wait for work to end there, bear more with --gpu-slowdown, or measure the pairs that are missing: `eelctl interference`",
        {"": "GPUs have room, but beside loads that slow it down beyond a limit, or it them"},
    )
    GPU_COUNT = ("gpu_count", _CAPACITY, {"": "no node has enough whole GPUs free"})
    GPU_MIG = (
        "gpu_mig",
        "take a pool from the partition planner and switch MIG off there, or allow other models",
        {"": "the GPUs that would do are cut by MIG, or the partition planner's"},
    )
    GPU_MODEL = ("gpu_model", _CAPACITY, {"": "no node has a GPU of an allowed model"})
    TRAITS = (
        "traits",
        "label nodes or take taints away, or ask for less in its node selector, affinity and tolerations",
        {"": "no node that would do has every trait that it requires"},
    )
    PROCESSES = (
        "processes",
        "start an agent there with --run-processes, or eelctl box start on this machine",
        {"": "no agent of a node that would do runs processes"},
    )
    UNAVAILABLE = (
        "unavailable",
        "eelctl uncordon cordoned nodes, bring the agents of lost nodes back, eelctl reconcile nodes that are ahead, or cancel small workloads there",
        {
            "": "the nodes that would do are cordoned, lost or ahead of the journal, or as full as a plan allows",
            "refused": "the node that was chosen refuses it, which is a fault of the controller: report it",
        },
    )
    NO_NODES = ("no_nodes", _CAPACITY, {"": "no node has joined yet"})

    def describe(self, case: str = "", **names: str) -> str:
        """Returns the reason of a case, with the names of what stands in the way; raises KeyError for an unknown one."""
        return f"{self.value}: {self.sentences[case].format_map(names)}"


_BY_NAME: Mapping[str, PendingConstraint] = {one.value: one for one in PendingConstraint}


def find_constraint(name: str) -> PendingConstraint:
    """Returns the constraint of a name; raises KeyError."""
    return _BY_NAME[name]


def describe_hint(constraint: str) -> str:
    """Returns what helps work that waits for a constraint in general, without trying it."""
    found = _BY_NAME.get(constraint)
    return _CAPACITY if found is None else found.hint
