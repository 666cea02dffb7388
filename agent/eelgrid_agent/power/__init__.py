"""Power settings carried out: the guard's orders on a real device, and the journal that outlives a crash.

Owns the calls and the file. Must not decide what is set: the guard does.
"""

from eelgrid_agent.power.enforcer import Enforcer
from eelgrid_agent.power.journal import (
    FileJournal,
    JournalCorrupt,
    JournalError,
    JournalUnwritable,
    MemoryJournal,
    SettingsJournal,
)  # fmt: skip
from eelgrid_agent.power.origin import machine_origin

__all__ = [
    "Enforcer", "FileJournal", "JournalCorrupt", "JournalError", "JournalUnwritable", "MemoryJournal",
    "SettingsJournal", "machine_origin",
]  # fmt: skip
