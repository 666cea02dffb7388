"""Common parts of the simulated fault worlds: crash points of an agent, durable storage, and results of many seeds.

Theory: an agent's process may end before and after every write to a device and to the disk, and nowhere else can a
death be told from one there. So each write is two crash points; a schedule that is run once counts them, and then an
agent dies at each. What is stored is whole or not at all, since files are replaced by a rename. Everything is drawn
from a seed, so that a failure's seed brings it again.

The worlds themselves (layouts, power, both at once) say what happens and what must hold.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

NEVER = -1
_FAILURES_KEPT = 5

_R = TypeVar("_R")


class Crash(BaseException):
    """The agent's process ends here: no handler of the agent may catch it."""


@dataclass
class CrashPoints:
    """Counts the moments at which a process may die, and ends it from one of them on."""

    # The number of moments that are survived; NEVER is all of them.
    at: int = NEVER
    passed: int = 0
    names: list[str] = field(default_factory=list)

    def __call__(self, name: str = "") -> None:
        """One moment. Raises Crash if the process ends here."""
        self.names.append(name)
        self.passed += 1
        if 0 <= self.at < self.passed:
            raise Crash(name)

    def arm(self, moments: int) -> None:
        """From now on so many moments are survived."""
        self.at = self.passed + moments

    @property
    def is_armed(self) -> bool:
        """Whether a moment will be the last."""
        return self.at != NEVER

    def disarm(self) -> None:
        """Nothing ends the process any more."""
        self.at = NEVER


class MemoryJournal(Generic[_R]):
    """A journal of records that outlives agents; a crash comes before or after a write, never within."""

    def __init__(self, moment: Callable[[str], None], *, unwritable: type[Exception] = OSError) -> None:
        """`unwritable` is what a full disk raises in the journal's place."""
        self.hook = moment
        self.records: tuple[_R, ...] = ()
        self.is_full = False
        self.stores = 0
        self._unwritable = unwritable

    def load(self) -> tuple[_R, ...]:
        """What was stored last."""
        return self.records

    def store(self, records: Iterable[_R]) -> None:
        """Keeps these, unless the disk is full."""
        kept = tuple(records)
        self.hook("before store")
        if self.is_full:
            raise self._unwritable("the disk is full; make room")
        self.stores += 1
        self.records = kept
        self.hook("after store")


@dataclass
class Tally:
    """What a check found."""

    cases: int = 0
    failures: int = 0
    first: list[str] = field(default_factory=list)

    def count(self, problem: str) -> None:
        """One case, and what was wrong with it."""
        self.cases += 1
        if problem:
            self.failures += 1
            if len(self.first) < _FAILURES_KEPT:
                self.first.append(problem)


def tally_seeds(run: Callable[[int], str | None], seed: int, count: int) -> Tally:
    """Runs the schedules of so many seeds; each returns its problem, or raises it as an AssertionError."""
    tally = Tally()
    for number in range(seed, seed + count):
        try:
            problem = run(number) or ""
        except AssertionError as broken:
            problem = str(broken) or "a promise was broken"
        tally.count(problem and f"seed {number}: {problem.removeprefix(f'seed {number}: ')}")
    return tally
