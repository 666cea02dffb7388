"""Findings of `eelctl doctor`: one line for what was found, one line for the remedy.

Owns the form of a finding and the exit code of a list of them. Must not know any
check. A finding that is not ok has a remedy. A check that could not be made is
skipped, with the reason and how to enable it: a missing answer never counts as
healthy.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

_NAMES_SHOWN = 3


class FindingStatus(StrEnum):
    """Outcome of a check, the worst first."""

    FAIL = "fail"
    WARN = "warn"
    SKIPPED = "skipped"
    OK = "ok"


@dataclass(frozen=True, slots=True)
class Finding:
    """One check: its name, outcome, what was found and the remedy."""

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
    """Returns a finding that something does not work."""
    return Finding(check, FindingStatus.FAIL, _line(what), _line(remedy))


def report_skipped(check: str, what: str, remedy: str) -> Finding:
    """Returns a finding that the check could not be made; the remedy says how to enable it."""
    return Finding(check, FindingStatus.SKIPPED, _line(what), _line(remedy))


def exit_code(findings: Iterable[Finding]) -> int:
    """Returns 1 if any check failed, else 0, even with warnings and skipped checks."""
    return int(any(finding.status is FindingStatus.FAIL for finding in findings))


def join_names(names: Iterable[str]) -> str:
    """Joins the first names, and says how many more there are."""
    every = list(names)
    more = f" and {len(every) - _NAMES_SHOWN:,} more" if len(every) > _NAMES_SHOWN else ""
    return ", ".join(every[:_NAMES_SHOWN]) + more


def count_noun(count: int, one: str, many: str = "") -> str:
    """Formats a number with its noun, in singular or plural."""
    return f"{count:,} {one if count == 1 else many or one + 's'}"


def _line(text: str) -> str:
    """One line, since messages of others may hold several."""
    return " ".join(text.split())
