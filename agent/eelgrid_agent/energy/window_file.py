"""The file in which an agent leaves its windows to the agent after it.

Owns the format and when it is written: soon after a window was closed or acknowledged, in a
thread, since a disk may take its time. Must not know what windows mean. What cannot be
written is told once and tried again: the windows are in memory, and only a crash loses them.
A file that nobody can read is set aside, and an incarnation begins anew.
"""

import asyncio
import json
import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from eelgrid_agent.energy.windows import EnergyOutbox, OutboxState
from eelgrid_agent.state_files import replace_file, set_file_aside
from eelgrid_protos.errors import InvalidMessage
from eelgrid_protos.messages import EnergyWindow
from eelgrid_protos.plain_messages import from_plain, to_plain
from eelgrid_protos.safe_text import escape_text

_LOG = logging.getLogger("eelgrid.agent")
_SCHEMA = 1
# A thousand windows of some 2 kB each, twenty times over.
_BYTES_MOST = 64 * 1024 * 1024
_EVERY_S = 2.0


class WindowFile:
    """One node's windows on disk."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def load(self, *, draw_incarnation: Callable[[], int]) -> OutboxState:
        """What the run before left; a new incarnation where there is nothing, or nothing that can be read."""
        fresh = OutboxState(incarnation=draw_incarnation())
        try:
            raw = self._path.read_bytes()[: _BYTES_MOST + 1]
        except FileNotFoundError:
            return fresh
        except OSError as error:
            _LOG.warning("event=energy_unread path=%s error=%s", self._path, error)
            return fresh
        try:
            return _read(raw)
        except (ValueError, KeyError, TypeError, AttributeError, InvalidMessage) as error:
            try:
                aside = set_file_aside(self._path)
            except OSError:
                aside = self._path
            _LOG.warning("event=energy_unread path=%s error=%r", aside, error)
            return fresh

    def store(self, kept: OutboxState) -> None:
        """On return it is on the disk. Raises OSError."""
        body = {
            "schema": _SCHEMA,
            "incarnation": kept.incarnation,
            "number": kept.number,
            "boot": kept.boot,
            "end_ns": kept.end_ns,
            "offset_ns": kept.offset_ns,
            "counters_j": dict(kept.counters_j),
            "windows": [to_plain(window, brief=True) for window in kept.windows],
        }
        replace_file(self._path, json.dumps(body, separators=(",", ":")).encode())


def _read(raw: bytes) -> OutboxState:
    if len(raw) > _BYTES_MOST:
        raise ValueError("too long")
    body: dict[str, Any] = json.loads(raw)
    if body["schema"] != _SCHEMA:
        raise ValueError(f"schema {body['schema']}")
    counters_j = {str(uuid): float(value) for uuid, value in body["counters_j"].items()}
    if not all(map(math.isfinite, counters_j.values())):
        raise ValueError("counters")
    offset_ns = body.get("offset_ns")
    return OutboxState(
        offset_ns=None if offset_ns is None else int(offset_ns),
        incarnation=int(body["incarnation"]),
        number=int(body["number"]),
        boot=str(body["boot"]),
        end_ns=int(body["end_ns"]),
        counters_j=counters_j,
        windows=tuple(from_plain(EnergyWindow, window) for window in body["windows"]),
    )


async def write_periodically(outbox: EnergyOutbox, file: WindowFile) -> None:
    """Write the outbox down whenever it changed, until cancelled; then its open window is closed and written, too."""
    written, is_told, refused = outbox.windows.changes, False, 0
    try:
        while True:
            await asyncio.sleep(_EVERY_S)
            if outbox.refused != refused:
                _LOG.warning(
                    "event=energy_refused windows=%d reason=%s",
                    outbox.refused - refused,
                    escape_text(outbox.refused_reason),
                )
                refused = outbox.refused
            changes = outbox.windows.changes
            if changes == written:
                continue
            try:
                await asyncio.to_thread(file.store, outbox.state())
            except OSError as error:
                if not is_told:
                    _LOG.warning("event=energy_unwritten error=%s action=again", error)
                is_told = True
            else:
                written, is_told = changes, False
    finally:
        outbox.close()
        try:
            file.store(outbox.state())
        except OSError as error:
            _LOG.warning("event=energy_unwritten error=%s", error)
