"""The record of one workload that is placed into one of several clusters, and what is to be done next for it.

Theory. MultiKueue's rule: two clusters may reserve a workload, one runs it. Where the best one would start it at once, the second
one is asked only after that has not answered. A copy is reserved by submitting it held, with
the id that it has everywhere, so that a repeated submission changes nothing. The second copy stays reserved until the chosen
cluster has started the workload: until then it may go there. A copy that was cancelled stays known there by
its id: it is the tombstone that keeps late submissions and releases from starting anything. A cluster that refused a submission
knows no id, so it is asked to record it as cancelled before anything else follows from the refusal. Work with a
promised deadline cannot be held; it is sent to the one cluster that was chosen before. From
this follow the rules, which hold whatever is lost, doubled or delayed on the way and wherever the front crashes:

1. The record is on disk before a call that it permits is made; only that a copy is held need not be, before it is chosen.
2. Only the chosen cluster is ever told to release its copy.
3. The choice changes only after the chosen cluster has confirmed that its copy ended and never started there.
4. A cluster that a submission was sent to is not forgotten before it has answered: it gets the submission until then, and
   once the workload has started elsewhere, the copy is cancelled. So no copy is left behind held, and one that cannot be reached keeps its copy.

An answer is read by what the copy is (held, released, ended) rather than by what was asked, so that it does not matter
which of several equal calls it answers. What is ended stays ended. A cluster that knows the copy no more has forgotten it
or lost its journal: then it may have run, and the workload goes nowhere else.

Pure: no I/O, no clock. Must not know how clusters are ranked, how a record is kept nor how a cluster is called.
"""

import enum
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from eelgrid_controller.state.attempts import has_started
from eelgrid_controller.state.pending_reasons import PendingConstraint
from eelgrid_protos.faults import (
    AlreadyExists,
    FailedPrecondition,
    Fault,
    InvalidArgument,
    NotFound,
    PermissionDenied,
    ResourceExhausted,
)
from eelgrid_protos.messages import SubmitWorkloadRequest, Workload, WorkloadPhase

# Copies of one workload that are reserved, or may be, at one time.
RESERVED_MOST = 2
_PROBLEM_LETTERS_MOST = 500
# Sentences of a decision.
DECISION_LINES_MOST = 32
# Answers that say that nothing was done, and that repeating the call as it is will not help.
REFUSALS = (AlreadyExists, FailedPrecondition, InvalidArgument, NotFound, PermissionDenied, ResourceExhausted)


class CopyPhase(enum.Enum):
    """What a cluster's copy is, as far as its answers tell."""

    # It may have the held submission; no answer has come.
    SENT = "sent"
    HELD = "held"
    # Nothing holds it: it waits there, or runs.
    RELEASED = "released"
    # It refused the submission, and does not know the id yet: an earlier sending may arrive and be accepted.
    REFUSED = "refused"
    # Nothing of it runs there, nor will.
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class StoredRecord:
    """A record, and what the chosen cluster last said of the workload."""

    dispatch: "Dispatch"
    latest: Workload | None = None


class Verb(enum.Enum):
    """A call to a cluster about its copy; each may be repeated."""

    SUBMIT = "submit"
    RELEASE = "release"
    HOLD = "hold"
    CANCEL = "cancel"
    # Submits it as cancelled, so that the id is known.
    WITHDRAW = "withdraw"
    LOOK = "look"


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """The copy of a workload in one cluster."""

    cluster: str
    phase: CopyPhase = CopyPhase.SENT
    # It was placed there once, or may have been.
    started: bool = False
    # Why it was refused, or why the last call about it failed; empty otherwise.
    problem: str = ""

    @property
    def is_reserved(self) -> bool:
        """Whether it may be chosen, now or once it has answered."""
        return self.phase in {CopyPhase.SENT, CopyPhase.HELD}

    @property
    def is_awaited(self) -> bool:
        """Whether its cluster has not failed yet to answer the submission."""
        return self.phase is CopyPhase.SENT and not self.problem


@dataclass(frozen=True, slots=True, kw_only=True)
class Dispatch:
    """One workload and its copies."""

    workload_id: str
    # As the clusters get it, but for the hold.
    request: SubmitWorkloadRequest
    # Whose it is; empty without certificates.
    owner: str = ""
    submitted_ns: int = 0
    # In the order in which they are preferred; each cluster once.
    copies: tuple[Copy, ...] = ()
    # The cluster that runs it; empty before the choice.
    chosen: str = ""
    # Its owner wants it to end.
    is_cancelled: bool = False
    # The cluster that it is to go to, once that holds it, unless it starts in the chosen one before; empty otherwise.
    moving_to: str = ""
    # The front may have held the chosen copy to move it; what anybody else holds there is not released.
    may_hold: bool = False
    # Every cluster refused it, or ended its copy before it was chosen.
    has_failed: bool = False
    # Why the clusters were preferred as they were, a sentence each; before, why it waits at the front.
    decision: tuple[str, ...] = ()
    # The one cluster that it may go to, since other work that it belongs with is there; empty for any.
    pinned_to: str = ""
    # Who holds it at the front, where it waits in no cluster until it is released; empty for nobody.
    held_by: str = ""
    # Dependencies that had ended as they must before it was sent: no cluster is told of them.
    met: tuple[str, ...] = ()

    @property
    def submission(self) -> SubmitWorkloadRequest:
        """What a cluster is sent, the same each time."""
        schedule = self.request.spec.schedule
        sent = replace(self.request, workload_id=self.workload_id, hold=not self.is_direct)
        if schedule is None or not self.met:
            return sent
        after = tuple(one for one in schedule.after if one.workload_id not in self.met)
        return replace(sent, spec=replace(sent.spec, schedule=replace(schedule, after=after)))

    @property
    def withdrawal(self) -> SubmitWorkloadRequest:
        """What a cluster that refused it is sent; held, for one of an earlier version, which knows no submission as cancelled."""
        return replace(self.submission, hold=True, cancelled=True)

    @property
    def may_move(self) -> bool:
        """Whether it may leave a cluster that it was released in; of an array, some elements might have started."""
        return not (self.is_direct or self.pinned_to or self.request.array is not None)

    @property
    def is_direct(self) -> bool:
        """Whether it is chosen a cluster before it is sent: a deadline is promised to nothing that is held."""
        return self.request.spec.has_promised_deadline

    def find_copy(self, cluster: str) -> Copy | None:
        """Returns the copy in a cluster, if it was ever sent one."""
        return next((copy for copy in self.copies if copy.cluster == cluster), None)

    def _may_choose(self, copy: Copy) -> bool:
        return not self.pinned_to or copy.cluster == self.pinned_to

    def is_astray(self, copy: Copy) -> bool:
        """Whether a copy is in another cluster than the one that the workload is pinned to, and was not chosen."""
        return copy.cluster != self.chosen and not self._may_choose(copy)

    @property
    def is_spent(self) -> bool:
        """Whether nothing of it is in any cluster that it was sent to."""
        return all(copy.phase is CopyPhase.ENDED for copy in self.copies)

    @property
    def is_settled(self) -> bool:
        """Whether nothing is left to do: it has ended everywhere."""
        return self.is_spent and (bool(self.chosen) or self.is_cancelled or self.has_failed)

    @property
    def progress(self) -> tuple[object, ...]:
        """What of it decides about calls."""
        copies = tuple((copy.cluster, copy.phase, copy.started) for copy in self.copies)
        where = (self.chosen, self.moving_to, self.may_hold, self.pinned_to, self.met, self.held_by)
        return copies, where, self.is_cancelled, self.has_failed

    @property
    def durable_progress(self) -> tuple[object, ...]:
        """What of it must be on disk before the next call.

        All but that a copy is held, which another sending tells again; where a workload moves, that permits to cancel the other.
        """
        copies, *rest = self.progress
        phases = {} if self.moving_to else {CopyPhase.HELD: CopyPhase.SENT}
        assert isinstance(copies, tuple)
        return tuple((name, phases.get(phase, phase), started) for name, phase, started in copies), *rest

    @property
    def is_decided(self) -> bool:
        """Whether the chosen cluster has started it, or ended it: it goes nowhere else."""
        copy = self.find_copy(self.chosen)
        return copy is not None and (copy.started or copy.phase is CopyPhase.ENDED)

    @property
    def may_leave(self) -> bool:
        """Whether the cluster that it is to go to holds it."""
        copy = self.find_copy(self.moving_to)
        return copy is not None and copy.phase is CopyPhase.HELD

    @property
    def needs_clusters(self) -> int:
        """How many more clusters may be asked to reserve it, since none that did is left to be chosen."""
        held = (copy for copy in self.copies if copy.phase is CopyPhase.HELD)
        if (
            self.held_by
            or self.chosen
            or self.is_cancelled
            or self.has_failed
            or any(self._may_choose(copy) for copy in held)
        ):
            return 0
        if any(copy.is_awaited and self._may_choose(copy) for copy in self.copies):
            return 0
        # What is pinned is in another cluster only while it is withdrawn there.
        if self.pinned_to and self.find_copy(self.pinned_to) is not None:
            return 0
        most = 1 if self.is_direct else RESERVED_MOST
        # Whatever has not ended may be a reservation yet: what somebody released may be held again, and what was refused
        # may have been accepted by an earlier sending.
        return max(0, most - sum(copy.phase is not CopyPhase.ENDED for copy in self.copies))


@dataclass(frozen=True, slots=True)
class ClusterCall:
    """A call that is to be made."""

    cluster: str
    verb: Verb


def plan_calls(dispatch: Dispatch) -> tuple[ClusterCall, ...]:
    """Returns the calls that the record permits now, one for each copy at most."""
    found = ((copy.cluster, _find_verb(dispatch, copy)) for copy in dispatch.copies)
    return tuple(ClusterCall(cluster, verb) for cluster, verb in found if verb is not None)


def _find_verb(dispatch: Dispatch, copy: Copy) -> Verb | None:
    is_chosen = copy.cluster == dispatch.chosen
    is_superfluous = not is_chosen and (dispatch.is_decided or dispatch.has_failed)
    is_unwanted = dispatch.is_cancelled or is_superfluous or dispatch.is_astray(copy)
    match copy.phase:
        case CopyPhase.SENT:
            return Verb.SUBMIT
        case CopyPhase.REFUSED:
            return Verb.WITHDRAW
        case CopyPhase.HELD:
            if is_unwanted or (is_chosen and dispatch.may_leave):
                return Verb.CANCEL
            if is_chosen:
                return Verb.RELEASE
            # Somebody may release it there, who was not asked to.
            return Verb.LOOK if dispatch.chosen else None
        case CopyPhase.RELEASED:
            if is_unwanted or not is_chosen:
                return Verb.CANCEL
            return Verb.HOLD if dispatch.may_leave else Verb.LOOK
        case CopyPhase.ENDED:
            return None


def choose_cluster(dispatch: Dispatch) -> Dispatch:
    """Returns the dispatch with the first cluster that holds it as the chosen one, if one is to be chosen."""
    if dispatch.chosen or dispatch.is_cancelled or dispatch.has_failed:
        return dispatch
    # What somebody released there may run: no other may.
    loose = next((copy for copy in dispatch.copies if copy.phase is CopyPhase.RELEASED), None)
    held = (copy for copy in dispatch.copies if copy.phase is CopyPhase.HELD and not dispatch.is_astray(copy))
    first = loose or next(held, None)
    if first is None:
        return dispatch
    chosen = replace(dispatch, chosen=first.cluster)
    if loose is None or dispatch.request.array is None:
        return chosen
    # Of an array only some elements were released: the others are to be.
    return _alter_copy(chosen, first.cluster, lambda one: replace(one, phase=CopyPhase.HELD))


def add_clusters(dispatch: Dispatch, clusters: Iterable[str], decision: Iterable[str]) -> Dispatch:
    """Returns the dispatch to be sent to further clusters, in the order of preference, as far as it needs them."""
    allowed = (name for name in clusters if dispatch.pinned_to in {"", name})
    new = [name for name in allowed if dispatch.find_copy(name) is None][: dispatch.needs_clusters]
    if not new:
        return dispatch
    copies = (*dispatch.copies, *(Copy(cluster=name) for name in new))
    chosen = new[0] if dispatch.is_direct else dispatch.chosen
    return replace(dispatch, copies=copies, chosen=chosen, decision=tuple(decision))


def request_cancel(dispatch: Dispatch) -> Dispatch:
    """Returns the dispatch as one that its owner wants to end."""
    return replace(dispatch, is_cancelled=True)


def hold_dispatch(dispatch: Dispatch, user: str) -> Dispatch:
    """Returns the dispatch as held at the front; one that was sent to a cluster, has failed or was cancelled, as it is."""
    if dispatch.held_by or dispatch.copies or dispatch.has_failed or dispatch.is_cancelled:
        return dispatch
    words = f"{PendingConstraint.HELD.describe(user=user)}: it waits at the front, and goes to a cluster once it is released"
    return replace(dispatch, held_by=user, decision=(words,))


def release_dispatch(dispatch: Dispatch) -> Dispatch:
    """Returns the dispatch as one that nobody holds at the front."""
    return replace(dispatch, held_by="", decision=()) if dispatch.held_by else dispatch


def request_move(dispatch: Dispatch, cluster: str) -> Dispatch:
    """Returns the dispatch as one that is to go to another cluster, unless it has started in the chosen one."""
    copy = dispatch.find_copy(dispatch.chosen)
    if copy is None or copy.phase is not CopyPhase.RELEASED or copy.started or dispatch.is_cancelled:
        return dispatch
    standby = dispatch.find_copy(cluster)
    if (
        not dispatch.may_move
        or dispatch.moving_to
        or cluster == dispatch.chosen
        or (standby is not None and not standby.is_reserved)
    ):
        return dispatch
    copies = dispatch.copies if standby is not None else (*dispatch.copies, Copy(cluster=cluster))
    return replace(dispatch, copies=copies, moving_to=cluster, may_hold=True)


def fail_dispatch(dispatch: Dispatch, reason: str) -> Dispatch:
    """Returns the dispatch as failed, unless a cluster was chosen; what is reserved anywhere is withdrawn."""
    if dispatch.chosen or dispatch.is_cancelled:
        return dispatch
    return replace(dispatch, has_failed=True, decision=(reason, *dispatch.decision)[:DECISION_LINES_MOST])


def give_up(dispatch: Dispatch) -> Dispatch:
    """Returns the dispatch as failed, if nothing of it is in any cluster and no cluster was chosen."""
    return replace(dispatch, has_failed=True) if dispatch.is_spent and not dispatch.chosen else dispatch


def _alter_copy(dispatch: Dispatch, cluster: str, alter: Callable[[Copy], Copy]) -> Dispatch:
    copies = tuple(alter(copy) if copy.cluster == cluster else copy for copy in dispatch.copies)
    return replace(dispatch, copies=copies)


def record_answer(dispatch: Dispatch, cluster: str, verb: Verb, workload: Workload) -> Dispatch:
    """Returns the dispatch after a cluster has said what its copy is."""
    copy = dispatch.find_copy(cluster)
    if copy is None or copy.phase is CopyPhase.ENDED:
        return dispatch
    started = copy.started or has_started(workload)
    if workload.phase.is_ended:
        return _end_copy(dispatch, cluster, started=started, is_known=True)
    is_chosen = cluster == dispatch.chosen
    is_held = workload.phase is WorkloadPhase.PENDING and bool(workload.held_by)
    # Whoever holds it there once it was released decides how long, if it was not the front.
    is_ours = copy.phase is not CopyPhase.RELEASED or not is_chosen or dispatch.may_hold
    phase = CopyPhase.HELD if is_held and is_ours else CopyPhase.RELEASED
    if workload.array is not None and is_chosen and copy.phase is CopyPhase.HELD and verb is not Verb.RELEASE:
        # Until the release of the whole array is answered, some of its elements may be held yet.
        phase = CopyPhase.HELD
    # Why it failed is told after that too.
    problem = copy.problem if dispatch.has_failed else ""
    found = _alter_copy(dispatch, cluster, lambda one: replace(one, phase=phase, started=started, problem=problem))
    if not is_chosen:
        return found
    if verb is Verb.RELEASE and not is_held and not dispatch.moving_to:
        found = replace(found, may_hold=False)
    return replace(found, moving_to="") if started else found


def _end_copy(
    dispatch: Dispatch, cluster: str, *, started: bool, is_known: bool = False, problem: str = ""
) -> Dispatch:
    """Returns the dispatch with a copy that has ended; `is_known` if the cluster knows its id and keeps it from starting again."""
    found = _alter_copy(
        dispatch,
        cluster,
        lambda one: replace(one, phase=CopyPhase.ENDED, started=started, problem=problem or one.problem),
    )
    if cluster == dispatch.moving_to:
        return replace(found, moving_to="")
    if not dispatch.chosen:
        # It ran there by an earlier submission that the front has forgotten, or by somebody's release.
        return replace(found, chosen=cluster) if started else found
    if cluster != dispatch.chosen:
        return found
    before = dispatch.find_copy(cluster)
    if before is not None and before.phase is CopyPhase.REFUSED and not started:
        # Where nothing marks its id a late submission may be accepted yet, so it goes nowhere else.
        return replace(found, chosen="") if is_known else replace(found, has_failed=True)
    if not dispatch.may_leave:
        return found
    # Rule 3: another one is chosen only if it never started here.
    return replace(found, moving_to="", may_hold=False, chosen=dispatch.chosen if started else "")


def record_failure(dispatch: Dispatch, cluster: str, verb: Verb, fault: Fault) -> Dispatch:
    """Returns the dispatch after a call that failed; what was not refused may have been done, and is repeated."""
    copy, problem = dispatch.find_copy(cluster), fault.message[:_PROBLEM_LETTERS_MOST]
    if copy is None or copy.phase is CopyPhase.ENDED:
        return dispatch
    if verb is Verb.SUBMIT and copy.phase is CopyPhase.SENT and isinstance(fault, REFUSALS):
        found = replace(dispatch, moving_to="") if cluster == dispatch.moving_to else dispatch
        return _alter_copy(found, cluster, lambda one: replace(one, phase=CopyPhase.REFUSED, problem=problem))
    if copy.phase is CopyPhase.REFUSED and isinstance(fault, REFUSALS):
        # That the id is taken keeps a late submission from being accepted as a mark does.
        return _end_copy(dispatch, cluster, started=False, is_known=isinstance(fault, AlreadyExists))
    if isinstance(fault, NotFound):
        # It was there. Of the chosen one nobody can say whether it ran.
        return _end_copy(dispatch, cluster, started=copy.started or cluster == dispatch.chosen, problem=problem)
    if verb is Verb.HOLD and isinstance(fault, FailedPrecondition):
        # It has started meanwhile, or ended, and stays.
        return replace(dispatch, moving_to="")
    return _alter_copy(dispatch, cluster, lambda one: replace(one, problem=problem))
