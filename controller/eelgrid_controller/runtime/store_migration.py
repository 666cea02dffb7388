"""Moves a journal from one database to another: all of it or nothing, and only if both lead to the same state.

Owns the order: the source is locked against every controller, copied in one transaction of the target, both are replayed,
and where their digests are the same the source is marked, so that no controller goes on from it. Must not know which
databases they are.
"""

from dataclasses import asdict, dataclass
from typing import Any

from eelgrid_controller.core.recovery import recover_state
from eelgrid_controller.errors import JournalCorrupt
from eelgrid_controller.runtime.audit_log import AuditedJournal, AuditFilter
from eelgrid_controller.state.cluster_state import ClusterState
from eelgrid_controller.state.journal import JournalCopy, digest_of
from eelgrid_protos.messages import AuditEntry

_PAGE = 5000


@dataclass(frozen=True, slots=True, kw_only=True)
class MovedJournal:
    """What was moved, and what both journals lead to."""

    cluster_id: str
    source: str
    target: str
    last_seq: int
    entries: int
    checkpoints: int
    audit_entries: int
    # Entries of the audit log whose checksums were wrong.
    audit_damaged: int
    epoch: int
    digest: str

    def as_plain(self) -> dict[str, Any]:
        """Returns plain values."""
        return asdict(self)


def _audit_entries(journal: AuditedJournal) -> tuple[list[AuditEntry], int]:
    """Returns the whole audit log, oldest first, and how many entries of it are damaged."""
    found, damaged, before = list[AuditEntry](), 0, None
    while True:
        page = journal.read_audit_page(AuditFilter(), size=_PAGE, before=before)
        found.extend(page.entries)
        damaged += page.damaged
        if not page.next_before:
            return found[::-1], damaged
        before = page.next_before


def copy_journal(journal: AuditedJournal) -> tuple[JournalCopy, int]:
    """Reads all of a journal, verified, and counts the damaged entries of its audit log; raises JournalError."""
    audited, damaged = _audit_entries(journal)
    copy = JournalCopy(
        journal.cluster_id,
        journal.term.epoch,
        journal.read_history(),
        journal.newest_checkpoint(),
        tuple(audited),
        journal.term.timeline,
    )
    return copy, damaged


def _digest(journal: AuditedJournal) -> str:
    return digest_of(recover_state(journal, ClusterState).state.dump())


def move_journal(source: AuditedJournal, target: AuditedJournal, copy: JournalCopy, *, damaged: int) -> MovedJournal:
    """Moves a journal, of which `copy_journal` has read `copy`, into an empty one; both stay open. Raises JournalError."""
    target.restore(copy)
    before, after = _digest(source), _digest(target)
    if before != after:
        target.mark_moved("nowhere: the copy was not the same")
        raise JournalCorrupt(
            target.path,
            f"the copy leads to another state ({after}) than {source.path} ({before})",
            f"nothing was changed in {source.path}: go on with it, and report this",
        )
    source.mark_moved(str(target.path))
    return MovedJournal(
        cluster_id=copy.cluster_id,
        source=str(source.path),
        target=str(target.path),
        last_seq=copy.last_seq,
        entries=len(copy.history.entries),
        checkpoints=len(copy.checkpoints),
        audit_entries=len(copy.audited),
        audit_damaged=damaged,
        epoch=target.term.epoch,
        digest=after,
    )
