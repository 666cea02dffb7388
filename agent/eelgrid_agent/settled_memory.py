"""Memory of a process that has loaded what it will run.

Knows no device and no message, since the agent and its driver process call it.
"""

import contextlib
import ctypes
import gc
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

# Of mallopt(3) and madvise(2).
_M_ARENA_MAX = -8
_MADV_DONTNEED = 4
_SMAPS = Path("/proc/self/smaps")
_MAPPING = re.compile(r"([0-9a-f]+)-([0-9a-f]+) (\S+) \S+ \S+ \d+\s+(/.*)")


def use_one_arena() -> None:
    """Has all threads allocate from one arena: called before there are any.

    glibc gives threads arenas of their own so that they need not wait for each other, and keeps what is free in each:
    0.8 MB of an agent, whose dozen threads allocate little. A C library without arenas keeps what it has.
    """
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is not None:
        set_option(_M_ARENA_MAX, 1)


def settle_memory() -> None:
    """Exempts what is loaded from garbage collection and returns memory that only the start needed.

    What stands now stands until the process ends, so the collector need not walk it. Imports leave free pages behind
    that glibc keeps (0.8 MB of an agent); a C library without malloc_trim keeps them. Of the pages of libraries that
    were read until now a third is not read again (6 MB of an agent, half of them gRPC's): see `find_clean_segments`.
    """
    gc.collect()
    gc.freeze()
    libc = ctypes.CDLL(None)
    trim = getattr(libc, "malloc_trim", None)
    if trim is not None:
        trim(0)
    advise = libc.madvise
    advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    with contextlib.suppress(OSError), _SMAPS.open(encoding="utf-8", errors="surrogateescape") as smaps:
        for start, end in list(find_clean_segments(smaps)):
            # What it refuses stays mapped.
            advise(start, end - start, _MADV_DONTNEED)


def find_clean_segments(smaps: Iterable[str]) -> Iterator[tuple[int, int]]:
    """Yields start and end of code and constants of the program and its libraries, by the lines of `/proc/PID/smaps`.

    The kernel can map their pages again from the file, which is in its cache, so they may be unmapped at any time; those
    that are used come back at 0.1 to 0.5 us each. It would do so itself where memory is short. A segment with a page that
    this process has changed, as the loader does, is not among them, and no file without code.
    """
    clean: list[tuple[str, int, int]] = []
    with_code = set()
    path, mode, start, end = "", "", 0, 0
    for line in smaps:
        if (mapping := _MAPPING.match(line)) is not None:
            start, end, mode, path = int(mapping[1], 16), int(mapping[2], 16), mapping[3], mapping[4]
            if mode == "r-xp":
                with_code.add(path)
        elif line[0] in "0123456789abcdef":
            path = ""
        elif path and line.startswith("Anonymous:") and int(line.split()[1]) == 0 and mode in ("r-xp", "r--p"):
            clean.append((path, start, end))
    yield from ((start, end) for path, start, end in clean if path in with_code)
