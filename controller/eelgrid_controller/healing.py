"""What an older version let into the journal, brought inside the rules of this one.

Owns which values are changed, and into what. Must not know journals or answers.

Theory. The journal is never rewritten: an entry is healed each time that it is read. So what
it becomes may depend on nothing but the entry. A name becomes the same other name wherever it
stands, in an event or in a checkpoint, and keeps what told it apart by a hash; events that
came after, which have the new name, follow. What was healed is told as lines for a log.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from eelgrid_protos.messages import Workload
from eelgrid_protos.plain import from_plain
from eelgrid_protos.quantities import PLAN_EPOCH_MOST, Text
from eelgrid_protos.salvage import repair, repaired_text
from eelgrid_protos.schema import fields_of, obeys, violations_of

__all__ = ["Healer"]

_Message = TypeVar("_Message")

_LINES_MOST = 100


def _identifier_rule() -> Text:
    (rule,) = (entry.shape.rule for entry in fields_of(Workload) if entry.name == "workload_id")
    assert isinstance(rule, Text)
    return rule


_IDENTIFIER = _identifier_rule()


@dataclass(slots=True)
class Healer:
    """Reads what a journal holds; `lines` says what was other than it is now, each thing once."""

    lines: list[str] = field(default_factory=list)
    count: int = 0

    def _say(self, line: str) -> None:
        if line not in self.lines:
            self.count += 1
            if len(self.lines) < _LINES_MOST:
                self.lines.append(line)

    def message(self, message: _Message) -> _Message:
        """The message inside the rules."""
        if obeys(message):
            return message
        healed = repair(message)
        for found in violations_of(message):
            self._say(f"{type(message).__name__}: {found.field} {found.problem}")
        if (raw := getattr(message, "workload_id", None)) is not None:
            self.identifier(raw)
        return healed

    def read(self, cls: type[_Message], plain: Mapping[str, Any]) -> _Message:
        """A message of a checkpoint; raises InvalidMessage where it is none."""
        return self.message(from_plain(cls, plain, trusted=True))

    def identifier(self, raw: str) -> str:
        """The name that an identifier has now."""
        healed = repaired_text(raw, _IDENTIFIER)
        if healed != raw:
            self._say(f"the name {raw[:200]!r} is {healed!r} now")
        return healed

    def epoch(self, node_name: str, epoch: int) -> int:
        """A node's plan epoch; 0 for one that no agent can have been given, since nothing can be sent under it."""
        if epoch < PLAN_EPOCH_MOST:
            return epoch
        self._say(f"the plan epoch of node {node_name} was {epoch}, which is no agent's; it begins anew")
        return 0
