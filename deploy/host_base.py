"""The base of an image out of the machine's own Python: interpreter, standard library, shared libraries.

Owns which files that takes. Must not know the image's format.

Theory. A program needs its loader, the libraries that `ldd` lists for the interpreter and for
every extension module, and the files that glibc opens by name (nsswitch). The C library is the
host's, so the image runs where the kernel and the processor are as here, which is what a trial
wants. No shell is in it.
"""

import re
import subprocess
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

__all__ = ["Files", "base_files"]

# Folders of the standard library that no daemon needs.
_LEFT_OUT = {
    "test",
    "tests",
    "idlelib",
    "tkinter",
    "turtledemo",
    "ensurepip",
    "lib2to3",
    "site-packages",
    "__pycache__",
}
# What glibc and OpenSSL open by name, where it is there.
_NAMED = ("etc/ssl/certs/ca-certificates.crt", "etc/nsswitch.conf", "etc/protocols", "etc/services")
_LIBRARIES_BY_NAME = ("libnss_files.so.2", "libnss_dns.so.2", "libresolv.so.2")
_NEEDED = re.compile(r"(?:=> )?(/\S+) \(0x[0-9a-f]+\)")


class Files(Protocol):
    """Where files go."""

    def add(self, path: str, content: bytes, *, mode: int = 0o644) -> None:
        """Takes a file."""

    def link(self, path: str, target: str) -> None:
        """Takes a symbolic link."""


def base_files(into: Files, extensions: Iterable[Path]) -> str:
    """Adds everything and returns the interpreter's path inside; `extensions` are modules of packages."""
    interpreter = Path(sys.executable).resolve()
    library = Path(sysconfig.get_path("stdlib")).resolve()
    into.add(str(interpreter), interpreter.read_bytes(), mode=0o755)
    native = [interpreter, *extensions]
    for path in sorted(library.rglob("*")):
        # The folder config-... holds what one would link an interpreter from.
        folders = path.relative_to(library).parts[:-1]
        if path.is_file() and not _LEFT_OUT & {*folders} and not "".join(folders[:1]).startswith("config-"):
            into.add(str(path), path.read_bytes())
            if ".so" in path.name:
                native.append(path)
    for needed in sorted(_needed_by(native)):
        into.add(str(needed), needed.resolve().read_bytes(), mode=0o755)
    for name in _NAMED:
        if (Path("/") / name).is_file():
            into.add(name, (Path("/") / name).read_bytes())
    into.add("etc/passwd", b"root:x:0:0::/:/sbin/nologin\nnobody:x:65532:65532::/:/sbin/nologin\n")
    into.add("etc/group", b"root:x:0:\nnobody:x:65532:\n")
    into.add("tmp/.keep", b"")
    if str(interpreter) != "/usr/local/bin/python3":
        into.link("usr/local/bin/python3", str(interpreter))
    return str(interpreter)


def _needed_by(native: list[Path]) -> set[Path]:
    """Shared libraries, as the loader would find them."""
    found: set[Path] = set()
    for start in range(0, len(native), 100):
        batch = [str(path) for path in native[start : start + 100]]
        told = subprocess.run(["ldd", *batch], capture_output=True, text=True, check=False).stdout  # noqa: S607
        found |= {Path(match[1]) for match in _NEEDED.finditer(told)}
    beside = {path.parent for path in found if path.name.startswith("libc.so")}
    found |= {folder / name for folder in beside for name in _LIBRARIES_BY_NAME if (folder / name).is_file()}
    # Libraries that lie within a package go with the package.
    return {path for path in found if "site-packages" not in path.parts}
