"""The journal of changed power settings: a file that is whole after any crash.

PowerJournalError             the journal is unreliable, so nothing may be changed
├── PowerJournalCorrupt       the file is not a journal; it is set aside and nothing is guessed
└── PowerJournalUnwritable    it cannot be written
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from eelgrid_agent.enforce.guard.events import DeviceRecord, DriverOrigin
from eelgrid_agent.state_files import replace_file, set_file_aside

_SCHEMA = 1
# A record is under 1 kB and a node has 64 devices at most.
_BYTES_MOST = 262_144
_RECORDS_MOST = 256


class PowerJournalError(Exception):
    """The journal cannot be relied on."""


class PowerJournalCorrupt(PowerJournalError):
    """The file is no journal; it was kept aside."""


class PowerJournalUnwritable(PowerJournalError):
    """The journal cannot be read or written at all."""


class PowerJournal(Protocol):
    """Keeps the records of the devices that are changed."""

    def load(self) -> tuple[DeviceRecord, ...]:
        """What was stored last; nothing where nothing ever was. Raises JournalError."""

    def store(self, records: tuple[DeviceRecord, ...]) -> None:
        """Keeps exactly these; they are on the disk when this returns. Raises JournalError."""


class MemoryPowerJournal:
    """The journal of simulated devices, which end with the process as it does."""

    def __init__(self) -> None:
        self._records: tuple[DeviceRecord, ...] = ()

    def load(self) -> tuple[DeviceRecord, ...]:
        """The records."""
        return self._records

    def store(self, records: tuple[DeviceRecord, ...]) -> None:
        """Replaces them."""
        self._records = records


class FilePowerJournal:
    """The journal in one file of the state directory, which must exist."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def load(self) -> tuple[DeviceRecord, ...]:
        """The records; a file that cannot be understood is moved aside first, so that the next start is clean."""
        try:
            with self._path.open("rb") as file:
                raw = file.read(_BYTES_MOST + 1)
        except FileNotFoundError:
            return ()
        except OSError as error:
            raise PowerJournalUnwritable(f"{self._path}: {error.strerror}; make it readable for the agent") from error
        try:
            return _decode_records(raw)
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            aside = self._set_aside()
            raise PowerJournalCorrupt(
                f"{self._path} is no settings journal ({error}); it was kept as {aside}: see in it which devices were "
                f"changed, put their limits back by hand (nvidia-smi -pl, -rgc), then start the agent again"
            ) from error

    def store(self, records: tuple[DeviceRecord, ...]) -> None:
        """Replaces the file."""
        body = json.dumps({"schema": _SCHEMA, "devices": [_plain(record) for record in records]}, indent=1)
        try:
            replace_file(self._path, f"{body}\n".encode())
        except OSError as error:
            raise PowerJournalUnwritable(
                f"{self._path}: {error.strerror}; make room and let the agent write there: nothing is set without it"
            ) from error

    def _set_aside(self) -> Path:
        try:
            return set_file_aside(self._path)
        except OSError as error:
            raise PowerJournalUnwritable(
                f"{self._path} is corrupt, and {error.strerror}; move it away by hand"
            ) from error


def _plain(record: DeviceRecord) -> dict[str, Any]:
    return {
        "gpu_uuid": record.gpu_uuid,
        "boot_id": record.origin.boot_id,
        "driver_start": record.origin.driver_start,
        "found_w": record.found_w,
        "found_profile": record.found_profile,
        "limits_w": list(record.limits_w),
        "clocks": None if record.clocks is None else list(record.clocks),
        "profiles": list(record.profiles),
    }


def _decode_records(raw: bytes) -> tuple[DeviceRecord, ...]:
    if len(raw) > _BYTES_MOST:
        raise ValueError(f"it is longer than {_BYTES_MOST} bytes")
    document = json.loads(raw)
    if not isinstance(document, dict) or document.get("schema") != _SCHEMA:
        raise ValueError(f"its schema is not {_SCHEMA}")
    devices = document["devices"]
    if not isinstance(devices, list) or len(devices) > _RECORDS_MOST:
        raise ValueError(f"devices is no list of at most {_RECORDS_MOST}")
    records = tuple(_record(device) for device in devices)
    if len({record.gpu_uuid for record in records}) < len(records):
        raise ValueError("a device is listed twice")
    return records


def _record(plain: Any) -> DeviceRecord:
    if not isinstance(plain, Mapping):
        raise TypeError("a device is no mapping")
    lock = plain["clocks"]
    clocks = None if lock is None else tuple(_whole(clock) for clock in lock)
    if clocks is not None and len(clocks) != 2:
        raise ValueError("clocks is no pair")
    return DeviceRecord(
        gpu_uuid=_text(plain["gpu_uuid"]),
        origin=DriverOrigin(boot_id=_text(plain["boot_id"]), driver_start=_text(plain["driver_start"])),
        found_w=None if plain["found_w"] is None else _watts(plain["found_w"]),
        found_profile=None if plain["found_profile"] is None else _whole(plain["found_profile"]),
        limits_w=tuple(_watts(limit) for limit in plain["limits_w"]),
        clocks=None if clocks is None else (clocks[0], clocks[1]),
        profiles=tuple(_whole(profile) for profile in plain["profiles"]),
    )


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is no text")
    return value


def _whole(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise TypeError(f"{value!r} is no whole number")
    return value


def _watts(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0.0:
        raise TypeError(f"{value!r} is no power")
    return float(value)
