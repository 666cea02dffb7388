"""Failure streaks: on which nodes and GPUs one job after the other fails as soon as it starts, while others run elsewhere.

Learned from the events of processes, so that replays are equal; bounded. Must not know what is done about it
(core.quarantine).

A machine on which nothing starts (a file system that is not mounted, a full disk, a driver that is half there) draws work in:
each job fails at once and leaves its room to the next. What fails is a process that has ended by itself, without success,
within QUICK_S of its start, for no fault that its agent has found; everything else that ends well, or later, shows that
the place works.

Test. The likelihood of n failures in a row on a place on which work fails at once with the probability BAD_SHARE, over
that on one where it does as often as on all other nodes, is (BAD_SHARE / q)^n; a place is bad where that is above a
million (Wald's sequential test, begun anew by whatever works). q is the larger of two shares, one of the last hours and
a standard error more, and one since the streak began, so that a file server that is away, whose clients fail
everywhere, closes nothing. The work of one user and name counts once in a streak, so that neither a faulty array nor a
job that is tried again makes one; it counts each time for q, which only makes the test more patient. A node and each of
its GPUs have streaks of their own, so that one GPU that works beside a broken one hides nothing.

Where work of more than one user has run, no user's failures count for more than those of all others together: nobody
closes a node to others.
"""

import math
from collections import Counter
from collections.abc import Mapping
from copy import copy
from typing import Any, NamedTuple, Self

from eelgrid_controller.state.events import AttemptEnded, Event, NodeCordoned, NodesRemoved, NodeUncordoned
from eelgrid_controller.state.queue_usage import resolve_user
from eelgrid_protos.messages import AttemptState, AttemptStatus, Workload

_NS = 1e9
QUICK_S = 60.0
BAD_SHARE = 0.95
ODDS = 1e6
_HALF_LIFE_S = 6 * 3600.0
# Quick failures and ends that are presumed of other nodes: where people try things out, a third fails at once.
_PRIOR_FAILED, _PRIOR_ENDED = 3.0, 10.0
_SHARE_LEAST, _SHARE_MOST = 0.02, 0.9
_USERS_TOLD_APART = 2
# More than any share asks for.
_GROUPS_MOST = 300
# As a shell, and the agent's launcher, tell that a command cannot be executed, or its folder not be entered.
_CANNOT_EXECUTE = (126, 127)


class FailureStreak(NamedTuple):
    """Whose work failed at once on a place since anything worked there, and all ends elsewhere until it began."""

    groups: tuple[tuple[str, str], ...] = ()  # users and names
    failed_before: int = 0
    ended_before: int = 0

    def count_groups(self, *, of_many_users: bool) -> int:
        """Returns how many failures count: of many users those of no user more often than those of all others."""
        found = len(self.groups)
        most = max(Counter(user for user, _ in self.groups).values(), default=0)
        return min(found, 2 * (found - most)) if of_many_users else found


class _Ends(NamedTuple):
    """Quick failures and all ends, weighted by age and in whole numbers."""

    at_ns: int
    recent_failed: float = 0.0
    recent_ended: float = 0.0
    failed: int = 0
    ended: int = 0

    def advance(self, now_ns: int) -> "_Ends":
        left = 2.0 ** (-max(0, now_ns - self.at_ns) / _NS / _HALF_LIFE_S)
        return self._replace(
            at_ns=max(now_ns, self.at_ns),
            recent_failed=self.recent_failed * left,
            recent_ended=self.recent_ended * left,
        )

    def add(self, now_ns: int, *, has_failed: bool) -> "_Ends":
        now = self.advance(now_ns)
        return _Ends(
            now.at_ns, now.recent_failed + has_failed, now.recent_ended + 1.0, now.failed + has_failed, now.ended + 1
        )


def has_failed_at_once(workload: Workload, status: AttemptStatus) -> bool:
    """Returns whether a process failed by itself as soon as it was started, or could not be; the first of its workload."""
    if status.state is not AttemptState.ENDED or status.is_success or status.node_fault or status.gpu_held:
        return False
    failed = [one for one in workload.attempts if one.is_over and not one.is_success]
    if workload.stopping_ns or len(failed) > 1:
        return False
    has_begun = status.signal > 0 or status.exit_code not in (None, *_CANNOT_EXECUTE)
    if has_begun and status.reason:
        # A time limit, or what another engine did.
        return False
    return not status.started_ns or status.ended_ns - status.started_ns <= QUICK_S * _NS


def shows_place_works(status: AttemptStatus) -> bool:
    """Returns whether a process succeeded, or ran for a while."""
    has_run = status.started_ns > 0 and status.ended_ns - status.started_ns > QUICK_S * _NS
    return status.is_success or (has_run and not status.node_fault and status.state is AttemptState.ENDED)


class FailureStreaks:
    """The part of the state that learns where work fails at once."""

    def __init__(self) -> None:
        # By node name and UUID of a GPU, which is empty for the node itself.
        self._streaks: dict[tuple[str, str], FailureStreak] = {}
        self._by_node: dict[str, _Ends] = {}
        self._all = _Ends(0)
        # The first two users whose work has ended here.
        self._users: tuple[str, ...] = ()

    def find(self, node_name: str, gpu_uuid: str = "") -> FailureStreak:
        """Returns the streak of a node or a GPU of it; an empty one if what ran there last has worked."""
        return self._streaks.get((node_name, gpu_uuid), _NO_STREAK)

    def _count_elsewhere(self, node_name: str, now_ns: int) -> _Ends:
        every, own = self._all.advance(now_ns), self._by_node.get(node_name, _Ends(now_ns)).advance(now_ns)
        return _Ends(
            now_ns,
            max(0.0, every.recent_failed - own.recent_failed),
            max(0.0, every.recent_ended - own.recent_ended),
            every.failed - own.failed,
            every.ended - own.ended,
        )

    def estimate_share_elsewhere(self, node_name: str, streak: FailureStreak, now_ns: int) -> float:
        """Returns which share of work may fail at once on all nodes but one, in the last hours or since a streak began."""
        ends = self._count_elsewhere(node_name, now_ns)
        known = _PRIOR_ENDED + ends.recent_ended
        share = (_PRIOR_FAILED + ends.recent_failed) / known
        share += math.sqrt(share * (1.0 - share) / known)
        # What is known from before is worth one end.
        failed, ended = max(0, ends.failed - streak.failed_before), max(0, ends.ended - streak.ended_before)
        since = (share + failed) / (1.0 + ended)
        return min(_SHARE_MOST, max(_SHARE_LEAST, share, since))

    def is_bad(self, node_name: str, gpu_uuid: str = "", *, now_ns: int) -> bool:
        """Returns whether the evidence against a node, or a GPU of it, suffices."""
        streak = self.find(node_name, gpu_uuid)
        count = streak.count_groups(of_many_users=len(self._users) >= _USERS_TOLD_APART)
        if not count:
            return False
        share = self.estimate_share_elsewhere(node_name, streak, now_ns)
        return count * math.log(BAD_SHARE / share) >= math.log(ODDS)

    def observe(self, event: Event, workloads: Mapping[str, Workload]) -> None:
        """Follows an event that was applied to these."""
        match event:
            case AttemptEnded():
                self._observe_end(event, workloads[event.workload_id])
            case NodeCordoned() | NodeUncordoned():
                for uuid in event.gpu_uuids or ("",):
                    self._streaks.pop((event.node_name, uuid), None)
            case NodesRemoved():
                gone = frozenset(event.node_names)
                self._streaks = {key: one for key, one in self._streaks.items() if key[0] not in gone}
                self._by_node = {name: ends for name, ends in self._by_node.items() if name not in gone}

    def _observe_end(self, event: AttemptEnded, workload: Workload) -> None:
        status, now_ns = event.status, event.time_ns
        place = workload.find_place(status.replica)
        has_failed = has_failed_at_once(workload, status)
        if place is None or not (has_failed or shows_place_works(status)):
            return
        elsewhere = self._count_elsewhere(place.node_name, now_ns)
        self._all = self._all.add(now_ns, has_failed=has_failed)
        own = self._by_node.get(place.node_name, _Ends(now_ns))
        self._by_node[place.node_name] = own.add(now_ns, has_failed=has_failed)
        user = resolve_user(workload)
        if len(self._users) < _USERS_TOLD_APART and user not in self._users:
            self._users = (*self._users, user)
        group = user, workload.spec.name
        for key in ((place.node_name, uuid) for uuid in ("", *place.gpu_uuids)):
            if not has_failed:
                self._streaks.pop(key, None)
                continue
            known = self._streaks.get(key) or FailureStreak((), elsewhere.failed, elsewhere.ended)
            if group not in known.groups and len(known.groups) < _GROUPS_MOST:
                self._streaks[key] = known._replace(groups=(*known.groups, group))

    def copy(self) -> Self:
        """Returns an independent copy; streaks and counts are values."""
        twin: Self = copy(self)
        twin._streaks, twin._by_node = self._streaks.copy(), self._by_node.copy()
        return twin

    def dump(self) -> dict[str, Any]:
        """Dumps everything as plain JSON values; empty without any."""
        found: dict[str, Any] = {
            "streaks": [
                [*key, [*map(list, one.groups)], one.failed_before, one.ended_before]
                for key, one in sorted(self._streaks.items())
            ],
            "nodes": [[name, *ends] for name, ends in sorted(self._by_node.items())],
            "all": list(self._all) if self._all.ended else [],
            "users": list(self._users),
        }
        return {name: rows for name, rows in found.items() if rows}

    @classmethod
    def load(cls, plain: Mapping[str, Any]) -> Self:
        """Loads this part from a checkpoint."""
        found = cls()
        for name, uuid, groups, *before in plain.get("streaks", ()):
            found._streaks[name, uuid] = FailureStreak(tuple((user, job) for user, job in groups), *before)
        found._by_node = {name: _Ends(*ends) for name, *ends in plain.get("nodes", ())}
        found._all, found._users = _Ends(*plain.get("all", (0,))), tuple(plain.get("users", ()))
        return found


_NO_STREAK = FailureStreak()
