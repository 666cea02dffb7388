"""Whether this controller still leads, by what agents say of leaders and by its lease, and what follows.

Theory. An agent remembers the highest term that it has met, and obeys no older one. If its epoch is higher than ours,
either another controller leads by now, or the database lost the newest terms (a backup, or a standby that lacked the last
transactions and whose timeline cannot be read). The database tells which: if our term still holds there, its epoch is
raised above the agent's, and agents obey us; if not, this process ends. If its timeline is higher, our database is one
that a standby has replaced, and what it says of our term is worth nothing: the agent is right. An agent's word alone is
never enough to end a leader, and its claims are bounded, so that one agent cannot use up the epochs or the database's time.

Must not know streams or how terms are stored.
"""

import logging
from collections.abc import Callable
from typing import Any

from eelgrid_controller.runtime.loop import ControllerLoop
from eelgrid_protos.errors import Violation
from eelgrid_protos.faults import InvalidArgument, NotLeader, Unavailable
from eelgrid_protos.messages import LeaderTerm, TermRefused
from eelgrid_protos.stale_reads import Staleness, allows_stale

# Beyond what any cluster reaches in a century of leaders that are followed once a minute.
_AHEAD_MOST = 100_000_000
# Between two times that the epoch is raised.
_RAISE_EVERY_S = 5.0


def confirm_read(loop: ControllerLoop, context: Any) -> None:
    """Confirms by the lease that an answer rests on what is accepted now; raises Unavailable.

    A leader that was stopped, or that cannot reach the database, may have been followed by one that has accepted more.
    It is compared after the answer is made, so that a pause in between counts. A caller that allows stale answers is
    told the age instead.
    """
    if loop.may_lead:
        return
    if not allows_stale(context.invocation_metadata()):
        raise Unavailable(
            "this controller's lease has run out, so what it knows may be old: repeat the call, or allow a stale answer "
            "(eelctl --stale)"
        )
    term = loop.term
    told = Staleness(
        age_s=loop.journal.lease_age_s, revision=loop.core.state.revision, timeline=term.timeline, epoch=term.epoch
    )
    context.set_trailing_metadata(told.to_metadata())


class LeaderClaims:
    """Compares agents' terms with ours; counts `refusals` and `raises`."""

    def __init__(
        self,
        loop: ControllerLoop,
        *,
        may_lead: Callable[[], bool],
        monotonic_s: Callable[[], float],
        log: logging.Logger,
    ) -> None:
        """`may_lead` is asked where another elector than the database says who leads."""
        self.refusals = 0
        self.raises = 0
        self._loop = loop
        self._may_lead = may_lead
        self._monotonic_s = monotonic_s
        self._log = log
        self._raised_s = float("-inf")

    @property
    def may_lead(self) -> bool:
        """Whether this controller may tell agents what to do now."""
        return self._loop.may_lead and self._may_lead()

    async def check(self, node_name: str, known: LeaderTerm | None) -> None:
        """Checks what an agent knows before it is welcomed. Raises NotLeader, Unavailable and InvalidArgument."""
        mine = self._loop.term
        if known is None or not mine.yields_to(known):
            return
        if known.timeline > mine.timeline:
            self._log.error(
                "node=%s term=%s known=%s action=refused reason=database_was_replaced", node_name, mine, known
            )
            raise NotLeader(
                f"{node_name} has met a leader on a later timeline of the database, {known}; this one's is {mine}: let "
                "--database name the server that was promoted, or remove leader.json from the agent's state directory"
            )
        if known.epoch > mine.epoch + _AHEAD_MOST:
            problem = f"is {known}, and this controller's is {mine}: no leader can have gone so far"
            remedy = "remove leader.json from the agent's state directory, and look at who wrote it"
            raise InvalidArgument("the agent's leader cannot be", (Violation("term", problem, remedy),))
        if not self.may_lead:
            raise NotLeader(f"this controller does not lead; {node_name} has met another, {known}: connect to that")
        if self._monotonic_s() - self._raised_s < _RAISE_EVERY_S:
            raise Unavailable("the epoch was raised a moment ago; connect again")
        self._raised_s = self._monotonic_s()
        self._log.warning("node=%s term=%s known=%s action=ask_database", node_name, mine, known)
        term = await self._loop.raise_term(known)
        if term != mine:
            self.raises += 1
            self._log.warning("node=%s event=epoch_raised term=%s above=%s", node_name, term, known)

    async def on_refusal(self, node_name: str, told: TermRefused) -> None:
        """An agent refused us. Raises Unavailable where another leads, after which this process ends."""
        self.refusals += 1
        self._log.error(
            "node=%s event=term_refused term=%s known=%s plan_epoch=%s", node_name, told.refused, told.known,
            told.plan_epoch or "-",
        )  # fmt: skip
        await self.check(node_name, told.known)
