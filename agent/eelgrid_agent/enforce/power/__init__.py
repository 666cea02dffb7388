"""Execution of power settings on devices, and the journal that survives a crash."""

from eelgrid_agent.enforce.power.executor import PowerExecutor, read_driver_origin
from eelgrid_agent.enforce.power.journal import (
    FilePowerJournal,
    MemoryPowerJournal,
    PowerJournal,
    PowerJournalCorrupt,
    PowerJournalError,
    PowerJournalUnwritable,
)

__all__ = [
    "FilePowerJournal",
    "MemoryPowerJournal",
    "PowerExecutor",
    "PowerJournal",
    "PowerJournalCorrupt",
    "PowerJournalError",
    "PowerJournalUnwritable",
    "read_driver_origin",
]
