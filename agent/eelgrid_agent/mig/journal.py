"""What the agent remembers of MIG over a crash: a small file that is whole or not there.

Owns the file's format and how it is written. Must not know what the record is
for. The file is replaced as a whole: written beside itself, flushed to the
disk, renamed, and the directory flushed, so that a reader finds the old one or
the new one and never half of either.

JournalError             the journal cannot be relied on, so nothing may be changed
├── JournalCorrupt       the file is no journal; it is kept aside and nothing is guessed from it
└── JournalUnwritable    the disk takes no more, or this user may not write
"""

import json
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

from eelgrid_agent.durable_file import replace_file, set_aside
from eelgrid_agent.mig.layout import Layout, Part
from eelgrid_agent.mig.transition import GpuRecord, Intent, Lease, Origin, Phase

__all__ = [
    "FileJournal",
    "Journal",
    "JournalCorrupt",
    "JournalError",
    "JournalUnwritable",
    "MemoryJournal",
    "decode",
    "encode",
]

_SCHEMA = 1
# A node of 64 devices with every span ever used is under half of this.
_BYTES_MOST = 4 * 2**20


class JournalError(Exception):
    """The journal cannot be relied on."""


class JournalCorrupt(JournalError):
    """The file is no journal."""


class JournalUnwritable(JournalError):
    """The journal cannot be written."""


class Journal(Protocol):
    """Where records are kept."""

    def load(self) -> tuple[GpuRecord, ...]:
        """What was stored last; nothing where nothing ever was. Raises JournalError."""

    def store(self, records: Iterable[GpuRecord]) -> None:
        """Keeps these in place of what was kept; on return they survive a power cut. Raises JournalUnwritable."""


class MemoryJournal:
    """A journal that ends with the process: for simulated devices, which end with it too, and where nothing is enforced."""

    def __init__(self) -> None:
        self._records: tuple[GpuRecord, ...] = ()

    def load(self) -> tuple[GpuRecord, ...]:
        """What was stored last."""
        return self._records

    def store(self, records: Iterable[GpuRecord]) -> None:
        """Keeps these."""
        self._records = tuple(records)


class FileJournal:
    """A journal in a file of the agent's state directory."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def load(self) -> tuple[GpuRecord, ...]:
        """What was stored last; a file that is no journal is moved aside, once, and JournalCorrupt says where."""
        try:
            with self._path.open("rb") as file:
                content = file.read(_BYTES_MOST + 1)
        except FileNotFoundError:
            return ()
        except OSError as error:
            raise JournalError(f"{self._path}: {error.strerror}; let the agent read it") from error
        try:
            return decode(content)
        except JournalCorrupt as corrupt:
            aside = self._set_aside()
            remedy = f"it is kept as {aside}; put back a good one, or restart the agent to adopt what stands"
            raise JournalCorrupt(f"{self._path}: {corrupt}; {remedy}") from None

    def store(self, records: Iterable[GpuRecord]) -> None:
        """Replaces the file."""
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(self._path, encode(records))
        except OSError as error:
            detail = f"{self._path}: {error.strerror}; make room and let the agent write it: nothing is changed before"
            raise JournalUnwritable(detail) from error

    def _set_aside(self) -> Path:
        try:
            return set_aside(self._path)
        except OSError as error:
            raise JournalCorrupt(f"{self._path}: is no journal, and {error.strerror}; remove it") from error


def encode(records: Iterable[GpuRecord]) -> bytes:
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


def decode(content: bytes) -> tuple[GpuRecord, ...]:
    """The records in a file's content; raises JournalCorrupt."""
    if len(content) > _BYTES_MOST:
        raise JournalCorrupt(f"has more than {_BYTES_MOST} bytes")
    try:
        document = json.loads(content)
    except ValueError as error:
        raise JournalCorrupt(f"is no JSON: {error}") from error
    if not isinstance(document, dict) or document.get("schema") != _SCHEMA:
        schema = document.get("schema") if isinstance(document, dict) else None
        raise JournalCorrupt(f"has schema {schema!r} and this version reads {_SCHEMA}")
    # A digit that flipped on the disk must not decide which instance is whose.
    if document.get("crc32") != _checksum(document.get("gpus")):
        raise JournalCorrupt("does not have the checksum that it was written with")
    try:
        return tuple(_record_in(fields) for fields in document["gpus"])
    except (KeyError, TypeError, ValueError) as error:
        raise JournalCorrupt(f"a record is not as this version writes it: {error!r}") from error


def _checksum(gpus: object) -> int:
    return zlib.crc32(json.dumps(gpus, sort_keys=True).encode())


def _layout_out(layout: Layout | None) -> dict[str, Any] | None:
    if layout is None:
        return None
    parts = [[part.profile_id, part.start, part.size, list(part.compute)] for part in layout.parts]
    return {"mig_enabled": layout.mig_enabled, "parts": parts}


def _layout_in(fields: Mapping[str, Any]) -> Layout:
    parts = tuple(
        Part(
            profile_id=_number(profile_id),
            start=_number(start),
            size=_number(size),
            compute=tuple(map(_number, compute)),
        )
        for profile_id, start, size, compute in fields["parts"]
    )
    return Layout(mig_enabled=_truth(fields["mig_enabled"]), parts=parts)


def _record_in(fields: Mapping[str, Any]) -> GpuRecord:
    intent, target = fields["intent"], fields["target"]
    return GpuRecord(
        uuid=_text(fields["uuid"]),
        boot_id=_text(fields["boot_id"]),
        target=None if target is None else _layout_in(target),
        intent=None
        if intent is None
        else Intent(
            phase=Phase(intent["phase"]),
            before=_layout_in(intent["before"]),
            wanted=_layout_in(intent["wanted"]),
            tries=_number(intent["tries"]),
        ),
        known={(_number(profile), _number(start)): Origin(origin) for profile, start, origin in fields["known"]},
        generations={(_number(start), _number(size)): _number(n) for start, size, n in fields["generations"]},
        leases=frozenset(Lease(uuid=_text(uuid), generation=_number(n)) for uuid, n in fields["leases"]),
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
