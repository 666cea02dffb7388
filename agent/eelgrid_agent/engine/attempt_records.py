"""The record file of an attempt: what it runs, that it began, how it ended; and the lock that its launcher holds on it.

Theory. One file, to which a line is added at each step, since a file that is made costs more than a line that is flushed:

    spec      what the launcher runs; written by the agent before it asks for the launcher
    running   the launcher's process; flushed before the job begins
    exit      how it ended; flushed by the agent, unless the controller has journalled it within a second

A line is a JSON object with the name of the step. One that was cut short, by a full disk or a loss of power, is not read,
and what follows it is. Versions before 0.3 had a file for each step, and one for the lock.
"""

import fcntl
import json
import os
import time
from pathlib import Path
from typing import Any

from eelgrid_agent.engine import launcher

_LOCK_BEFORE = "lock"
_CLOSED_AFTER_MS_MOST = 50


def lock_records(folder: Path) -> int:
    """Opens and locks the records of a folder, made if they are not there; raises OSError: BlockingIOError if it is held."""
    descriptor = _open(folder / launcher.RECORDS)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def is_launcher_alive(folder: Path) -> bool:
    """Returns whether the launcher of a folder holds its lock."""
    for name in (launcher.RECORDS, _LOCK_BEFORE):
        try:
            descriptor = os.open(folder / name, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(descriptor)
    return False


def was_launcher_forked(folder: Path) -> bool:
    """Returns whether a fork server that has ended had forked the launcher of a folder.

    The kernel closes what a killed process was sent a moment after it can be waited for, so its lock may outlast it.
    """
    for _ in range(_CLOSED_AFTER_MS_MOST):
        if "running" in read_records(folder):
            return True
        if not is_launcher_alive(folder):
            return False
        time.sleep(0.001)
    return True


def flush_records(folder: Path) -> None:
    """Returns when the records of a folder survive a loss of power; raises OSError."""
    descriptor = os.open(folder / launcher.RECORDS, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def record_exit(folder: Path, record: dict[str, Any]) -> None:
    """Records the end of an attempt without a launcher; raises OSError."""
    descriptor = _open(folder / launcher.RECORDS)
    try:
        launcher.append_record(descriptor, "exit", record)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_records(folder: Path) -> dict[str, dict[str, Any]]:
    """Returns what a folder says, by step; nothing of steps that are not recorded, or not as a whole."""
    found: dict[str, dict[str, Any]] = {}
    for line in _read(folder / launcher.RECORDS).split(b"\n"):
        try:
            step = json.loads(line)
        except ValueError:
            continue
        if isinstance(step, dict):
            found |= step
    if "spec" not in found:
        for name in ("spec", "running", "exit"):
            try:
                found.setdefault(name, json.loads(_read(folder / f"{name}.json")))
            except ValueError:
                continue
    return found


def _open(path: Path) -> int:
    # It may hold secrets of the environment.
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""
