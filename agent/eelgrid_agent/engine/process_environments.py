"""Environments of the processes of this machine, as /proc shows them. What they say is their users' word."""

import contextlib
from collections.abc import Iterator
from pathlib import Path


def iterate_environments(proc: Path = Path("/proc"), bytes_most: int = -1) -> Iterator[tuple[int, list[bytes]]]:
    """Yields each process that may be read with its variables, `NAME=VALUE` each, of at most so many bytes of them (-1: all)."""
    for entry in proc.iterdir():
        if entry.name.isdigit():
            # It may have ended meanwhile, or be another user's.
            with contextlib.suppress(OSError), (entry / "environ").open("rb") as file:
                yield int(entry.name), file.read(bytes_most).split(b"\0")
