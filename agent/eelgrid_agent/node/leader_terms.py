"""The highest term of a controller that this agent has seen, on disk, and the refusal of older ones.

Theory. Whoever leads a cluster has a term, and each later leader has a higher one: by the timeline of the database's log,
then by the epoch in it (Kleppmann's fencing token, with the timeline before it because a promoted standby may have lost
the last epochs). A leader that was paused or cut off believes what it believed; its writes are refused by the database,
and what it sends here is refused by whoever remembers a higher term. So a term is on disk before anything of its leader
is obeyed, and all nodes of one agent remember together. Two leaders with one token, which only a database without a
readable timeline can have, are told apart by their names: the first is obeyed, and the second raises its epoch when it
is told. Terms of two clusters have no order: an agent that was made to call another cluster obeys that one.

Must not know streams or plans. A controller without a term is of an older version, and is obeyed.
"""

import logging
from dataclasses import asdict

from eelgrid_agent.state_files import (
    MemoryState,
    StateFileError,
    StateFormat,
    StateStore,
    StateUnwritable,
    require_text,
)
from eelgrid_protos.errors import ContractError
from eelgrid_protos.messages import LeaderTerm, TermRefused
from eelgrid_protos.schema import list_violations

LEADER_FILE = "leader.json"
_LOG = logging.getLogger("eelgrid.agent")


class TermTooOld(Exception):
    """The controller's term is older than one that this agent has seen: nothing of it is obeyed."""

    def __init__(self, refusal: TermRefused) -> None:
        super().__init__(f"its term {refusal.refused} is older than {refusal.known}, which this agent obeys")
        self.refusal = refusal


def _decode(document: "dict[str, object]") -> LeaderTerm | None:
    timeline, epoch = document["timeline"], document["epoch"]
    if type(timeline) is not int or type(epoch) is not int:
        raise TypeError("timeline and epoch are not whole numbers")
    holder, cluster = require_text(document["holder"]), require_text(document["cluster"])
    term = LeaderTerm(timeline=timeline, epoch=epoch, holder=holder, cluster=cluster)
    for violation in list_violations(term):
        raise ValueError(str(violation))
    return term


LEADER_RECORD: StateFormat[LeaderTerm | None] = StateFormat(
    title="record of the highest leader's term",
    schema=1,
    encode=lambda term: {} if term is None else asdict(term),
    decode=_decode,  # type: ignore[arg-type]
    empty=lambda: None,
    bytes_most=4096,
    damage_remedy="the next controller that connects is obeyed, whatever its term; see that no other runs",
    write_consequence="after a restart this agent would obey a controller that has been followed by another",
)


class LeaderTerms:
    """Remembers the highest term for all nodes of one agent, and counts what it refused."""

    def __init__(self, store: StateStore[LeaderTerm | None] | None = None) -> None:
        self.refusals_total = 0
        self._store: StateStore[LeaderTerm | None] = MemoryState(None) if store is None else store
        try:
            self.known = self._store.load()
        except (StateFileError, ContractError) as error:
            _LOG.error("event=leader_record_unusable reason=%r", str(error))  # no trace
            self.known = None

    def accept(self, offered: LeaderTerm | None) -> None:
        """Takes note of a controller that was connected to, on disk if it is new; raises TermTooOld."""
        if offered is None:
            return
        self.check(offered)
        if offered == self.known:
            return
        previous, self.known = self.known, offered
        _LOG.info("event=leader term=%s previous=%s", offered, previous or "-")
        try:
            self._store.store(offered)
        except StateUnwritable as error:
            # A full disk must not leave the node without a controller; until the agent ends, memory does.
            _LOG.error("event=leader_unrecorded term=%s reason=%r", offered, str(error))  # no trace

    def check(self, term: LeaderTerm | None, *, plan_epoch: int = 0) -> None:
        """Raises TermTooOld, which counts as a refusal, if a leader of this term has been followed by another."""
        if term is None or self.known is None or not term.yields_to(self.known):
            return
        self.refusals_total += 1
        _LOG.warning(
            "event=term_refused term=%s known=%s plan_epoch=%s total=%d",
            term,
            self.known,
            plan_epoch or "-",
            self.refusals_total,
        )
        raise TermTooOld(TermRefused(refused=term, known=self.known, plan_epoch=plan_epoch))
