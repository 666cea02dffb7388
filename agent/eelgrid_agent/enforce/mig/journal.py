"""The MIG journal: device records on disk and in memory, whole after any crash.

A change is stored before it is visible, so a journal that cannot be written stops the step that needs it.

MigJournalError             the journal is unreliable, so nothing may be changed
├── MigJournalCorrupt       the file is not a journal; it is set aside and nothing is guessed
└── MigJournalUnwritable    the disk is full or this user may not write
"""

import json
import threading
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

from eelgrid_agent.enforce.mig.layout import InstancePart, MigLayout
from eelgrid_agent.enforce.mig.transition import InstanceOrigin, MigLease, MigRecord, TransitionIntent, TransitionPhase
from eelgrid_agent.state_files import replace_file, set_file_aside

_SCHEMA = 1
# A node of 64 devices with every span ever used is under half of this.
_BYTES_MOST = 4 * 2**20


class MigJournalError(Exception):
    """The journal cannot be relied on."""


class MigJournalCorrupt(MigJournalError):
    """The file is no journal."""


class MigJournalUnwritable(MigJournalError):
    """The journal cannot be written."""


class MigJournal(Protocol):
    """Where records are kept."""

    def load(self) -> tuple[MigRecord, ...]:
        """What was stored last; nothing where nothing ever was. Raises JournalError."""

    def store(self, records: Iterable[MigRecord]) -> None:
        """Keeps these in place of what was kept; on return they survive a power cut. Raises JournalUnwritable."""


class MemoryMigJournal:
    """A journal that ends with the process: for simulated devices, which end with it too, and where nothing is enforced."""

    def __init__(self) -> None:
        self._records: tuple[MigRecord, ...] = ()

    def load(self) -> tuple[MigRecord, ...]:
        """What was stored last."""
        return self._records

    def store(self, records: Iterable[MigRecord]) -> None:
        """Keeps these."""
        self._records = tuple(records)


class FileMigJournal:
    """A journal in a file of the agent's state directory."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def load(self) -> tuple[MigRecord, ...]:
        """What was stored last; a file that is no journal is moved aside, once, and JournalCorrupt says where."""
        try:
            with self._path.open("rb") as file:
                content = file.read(_BYTES_MOST + 1)
        except FileNotFoundError:
            return ()
        except OSError as error:
            raise MigJournalError(f"{self._path}: {error.strerror}; let the agent read it") from error
        try:
            return decode_records(content)
        except MigJournalCorrupt as corrupt:
            aside = self._set_aside()
            remedy = f"it is kept as {aside}; put back a good one, or restart the agent to adopt what stands"
            raise MigJournalCorrupt(f"{self._path}: {corrupt}; {remedy}") from None

    def store(self, records: Iterable[MigRecord]) -> None:
        """Replaces the file."""
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(self._path, encode_records(records))
        except OSError as error:
            detail = f"{self._path}: {error.strerror}; make room and let the agent write it: nothing is changed before"
            raise MigJournalUnwritable(detail) from error

    def _set_aside(self) -> Path:
        try:
            return set_file_aside(self._path)
        except OSError as error:
            raise MigJournalCorrupt(f"{self._path}: is no journal, and {error.strerror}; remove it") from error


def encode_records(records: Iterable[MigRecord]) -> bytes:
    """The file's content."""
    gpus = [
        {
            "uuid": record.uuid,
            "boot_id": record.boot_id,
            "target": _layout_out(record.target),
            "intent": None
            if record.intent is None
            else {
                "phase": record.intent.phase.value,
                "before": _layout_out(record.intent.before),
                "wanted": _layout_out(record.intent.wanted),
                "tries": record.intent.tries,
            },
            "known": [[*place, origin.value] for place, origin in sorted(record.known.items())],
            "generations": [[*span, count] for span, count in sorted(record.generations.items())],
            "leases": sorted([lease.uuid, lease.generation] for lease in record.leases),
            "repairs": record.repairs,
            "gave_up": record.gave_up,
        }
        for record in records
    ]
    return (json.dumps({"schema": _SCHEMA, "crc32": _checksum(gpus), "gpus": gpus}, indent=1) + "\n").encode()


def decode_records(content: bytes) -> tuple[MigRecord, ...]:
    """The records in a file's content; raises JournalCorrupt."""
    if len(content) > _BYTES_MOST:
        raise MigJournalCorrupt(f"has more than {_BYTES_MOST} bytes")
    try:
        document = json.loads(content)
    except ValueError as error:
        raise MigJournalCorrupt(f"is no JSON: {error}") from error
    if not isinstance(document, dict) or document.get("schema") != _SCHEMA:
        schema = document.get("schema") if isinstance(document, dict) else None
        raise MigJournalCorrupt(f"has schema {schema!r} and this version reads {_SCHEMA}")
    # A digit that flipped on the disk must not decide which instance is whose.
    if document.get("crc32") != _checksum(document.get("gpus")):
        raise MigJournalCorrupt("does not have the checksum that it was written with")
    try:
        return tuple(_record_in(fields) for fields in document["gpus"])
    except (KeyError, TypeError, ValueError) as error:
        raise MigJournalCorrupt(f"a record is not as this version writes it: {error!r}") from error


def _checksum(gpus: object) -> int:
    return zlib.crc32(json.dumps(gpus, sort_keys=True).encode())


def _layout_out(layout: MigLayout | None) -> dict[str, Any] | None:
    if layout is None:
        return None
    parts = [[part.profile_id, part.start, part.size, list(part.compute)] for part in layout.parts]
    return {"mig_enabled": layout.mig_enabled, "parts": parts}


def _layout_in(fields: Mapping[str, Any]) -> MigLayout:
    parts = tuple(
        InstancePart(
            profile_id=_number(profile_id),
            start=_number(start),
            size=_number(size),
            compute=tuple(map(_number, compute)),
        )
        for profile_id, start, size, compute in fields["parts"]
    )
    return MigLayout(mig_enabled=_truth(fields["mig_enabled"]), parts=parts)


def _record_in(fields: Mapping[str, Any]) -> MigRecord:
    intent, target = fields["intent"], fields["target"]
    return MigRecord(
        uuid=_text(fields["uuid"]),
        boot_id=_text(fields["boot_id"]),
        target=None if target is None else _layout_in(target),
        intent=None
        if intent is None
        else TransitionIntent(
            phase=TransitionPhase(intent["phase"]),
            before=_layout_in(intent["before"]),
            wanted=_layout_in(intent["wanted"]),
            tries=_number(intent["tries"]),
        ),
        known={
            (_number(profile), _number(start)): InstanceOrigin(origin) for profile, start, origin in fields["known"]
        },
        generations={(_number(start), _number(size)): _number(n) for start, size, n in fields["generations"]},
        leases=frozenset(MigLease(uuid=_text(uuid), generation=_number(n)) for uuid, n in fields["leases"]),
        repairs=_number(fields["repairs"]),
        gave_up=_truth(fields["gave_up"]),
    )


def _number(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise TypeError(f"{value!r} is no count")
    return value


def _truth(value: object) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{value!r} is neither true nor false")
    return value


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is no text")
    return value


class MigRecordStore:
    """What the journal holds."""

    def __init__(self, journal: MigJournal) -> None:
        self._journal = journal
        self._records: dict[str, MigRecord] | None = None
        self._unread: MigJournalError | None = None
        self._lock = threading.Lock()

    def get(self, uuid: str) -> MigRecord:
        """The record of a device; an empty one where none was ever kept. Raises JournalError."""
        with self._lock:
            return self._load_records().get(uuid) or MigRecord(uuid=uuid)

    def put(self, record: MigRecord) -> MigRecord:
        """Keeps a record and returns it; what is already kept costs nothing. Raises JournalError."""
        with self._lock:
            records = self._load_records()
            if records.get(record.uuid) != record:
                after = {**records, record.uuid: record}
                self._journal.store(after.values())
                self._records = after
        return record

    def all(self) -> tuple[MigRecord, ...]:
        """Every record. Raises JournalError."""
        with self._lock:
            return tuple(self._load_records().values())

    def _load_records(self) -> dict[str, MigRecord]:
        if self._unread is not None:
            raise self._unread
        if self._records is None:
            try:
                self._records = {record.uuid: record for record in self._journal.load()}
            except MigJournalError as error:
                self._unread = error
                raise
        return self._records
