"""A small file that is whole after any crash, and the place where a broken one is kept.

Owns how a file is replaced: written beside itself, flushed to the disk, renamed
over the old one, and the directory flushed, so that a reader finds the old
content or the new and never half of either. Knows nothing of what is in it.
"""

import os
from pathlib import Path

__all__ = ["ASIDE_MOST", "replace_file", "set_aside"]

# Broken files that are kept of one name; whoever has so many has not read the first.
ASIDE_MOST = 9
# A journal names other people's devices: nobody else need read it.
_MODE = 0o600


def replace_file(path: Path, content: bytes) -> None:
    """On return the content survives a power cut. Raises OSError."""
    fresh = path.with_name(path.name + ".new")
    # What a crash left, or somebody's link, goes: what we write to is a file that we made.
    fresh.unlink(missing_ok=True)
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, _MODE)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(path)
    _flush_directory(path.parent)


def set_aside(path: Path) -> Path:
    """Renames a file that is of no use to the first free name beside it. Raises OSError, also when all are taken."""
    for number in range(1, ASIDE_MOST + 1):
        aside = path.with_name(f"{path.name}.corrupt-{number}")
        if not aside.exists():
            path.replace(aside)
            _flush_directory(path.parent)
            return aside
    raise FileExistsError(0, f"{ASIDE_MOST} broken ones are kept beside it already")


def _flush_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
