"""Terms of other leaders that agents have met, and who waits for ours to be above them.

Owns the answers to those who wait. Must not know who meets a term, nor when the loop settles claims.
"""

import asyncio

from eelgrid_controller.errors import JournalError, JournalFenced
from eelgrid_controller.runtime.journal_writer import JournalWriter, journal_fault
from eelgrid_controller.state.journal import Journal
from eelgrid_protos.faults import Fault, NotLeader, Unavailable
from eelgrid_protos.messages import LeaderTerm


class TermClaims:
    """The claims that wait; there is something to settle where it is true."""

    def __init__(self, journal: Journal, writer: JournalWriter) -> None:
        self._journal = journal
        self._writer = writer
        self._claims: list[tuple[LeaderTerm, asyncio.Future[LeaderTerm]]] = []

    def __bool__(self) -> bool:
        return bool(self._claims)

    def add_claim(self, above: LeaderTerm) -> asyncio.Future[LeaderTerm]:
        """Adds a claim; its answer is the journal's term, once that is above it."""
        answer: asyncio.Future[LeaderTerm] = asyncio.get_running_loop().create_future()
        self._claims.append((above, answer))
        return answer

    async def settle(self) -> None:
        """Raises the journal's term above all that were claimed; raises JournalFenced if another leads."""
        claims, self._claims = self._claims, []
        above = max((term for term, _ in claims), key=lambda term: term.token)
        fault: Fault | None = Unavailable("the controller is stopping; connect again")
        try:
            if self._journal.term.yields_to(above):
                await self._writer.run_in_thread(lambda: self._journal.raise_term(above))
            fault = None
        except JournalFenced as error:
            fault = NotLeader(str(error), leader=error.leader)
            raise
        except JournalError as error:
            fault = journal_fault(error)
        finally:
            for _, answer in claims:
                if answer.done():
                    continue
                if fault is None:
                    answer.set_result(self._journal.term)
                else:
                    answer.set_exception(fault)
