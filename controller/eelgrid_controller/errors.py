"""Errors of the controller itself, in one tree, and of optional libraries; errors of a call are `eelgrid_protos.faults`.

Each message says what went wrong and what to do.
"""

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

# Where a store is: a file, or the address of a database, which never has a password.
StoreLocation: TypeAlias = Path | str


@dataclass(frozen=True, slots=True)
class LostEntries:
    """Acknowledged entries that are gone; `last` is None where nobody can tell how many there were."""

    first: int
    last: int | None


class ControllerError(Exception):
    """What went wrong and what to do about it, in one sentence each."""

    def __init__(self, problem: str, remedy: str) -> None:
        self.problem = problem
        self.remedy = remedy
        super().__init__(f"{problem}; {remedy}")


class ControllerConfigError(ControllerError):
    """An option or a directory that cannot be used."""


class BatchRefused(ControllerError):
    """Samples that contradict the node's inventory; `field` is the one at fault."""

    def __init__(self, field: str, problem: str, remedy: str) -> None:
        self.field = field
        super().__init__(problem, remedy)


class UnknownGeneration(BatchRefused):
    """Columns that follow an inventory which never came."""


class WrongWidth(BatchRefused):
    """Columns that are not one value for each GPU and tick."""


class SequenceJump(BatchRefused):
    """A sequence so far ahead that it can be no gap."""


class LedgerError(ControllerError):
    """The energy ledger cannot be read or written, and placing goes on without it; `path` is its file or database."""

    def __init__(self, path: StoreLocation, problem: str, remedy: str) -> None:
        self.path = path
        super().__init__(f"energy ledger {path}: {problem}", remedy)


class LedgerRefused(LedgerError):
    """Something that was to be written cannot be, or meets rows that are damaged; the disk itself takes more."""


class LedgerMoved(LedgerError):
    """Everything was copied to another database, where the ledger goes on."""

    def __init__(self, path: StoreLocation, target: str) -> None:
        super().__init__(path, f"it was moved to {target}", "start the controller with that one (--database)")


class JournalError(ControllerError):
    """The journal cannot be read or written; `path` is its file or database."""

    def __init__(self, path: StoreLocation, problem: str, remedy: str) -> None:
        self.path = path
        super().__init__(f"journal {path}: {problem}", remedy)


class JournalForeign(JournalError):
    """The file belongs to another program."""


class JournalTooNew(JournalError):
    """A newer version of Eelgrid wrote the file."""


class JournalHeld(JournalError):
    """Another controller has the journal open."""


class JournalCorrupt(JournalError):
    """What is on disk is not what was written; `seq` is the first bad entry, where one can be named."""

    def __init__(self, path: StoreLocation, problem: str, remedy: str, *, seq: int | None = None) -> None:
        self.seq = seq
        super().__init__(path, problem, remedy)


class JournalLost(JournalCorrupt):
    """Entries that were acknowledged are gone; `lost` says which."""

    def __init__(self, path: StoreLocation, problem: str, remedy: str, *, lost: LostEntries) -> None:
        self.lost = lost
        super().__init__(path, problem, remedy, seq=lost.first)


class JournalFull(JournalError):
    """There was no room; nothing of the write remains, and writing may work again later."""


class JournalUnavailable(JournalError):
    """The disk refused otherwise; nothing of the write remains."""


class JournalMoved(JournalError):
    """Everything was copied to another database, where it goes on: two that went on would be two clusters."""

    def __init__(self, path: StoreLocation, target: str) -> None:
        super().__init__(path, f"it was moved to {target}", "start the controller with that one (--database)")


class JournalNotEmpty(JournalError):
    """Something was to be copied into it, but it holds entries already."""

    def __init__(self, path: StoreLocation) -> None:
        super().__init__(
            path, "it holds a journal already", "name an empty one, or take that one away if a copy was interrupted"
        )


class JournalGone(JournalUnavailable):
    """The journal's files were removed or replaced while they were in use."""


class JournalFenced(ControllerError):
    """Another controller leads and writes: this process must end, and nothing of what it was writing remains.

    `leader` is the address of who leads, empty if unknown. Where `is_certain` is false, the connection broke within the
    write before the other took over, and whether it was done could not be read.
    """

    def __init__(
        self, path: StoreLocation, problem: str, remedy: str, *, leader: str = "", is_certain: bool = True
    ) -> None:
        super().__init__(f"journal {path}: {problem}", remedy)
        self.leader = leader
        self.is_certain = is_certain


class LibraryMissing(Exception):
    """An optional library is not installed; the message names it and how to install it."""

    def __init__(self, name: str, purpose: str, install: str) -> None:
        self.name, self.problem = name, f"{purpose} needs {name}, which is not installed"
        self.remedy = f"install it with: pip install {install}"
        super().__init__(f"{self.problem}; {self.remedy}")


def import_library(module: str, purpose: str, install: str) -> Any:
    """Imports a module of an optional library; raises LibraryMissing."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError:
        raise LibraryMissing(module.partition(".")[0], purpose, install) from None
