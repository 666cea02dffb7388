"""The journal port, and how values are encoded in journal entries and checkpoints.

`Journal` is the durable storage that the event loop needs. Entry number n is the event that led from revision n - 1
of the state to n, so the journal's last number and the state's revision are one number, and a gap, a repetition or a
lost tail is detected. Explanations are stored as compact rows. `JournalSanitizer` brings values that an older version
accepted inside the rules of this one, and records what it changed. Must not know files or databases.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeVar

from eelgrid_controller.errors import LostEntries, StoreLocation
from eelgrid_protos.messages import (
    AuditEntry,
    Candidate,
    CostTerm,
    LeaderTerm,
    Removal,
    ReplicaExplanation,
    Workload,
)
from eelgrid_protos.plain_messages import from_plain
from eelgrid_protos.quantities import PLAN_EPOCH_MOST, Text
from eelgrid_protos.schema import fields_of, is_valid_message, list_violations, repair_message, repair_text


@dataclass(frozen=True, slots=True)
class JournalEntry:
    """One event as the journal stores it."""

    kind: str
    body: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The whole state after entry `seq`."""

    seq: int
    state: Mapping[str, Any]
    digest: str


class CheckpointRow(NamedTuple):
    """A checkpoint as it is stored: its state as compressed JSON."""

    seq: int
    body: bytes
    digest: str
    crc32: int


@dataclass(frozen=True, slots=True)
class JournalHistory:
    """The oldest stored state, None for the empty initial one, and every entry since with its number."""

    checkpoint: Checkpoint | None
    entries: tuple[tuple[int, JournalEntry], ...]


@dataclass(frozen=True, slots=True)
class JournalCopy:
    """All that one journal holds, for another: its cluster and epoch, its newest checkpoint, and who asked for what."""

    cluster_id: str
    epoch: int
    history: JournalHistory
    checkpoint: Checkpoint | None
    audited: tuple[AuditEntry, ...] = ()
    timeline: int = 0

    @property
    def last_seq(self) -> int:
        """Number of the last entry."""
        before = self.history.checkpoint.seq if self.history.checkpoint else 0
        return self.history.entries[-1][0] if self.history.entries else before

    @property
    def checkpoints(self) -> tuple[Checkpoint, ...]:
        """The one that entries follow and the newest, each once, in order."""
        found = {one.seq: one for one in (self.history.checkpoint, self.checkpoint) if one is not None}
        return tuple(found[seq] for seq in sorted(found))


@dataclass(slots=True)
class JournalCounters:
    """Counters of the journal since it was opened."""

    commits: int = 0
    entries: int = 0
    bytes_written: int = 0
    checkpoints: int = 0
    checkpoint_bytes: int = 0


class Journal(Protocol):
    """A durable, ordered journal with one writer; a method that raises has changed nothing."""

    @property
    def path(self) -> StoreLocation:
        """The file or the database, for messages."""

    @property
    def is_remote(self) -> bool:
        """Whether a commit may wait for another machine, so that the event loop must never wait for it itself."""

    @property
    def counters(self) -> JournalCounters:
        """Counters since the journal was opened."""

    @property
    def lost(self) -> LostEntries | None:
        """Acknowledged entries that are gone, if an operator accepted the loss; None after the next append."""

    @property
    def term(self) -> LeaderTerm:
        """That of this writer, by which agents know it from earlier ones."""

    @property
    def may_lead(self) -> bool:
        """Whether decisions may be taken and told now, as far as this process knows."""

    @property
    def lease_age_s(self) -> float:
        """Seconds since it was last confirmed that this writer leads; 0 where no other can."""

    def raise_term(self, above: LeaderTerm) -> LeaderTerm:
        """Makes this writer's term higher than that, and returns it; raises JournalFenced if another leads."""

    def append(self, entries: Sequence[JournalEntry], audited: Sequence[AuditEntry] = ()) -> int:
        """Appends all entries or none, with entries of the audit log; returns the number of the last entry."""

    def newest_checkpoint(self) -> Checkpoint | None:
        """Returns the newest checkpoint, verified; None before the first."""

    def entries_after(self, seq: int) -> Iterator[tuple[int, JournalEntry]]:
        """Yields every entry after `seq`, in order and verified."""

    def read_history(self) -> JournalHistory:
        """Returns everything that is stored, verified; any thread may call it at any time."""

    def write_checkpoint(self, checkpoint: Checkpoint | CheckpointRow) -> None:
        """Stores a checkpoint, and deletes what two checkpoints have made unnecessary."""

    def check_files(self) -> None:
        """Raises JournalGone or JournalFenced if what is written is no longer what a restart would read."""

    def probe(self) -> None:
        """Checks that writing works; raises JournalFull or JournalUnavailable."""

    def close(self) -> None:
        """Closes the file or the connections."""


def checkpoint_removal_command(path: StoreLocation, seq: int) -> str:
    """Returns the shell command that removes one checkpoint."""
    if isinstance(path, str):
        return f"psql {path} -c 'DELETE FROM eelgrid.checkpoints WHERE seq={seq}'"  # noqa: S608  # shown, never run
    return f"sqlite3 {path} 'DELETE FROM checkpoints WHERE seq={seq}'"  # noqa: S608  # shown, never run


def entry_removal_command(path: StoreLocation, seq: int) -> str:
    """Returns the shell command that removes an entry and all after it."""
    if isinstance(path, str):
        return f"psql {path} -c 'DELETE FROM eelgrid.journal WHERE seq>={seq}'"  # noqa: S608  # shown, never run
    return f"sqlite3 {path} 'DELETE FROM events WHERE seq>={seq}'"  # noqa: S608  # shown, never run


# As JSON that is the same for equal values, of which digests are taken.
encode_canonically = json.JSONEncoder(sort_keys=True, separators=(",", ":")).encode


def digest_of(state: Mapping[str, Any]) -> str:
    """Computes a hash of a dumped state, independent of the order of its keys."""
    return hashlib.sha256(encode_canonically(state).encode()).hexdigest()


def encode_explanation(explanation: tuple[ReplicaExplanation, ...]) -> list[Any]:
    """Encodes an explanation as rows; all candidates of a replica have the same terms in the same order."""
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
    """Decodes an explanation from rows; raises ValueError."""
    try:
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
                        terms=tuple(CostTerm(name=name, cost_w=w) for name, w in zip(names, terms_w, strict=True)),
                    )
                    for node_name, indexes, cost_w, terms_w in candidates
                ),
            )
            for replica, feasible, removals, names, candidates in rows
        )
    except (TypeError, IndexError) as error:
        raise ValueError(f"an explanation cannot be read: {error}") from error


_Message = TypeVar("_Message")

_LINES_MOST = 100


def _identifier_rule() -> Text:
    (rule,) = (entry.shape.rule for entry in fields_of(Workload) if entry.name == "workload_id")
    assert isinstance(rule, Text)
    return rule


_IDENTIFIER = _identifier_rule()


@dataclass(slots=True)
class JournalSanitizer:
    """Reads values of older versions; `lines` says what it changed, each thing once."""

    lines: list[str] = field(default_factory=list)
    count: int = 0

    def _record_line(self, line: str) -> None:
        if line not in self.lines:
            self.count += 1
            if len(self.lines) < _LINES_MOST:
                self.lines.append(line)

    def message(self, message: _Message) -> _Message:
        """Returns the message with every value inside the rules."""
        if is_valid_message(message):
            return message
        healed = repair_message(message)
        for found in list_violations(message):
            self._record_line(f"{type(message).__name__}: {found.field} {found.problem}")
        if (raw := getattr(message, "workload_id", None)) is not None:
            self.identifier(raw)
        return healed

    def read(self, cls: type[_Message], plain: Mapping[str, Any]) -> _Message:
        """Reads a message of a checkpoint; raises InvalidMessage."""
        return self.message(from_plain(cls, plain, trusted=True))

    def identifier(self, raw: str) -> str:
        """Returns the identifier inside the rules."""
        healed = repair_text(raw, _IDENTIFIER)
        if healed != raw:
            self._record_line(f"the name {raw[:200]!r} is {healed!r} now")
        return healed

    def epoch(self, node_name: str, epoch: int) -> int:
        """Returns a node's plan epoch; 0 for one that cannot have been sent to an agent."""
        if epoch < PLAN_EPOCH_MOST:
            return epoch
        self._record_line(f"the plan epoch of node {node_name} was {epoch}, which is no agent's; it begins anew")
        return 0


def omit_defaults(plain: dict[str, Any], message: object, names: Iterable[str]) -> None:
    """Leaves fields out that have no value: older versions do not know them."""
    for name in names:
        if not getattr(message, name):
            plain.pop(name, None)
