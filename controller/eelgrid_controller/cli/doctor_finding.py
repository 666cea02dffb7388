"""What a check of `eelctl doctor` found: one line what, one line what to do.

Owns the form of a finding and the exit code that follows from many. Must not
know any check. A finding that is not ok says what to do; one that is ok has
nothing to add. A check that could not be made is skipped, with the reason and
how to have it made: silence is never taken for health.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

_NAMES_SHOWN = 3


class FindingStatus(StrEnum):
    """How a check ended, the worst first."""

    FAIL = "fail"
    WARN = "warn"
    SKIPPED = "skipped"
    OK = "ok"


@dataclass(frozen=True, slots=True)
class Finding:
    """One check: its name, how it ended, what was seen and what to do."""

    check: str
    status: FindingStatus
    what: str
    remedy: str = ""

    def __post_init__(self) -> None:
        assert (self.status is FindingStatus.OK) == (not self.remedy), (
            f"{self.check}: a remedy if and only if something is up"
        )
        assert "\n" not in self.what + self.remedy, f"{self.check}: one line each"


def report_ok(check: str, what: str) -> Finding:
    """Nothing to do."""
    return Finding(check, FindingStatus.OK, _line(what))


def report_warning(check: str, what: str, remedy: str) -> Finding:
    """Something works less well than it could, or will not work for long."""
    return Finding(check, FindingStatus.WARN, _line(what), _line(remedy))


def report_failure(check: str, what: str, remedy: str) -> Finding:
    """Something does not work."""
    return Finding(check, FindingStatus.FAIL, _line(what), _line(remedy))


def report_skipped(check: str, what: str, remedy: str) -> Finding:
    """The check could not be made; the remedy says how to have it made."""
    return Finding(check, FindingStatus.SKIPPED, _line(what), _line(remedy))


def exit_code(findings: Iterable[Finding]) -> int:
    """1 where any check failed; warnings and checks that were skipped are 0."""
    return int(any(finding.status is FindingStatus.FAIL for finding in findings))


def join_names(names: Iterable[str]) -> str:
    """A few names, and how many more there are."""
    every = list(names)
    more = f" and {len(every) - _NAMES_SHOWN:,} more" if len(every) > _NAMES_SHOWN else ""
    return ", ".join(every[:_NAMES_SHOWN]) + more


def count_noun(count: int, one: str, many: str = "") -> str:
    """A number with its noun."""
    return f"{count:,} {one if count == 1 else many or one + 's'}"


def _line(text: str) -> str:
    """One line, since messages of others may hold several."""
    return " ".join(text.split())
