"""The order in which `eelctl admin migrate` moves a controller's stores.

The energy ledger is copied first and marked last: wherever it breaks off, the journal says which of the two databases is in
force, and the same command, or `--ledger-only`, goes on. Must not know how a journal or a ledger is stored.
"""

import contextlib
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eelgrid_controller.cli.confirmation import confirm_change
from eelgrid_controller.cli.connection import NameNotFound
from eelgrid_controller.energy.store.ledger_migration import MovedLedger, copy_ledger
from eelgrid_controller.energy.store.ledger_store import LedgerStore, open_ledger, open_ledger_with
from eelgrid_controller.energy.store.sqlite_database import FILE_NAME
from eelgrid_controller.runtime.audit_log import AuditedJournal
from eelgrid_controller.runtime.sqlite_journal import hold_directory
from eelgrid_controller.runtime.store_migration import MovedJournal, copy_journal, move_journal
from eelgrid_controller.runtime.stores import is_filled, open_store, sqlite_folder

_ADDRESS = "eelctl admin migrate"


@dataclass(frozen=True, slots=True)
class MovedStores:
    """What was moved; `ledger` is None where there was none, `journal` where it stayed."""

    target: str
    journal: MovedJournal | None
    ledger: MovedLedger | None

    def as_plain(self) -> dict[str, Any]:
        """Returns plain values."""
        ledger = None if self.ledger is None else self.ledger.as_plain()
        return ({} if self.journal is None else self.journal.as_plain()) | {"ledger": ledger}

    @property
    def lines(self) -> list[str]:
        """What people read."""
        found = list[str]()
        if moved := self.journal:
            found += [
                f"moved    cluster {moved.cluster_id} from {moved.source} to {moved.target}",
                f"entries  {moved.entries:,} up to {moved.last_seq:,}, {moved.checkpoints} checkpoints",
                f"audit    {moved.audit_entries:,} entries"
                + (f", {moved.audit_damaged:,} damaged" if moved.audit_damaged else ""),
                f"digest   {moved.digest}, the same on both sides",
            ]
        if ledger := self.ledger:
            damaged = f", {ledger.names_damaged:,} damaged names left out" if ledger.names_damaged else ""
            found += [
                f"ledger   {ledger.rows:,} rows{damaged}",
                f"digest   {ledger.digest}, the same on both sides",
            ]
        return [*found, f"next     eelgrid-controller --database {self.target}; other settings stay in --data"]


class StoreMove:
    """One move; what is opened is closed with `stack`."""

    def __init__(self, source: str, target: str, scratch: Path, stack: contextlib.ExitStack) -> None:
        self._source = source
        self._target = target
        self._scratch = scratch
        self._stack = stack

    def move_all(self, *, yes: bool) -> MovedStores:
        """Moves journal and ledger; asks before anything is changed. Raises CliError and ControllerError."""
        if not is_filled(self._source):
            raise NameNotFound(
                f"FROM: there is no journal in {self._source}", "name the folder of --data, as sqlite:///FOLDER"
            )
        begun = self._open(self._source, "source", cluster_id="")
        copy, damaged = copy_journal(begun)
        confirm_change(
            f"move {copy.last_seq:,} entries of cluster {copy.cluster_id} from {begun.path} to {self._target}", yes=yes
        )
        ended = self._open(self._target, "target", cluster_id=copy.cluster_id, above=copy.epoch)
        source = self._open_source_ledger(begun)
        ledger = None if source is None else copy_ledger(source, self._open_ledger(ended, self._target, "target"))
        journal = move_journal(begun, ended, copy, damaged=damaged)
        if source is not None and ledger is not None:
            source.mark_moved(ledger.target)
        return MovedStores(str(ended.path), journal, ledger)

    def move_ledger_alone(self, *, yes: bool) -> MovedStores:
        """Moves the ledger to where the journal is already. Raises CliError and ControllerError."""
        # Before anything is made there.
        source = self._open_source_ledger(self._hold(self._source, "source")) if self._has_file() else None
        if source is None:
            raise NameNotFound(
                f"FROM: there is no energy ledger in {self._source}", "name the folder of --data, as sqlite:///FOLDER"
            )
        confirm_change(f"move the energy ledger from {source.path} to {self._target}", yes=yes)
        ended = self._open_ledger(self._hold(self._target, "target"), self._target, "target")
        ledger = copy_ledger(source, ended)
        source.mark_moved(ledger.target)
        return MovedStores(ledger.target, None, ledger)

    def _open(self, url: str, name: str, *, cluster_id: str, above: int = 0) -> AuditedJournal:
        journal = open_store(
            url, self._scratch / name, new_cluster_id=cluster_id, address=_ADDRESS, above=above, wait_s=0.0
        )
        self._stack.callback(journal.close)
        return journal

    def _hold(self, url: str, name: str) -> AuditedJournal | None:
        """Keeps controllers out: of a folder by its lock, whatever became of its journal, of a database by its term."""
        folder = sqlite_folder(url)
        if folder is None:
            return self._open(url, name, cluster_id=str(uuid.uuid4()))
        hold_directory(folder, self._stack)
        return None

    def _open_source_ledger(self, journal: AuditedJournal | None) -> LedgerStore | None:
        """The ledger of the source; None where there is none."""
        if not self._has_file():
            return None
        store = self._open_ledger(journal, self._source, "source")
        return store if store.revision else None

    def _has_file(self) -> bool:
        """Whether the source may have a ledger: a folder's file is there, and a database is asked when it is opened."""
        folder = sqlite_folder(self._source)
        return folder is None or (folder / FILE_NAME).exists()

    def _open_ledger(self, journal: AuditedJournal | None, url: str, name: str) -> LedgerStore:
        folder = sqlite_folder(url)
        if folder is not None:
            store = open_ledger(folder)
        else:
            assert journal is not None
            store = open_ledger_with(journal, url, self._scratch / name)
        self._stack.callback(store.close)
        return store
