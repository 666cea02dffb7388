"""Encoding of values in the journal and in checkpoints, and reading of what older versions wrote.

Explanations are stored as compact rows. `JournalSanitizer` brings values that an older version accepted inside the
rules of this one, and records what it changed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from eelgrid_protos.messages import Candidate, CostTerm, Removal, ReplicaExplanation, Workload
from eelgrid_protos.plain_messages import from_plain
from eelgrid_protos.quantities import PLAN_EPOCH_MOST, Text
from eelgrid_protos.salvage import repair_message, repair_text
from eelgrid_protos.schema import fields_of, is_valid_message, list_violations


def encode_explanation(explanation: tuple[ReplicaExplanation, ...]) -> list[Any]:
    """The rows; all candidates of a replica have the same terms in the same order."""
    return [
        [
            found.replica,
            found.feasible_nodes,
            [part for removal in found.removals for part in (removal.constraint, removal.nodes)],
            [term.name for term in found.candidates[0].terms] if found.candidates else [],
            [
                [item.node_name, list(item.gpu_indexes), item.cost_w, [term.cost_w for term in item.terms]]
                for item in found.candidates
            ],
        ]
        for found in explanation
    ]


def decode_explanation(rows: Sequence[Any]) -> tuple[ReplicaExplanation, ...]:
    """The explanation; raises ValueError where the rows are none of ours."""
    try:
        return _read(rows)
    except (TypeError, IndexError) as error:
        raise ValueError(f"an explanation cannot be read: {error}") from error


def _read(rows: Sequence[Any]) -> tuple[ReplicaExplanation, ...]:
    return tuple(
        ReplicaExplanation(
            replica=replica,
            feasible_nodes=feasible,
            removals=tuple(
                Removal(constraint=constraint, nodes=nodes)
                for constraint, nodes in zip(removals[::2], removals[1::2], strict=True)
            ),
            candidates=tuple(
                Candidate(
                    node_name=node_name,
                    gpu_indexes=tuple(indexes),
                    cost_w=cost_w,
                    terms=tuple(
                        CostTerm(name=name, cost_w=term_w) for name, term_w in zip(names, terms_w, strict=True)
                    ),
                )
                for node_name, indexes, cost_w, terms_w in candidates
            ),
        )
        for replica, feasible, removals, names, candidates in rows
    )


_Message = TypeVar("_Message")

_LINES_MOST = 100


def _identifier_rule() -> Text:
    (rule,) = (entry.shape.rule for entry in fields_of(Workload) if entry.name == "workload_id")
    assert isinstance(rule, Text)
    return rule


_IDENTIFIER = _identifier_rule()


@dataclass(slots=True)
class JournalSanitizer:
    """Reads what a journal holds; `lines` says what was other than it is now, each thing once."""

    lines: list[str] = field(default_factory=list)
    count: int = 0

    def _record_line(self, line: str) -> None:
        if line not in self.lines:
            self.count += 1
            if len(self.lines) < _LINES_MOST:
                self.lines.append(line)

    def message(self, message: _Message) -> _Message:
        """The message inside the rules."""
        if is_valid_message(message):
            return message
        healed = repair_message(message)
        for found in list_violations(message):
            self._record_line(f"{type(message).__name__}: {found.field} {found.problem}")
        if (raw := getattr(message, "workload_id", None)) is not None:
            self.identifier(raw)
        return healed

    def read(self, cls: type[_Message], plain: Mapping[str, Any]) -> _Message:
        """A message of a checkpoint; raises InvalidMessage where it is none."""
        return self.message(from_plain(cls, plain, trusted=True))

    def identifier(self, raw: str) -> str:
        """The name that an identifier has now."""
        healed = repair_text(raw, _IDENTIFIER)
        if healed != raw:
            self._record_line(f"the name {raw[:200]!r} is {healed!r} now")
        return healed

    def epoch(self, node_name: str, epoch: int) -> int:
        """A node's plan epoch; 0 for one that no agent can have been given, since nothing can be sent under it."""
        if epoch < PLAN_EPOCH_MOST:
            return epoch
        self._record_line(f"the plan epoch of node {node_name} was {epoch}, which is no agent's; it begins anew")
        return 0
