"""Limits that were asked of nodes and are not answered yet: what the agents tell becomes the answer to a number.

Owns which word of an agent answers which number. Must not know why a limit was asked.

Theory. A limit travels in a node's plan, whose epoch rises with each change; so an answer
counts if it is to that epoch or a later one. All GPUs of a holding must have been read
back at the limit for it to be confirmed, with the highest that was read; one that refused
or failed makes the holding fail, again with the highest that was read, or None where one
is not known. A plan may answer several numbers, and the sensors confirm what a lost answer
would have: readings later than the plan that show the limit. A number that neither answers
in time has failed, at what the sensors show.
"""

from collections.abc import Mapping
from typing import NamedTuple

from eelgrid_controller.steering.events import LimitConfirmed, LimitFailed
from eelgrid_protos.messages import ApplyStatus, PlanApplied

__all__ = ["Asked", "AskedLimits", "NodeWord"]

_SAME_W = 1.0  # drivers round
_DONE = frozenset((ApplyStatus.REFUSED, ApplyStatus.FAILED))


class Asked(NamedTuple):
    """One instruction that was carried out as far as the journal."""

    number: int
    node: str
    uuids: tuple[str, ...]
    limit_w: float
    epoch: int  # of the node's plan that has it
    at_s: float


class NodeWord(NamedTuple):
    """What a node told last: of its plan, and of each GPU's limit with the age of the reading."""

    applied: PlanApplied | None
    limits_w: Mapping[str, float]
    age_s: float | None


class AskedLimits:
    """All numbers without an answer."""

    def __init__(self, *, confirm_s: float) -> None:
        self._confirm_s = confirm_s
        self._asked: dict[int, Asked] = {}

    def __len__(self) -> int:
        return len(self._asked)

    @property
    def nodes(self) -> frozenset[str]:
        """Nodes that are to answer."""
        return frozenset(asked.node for asked in self._asked.values())

    def ask(self, asked: Asked) -> None:
        """An answer is awaited; an older number of the same GPUs gets none any more."""
        uuids = frozenset(asked.uuids)
        self._asked = {
            number: one for number, one in self._asked.items() if one.node != asked.node or uuids.isdisjoint(one.uuids)
        }
        self._asked[asked.number] = asked

    def forget_node(self, node: str) -> None:
        """The node is lost: its numbers are void."""
        self._asked = {number: one for number, one in self._asked.items() if one.node != node}

    def answers(self, words: Mapping[str, NodeWord], at_s: float) -> list[LimitConfirmed | LimitFailed]:
        """What is answered by now; each number once."""
        made: list[LimitConfirmed | LimitFailed] = []
        for number in sorted(self._asked):
            one = self._asked[number]
            word = words.get(one.node)
            answer = None if word is None else self._answer(one, word, at_s)
            if answer is not None:
                del self._asked[number]
                made.append(answer)
        return made

    def _answer(self, one: Asked, word: NodeWord, at_s: float) -> LimitConfirmed | LimitFailed | None:
        told = {}
        if word.applied is not None and word.applied.epoch >= one.epoch:
            told = {result.subject: result for result in word.applied.results}
        results = [told[uuid] for uuid in one.uuids if uuid in told]
        read_w = [result.power_limit_w for result in results]
        known_w = [limit_w for limit_w in read_w if limit_w is not None]
        if any(result.status in _DONE for result in results):
            highest = max(known_w) if len(known_w) == len(one.uuids) else None
            return LimitFailed(at_s, one.number, highest)
        if len(known_w) == len(one.uuids) and all(result.status is ApplyStatus.APPLIED for result in results):
            return LimitConfirmed(at_s, one.number, max(known_w))
        seen_w = [word.limits_w[uuid] for uuid in one.uuids if uuid in word.limits_w]
        waited_s = at_s - one.at_s
        is_seen = len(seen_w) == len(one.uuids) and word.age_s is not None and word.age_s < waited_s
        if is_seen and all(abs(limit_w - one.limit_w) <= _SAME_W for limit_w in seen_w):
            return LimitConfirmed(at_s, one.number, max(seen_w))
        if waited_s >= self._confirm_s:
            return LimitFailed(at_s, one.number, max(seen_w) if is_seen else None)
        return None
