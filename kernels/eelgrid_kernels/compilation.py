"""Compilation of kernels: numba decorators and the cache folder that they share.

Owns the decorators and the choice of a cache folder. Must not know any kernel.

Theory: numba looks at the source of the one file that a function stands in, so
its cache does not notice a change of what the function calls elsewhere. Here all
kernels share a folder named after the digest of every source file of the
package: an edit anywhere is a new folder, and functions may live in the file
where they belong. The folder is below NUMBA_CACHE_DIR where that is set, else in
the package's own __pycache__, else in the user's cache; if none can be written,
as in a read-only image without a home, kernels are compiled anew in each process:
slow to start, never stale. docs/adr/0015 has the why.
"""

import hashlib
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from shutil import rmtree
from typing import Any, TypeVar

import numba

_Function = TypeVar("_Function", bound=Callable[..., Any])
_PREFIX = "eelgrid-"
# Of sources that are no longer; each is some MiB. A process that still runs on one compiles in memory only.
_FORMER_MOST = 4


def _digest() -> str:
    sources = sorted(Path(__file__).parent.glob("*.py"))
    taken = hashlib.sha256()
    for path in sources:
        taken.update(f"{path.name}\0".encode() + path.read_bytes() + b"\0")
    return taken.hexdigest()[:24]


def _parents() -> Iterator[Path]:
    if os.environ.get("NUMBA_CACHE_DIR"):
        yield Path(os.environ["NUMBA_CACHE_DIR"])
    yield Path(__file__).parent / "__pycache__"
    try:
        yield Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "eelgrid"
    except RuntimeError:  # nobody's home
        return


def _holds(folder: Path) -> bool:
    """Whether something can be written there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def _changed_at(folder: Path) -> float:
    try:
        return folder.stat().st_mtime
    except FileNotFoundError:  # another process was quicker
        return 0.0


def cache_folder() -> Path | None:
    """Where kernels of these sources are kept; None if nothing can be written. Drops what is too old."""
    name = _PREFIX + _digest()
    for parent in _parents():
        if not _holds(parent / name):
            continue
        former = sorted((path for path in parent.glob(_PREFIX + "*") if path.name != name), key=_changed_at)
        for path in former[:-_FORMER_MOST]:
            rmtree(path, ignore_errors=True)
        return parent / name
    return None


_FOLDER = cache_folder()


def kernel(function: _Function) -> _Function:
    """The function compiled by numba on its first call, or loaded if these very sources were compiled before."""
    return _compile(function)


def lean_kernel(function: _Function) -> _Function:
    """A kernel that allocates nothing: nobody counts references to its arrays, which takes time there and in the compiler."""
    return _compile(function, _nrt=False)


def inlined_kernel(function: _Function) -> _Function:
    """A lean kernel whose code goes into that of its callers: for the small and hot, where handing over is what costs."""
    return _compile(function, forceinline=True, _nrt=False)


def kernel_sum(function: _Function) -> _Function:
    """A lean kernel that sums whole numbers in floats: exact in any order, so the compiler may choose the order."""
    return _compile(function, fastmath={"reassoc", "nsz"}, _nrt=False)


def nogil_kernel(function: _Function) -> _Function:
    """A kernel that gives up the interpreter's lock while it runs: for seconds of work in a thread of its own.

    Not for what takes microseconds: who gives the lock up may wait milliseconds to have it back.
    """
    return _compile(function, nogil=True)


def _compile(function: _Function, **options: Any) -> _Function:
    if _FOLDER is None:
        compiled: _Function = numba.njit(**options)(function)
        return compiled
    before, numba.config.CACHE_DIR = numba.config.CACHE_DIR, str(_FOLDER)
    try:  # numba reads the folder when it decorates
        compiled = numba.njit(cache=True, **options)(function)
    finally:
        numba.config.CACHE_DIR = before
    return compiled
