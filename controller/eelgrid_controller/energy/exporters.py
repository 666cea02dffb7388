"""Exporters of the ledger's rows: their marks, when an hour is settled, and which rows must be kept.

Theory. An exporter confirms hours as of a revision of the ledger, which rises with each transaction. Its mark is the
end of an unbroken interval and only moves forward. Two things could make a mark wrong:

- Hours that are not over everywhere. Nodes report their windows in order, so an hour is settled when each node's
  newest window ends after it; a node that has been silent for `SILENT_S` no longer holds the others back. Later hours
  are refused.
- Hours that change afterwards, since such a node comes back with its spool, or its clock was wrong, or since the export
  was read before another transaction. They are recorded by hour, kept like unexported hours, and reported until the
  exporter confirms a newer revision of them. The mark itself does not go back.
"""

from collections.abc import Iterable
from datetime import UTC, datetime
from typing import NamedTuple

from eelgrid_controller.energy.ledger import HOUR_S
from eelgrid_protos.errors import Violation
from eelgrid_protos.faults import FailedPrecondition, InvalidArgument, ResourceExhausted

EXPORTERS_MOST = 8
# After an hour: what the controller itself tells of work done comes by then.
SETTLING_S = 600
SILENT_S = 24 * 3600


class ChangedHours(NamedTuple):
    """Hours that changed after they were confirmed: how many, the first and the last of them, and when the first did."""

    hours: int
    first_s: int
    last_s: int
    at_s: int


class Exporter(NamedTuple):
    """Has everything from `since_s` to `until_s`, but for what changed."""

    name: str
    since_s: int
    until_s: int
    changed: ChangedHours | None = None

    def lag_s(self, now_s: float) -> float:
        """For how long there has been something that he does not have."""
        return max(0.0, now_s - self.until_s, now_s - self.changed.at_s if self.changed else 0.0)


class ExportClaim(NamedTuple):
    """What an exporter says that he has: these hours, as they stood at a revision."""

    name: str
    begin_s: int
    end_s: int
    revision: int


def parse_export(*, name: str, begin_ns: int, end_ns: int, revision: int) -> ExportClaim:
    """The whole hours within a stretch; raises InvalidArgument."""
    begin_s, end_s = -(-begin_ns // (10**9 * HOUR_S)) * HOUR_S, end_ns // 10**9 // HOUR_S * HOUR_S
    if not name:
        raise InvalidArgument("an export has no exporter", (Violation("name", "is empty", "name the exporter"),))
    if end_s <= begin_s:
        broken = Violation("end_ns", f"is {end_ns}, and no whole hour is between it and begin_ns", "give whole hours")
        raise InvalidArgument("an export has no hours", (broken,))
    return ExportClaim(name, begin_s, end_s, revision)


def settled_s(ends_s: Iterable[float], now_s: float) -> int:
    """Until when hours are settled; `ends_s` are ends of the newest windows of nodes."""
    held_s = min((end_s for end_s in ends_s if end_s >= now_s - SILENT_S), default=now_s)
    return int(min(held_s, now_s - SETTLING_S) // HOUR_S) * HOUR_S


def advance_mark(
    before: Exporter | None, export: ExportClaim, *, settled_s: int, revision: int, others: int
) -> Exporter:
    """The mark after an export is confirmed; `revision` is the ledger's. Raises FailedPrecondition, ResourceExhausted."""
    if export.revision > revision:
        broken = Violation("revision", f"is {export.revision}, the ledger is at {revision}", "export again")
        raise FailedPrecondition("the export is of another ledger, or of one that was put back", (broken,))
    if export.end_s > settled_s:
        broken = Violation(
            "end_ns",
            f"is {_text(export.end_s)}, and hours are settled until {_text(settled_s)}",
            "confirm until then, and the rest when all nodes have told it",
        )
        raise FailedPrecondition("not all nodes have told what they spent by then", (broken,))
    if before is None:
        if others >= EXPORTERS_MOST:
            raise ResourceExhausted(
                f"{others} exporters have marks; remove one that is no more (`eelctl exporters remove NAME`)"
            )
        return Exporter(export.name, export.begin_s, export.end_s)
    if export.begin_s > before.until_s:
        broken = Violation(
            "begin_ns",
            f"is {_text(export.begin_s)}, and {export.name} has rows until {_text(before.until_s)}",
            "export what is between, too, or remove the exporter and begin anew",
        )
        raise FailedPrecondition("there would be a gap", (broken,))
    since_s = min(before.since_s, export.begin_s) if export.end_s >= before.since_s else before.since_s
    return before._replace(since_s=since_s, until_s=max(before.until_s, export.end_s))


def retention_cutoff_s(now_s: int, kept_s: int, span_s: int, untils_s: Iterable[int]) -> int:
    """Rows of `span_s` that begin before it may go by their age: each is old, and all who export have all of it."""
    return min([now_s - kept_s, *(until_s - span_s + 1 for until_s in untils_s)])


def _text(at_s: int) -> str:
    return datetime.fromtimestamp(at_s, UTC).strftime("%Y-%m-%d %H:%M UTC")
