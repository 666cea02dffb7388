"""The records of all devices, held in memory and in the journal alike.

Owns that nothing is believed before it is on the disk: a change is stored first
and seen afterwards, so that a journal that cannot be written stops every step
that would need it, and one that could not be read once stays unread until the next
start. Threads may use it; the journal is written by one at a time.
"""

import threading

from eelgrid_agent.mig.journal import Journal, JournalError
from eelgrid_agent.mig.transition import GpuRecord

__all__ = ["Ledger"]


class Ledger:
    """What the journal holds."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._records: dict[str, GpuRecord] | None = None
        self._unread: JournalError | None = None
        self._lock = threading.Lock()

    def get(self, uuid: str) -> GpuRecord:
        """The record of a device; an empty one where none was ever kept. Raises JournalError."""
        with self._lock:
            return self._loaded().get(uuid) or GpuRecord(uuid=uuid)

    def put(self, record: GpuRecord) -> GpuRecord:
        """Keeps a record and returns it; what is already kept costs nothing. Raises JournalError."""
        with self._lock:
            records = self._loaded()
            if records.get(record.uuid) != record:
                after = {**records, record.uuid: record}
                self._journal.store(after.values())
                self._records = after
        return record

    def all(self) -> tuple[GpuRecord, ...]:
        """Every record. Raises JournalError."""
        with self._lock:
            return tuple(self._loaded().values())

    def _loaded(self) -> dict[str, GpuRecord]:
        if self._unread is not None:
            raise self._unread
        if self._records is None:
            try:
                self._records = {record.uuid: record for record in self._journal.load()}
            except JournalError as error:
                self._unread = error
                raise
        return self._records
