"""The way to the disk: in place or in a thread, by how quick the disk has been."""

import threading

from tests.builders.server import MemoryJournal

from eelgrid_controller.clock import Clock
from eelgrid_controller.runtime.journal_writer import JournalWriter


class _Journal(MemoryJournal):
    """Notes the thread of each commit, and takes the seconds it is told on a clock of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.threads: list[bool] = []
        self.now_s = 0.0
        self.takes_s = 0.001

    def append(self, entries):
        self.threads.append(threading.current_thread() is not threading.main_thread())
        self.now_s += self.takes_s
        return super().append(entries)


async def _commits(writer: JournalWriter, count: int) -> None:
    for _ in range(count):
        await writer.append(())


async def test_a_disk_is_waited_for_in_place_once_it_was_quick_three_times() -> None:
    journal = _Journal()
    writer = JournalWriter(journal, Clock(perf_s=lambda: journal.now_s))
    await _commits(writer, 5)
    assert journal.threads == [True, True, True, False, False]
    writer.close()


async def test_a_slow_commit_sends_the_next_ones_to_the_thread() -> None:
    journal = _Journal()
    writer = JournalWriter(journal, Clock(perf_s=lambda: journal.now_s))
    await _commits(writer, 4)
    journal.takes_s = 0.2
    await _commits(writer, 3)
    journal.takes_s = 0.001
    await _commits(writer, 5)
    assert journal.threads[4:] == [False, True, True, True, True, True, False, False]
    writer.close()
