"""Command blocks of the documentation, and a shell in which a page's blocks run one after another.

Owns how a page is read and what its commands meet: our programs on free loopback ports, whatever ports the page's
reader has, an eelctl that need not import itself at each command, and `make` with this environment. Must not know what a page is about. Everything that a page starts ends
with its shell.

A fenced block in `bash` is run. One that cannot be says why by its title, which its reader sees. A block of another
language with a file's name as its title is that file. A block in `text` titled "Output" begins with a line that the
block of commands before it printed; numbers and the width of columns may differ.
"""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tests import fork_server
from tests.e2e.processes import free_address

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
TUTORIALS = sorted((DOCS / "tutorials").glob("*.md"))
GUIDES = sorted((DOCS / "how-to").rglob("*.md"))
# Why a block is not run.
REASONS = (
    "needs a cluster",
    "needs root",
    "needs NVIDIA's driver",
    "needs a registry",
    "needs a terminal",
    "needs a box",
    "needs a PostgreSQL",
)
OUTPUT = "Output"
# Of a text that shows what was printed at another time.
EXAMPLE = "Example"
BLOCK_S = 240.0
_FENCE = re.compile(
    r"^(?P<indent> *)```(?P<language>\S*)(?P<options>[^\n]*)\n(?P<text>.*?)^(?P=indent)```[ ]*$",
    re.MULTILINE | re.DOTALL,
)
_PROGRAMS = {
    "eelctl": ("eelgrid_controller.cli", ()),
    "eelgrid-controller": ("eelgrid_controller", ("--listen", "$DOCS_LISTEN", "--metrics", "$DOCS_METRICS")),
    "eelgrid-agent": (
        "eelgrid_agent",
        ("--controller", "$EELGRID_CONTROLLER", "--listen", "${DOCS_SERVE:-127.0.0.1:0}", "--metrics", "127.0.0.1:0"),
    ),
}


@dataclass(frozen=True)
class Block:
    """One fenced block of a page."""

    line: int
    language: str
    title: str
    text: str

    @property
    def runs(self):
        """Whether these are commands that a test runs."""
        return self.language == "bash" and not self.title

    @property
    def is_file(self):
        """Whether the block is a file of the page's folder, named by its title."""
        return self.language != "bash" and re.fullmatch(r"[\w-]+\.\w+", self.title) is not None


def blocks_of(page):
    """All fenced blocks of a page, in order."""
    text = page.read_text("utf-8")
    found = []
    for match in _FENCE.finditer(text):
        title = re.search(r'title="([^"]*)"', match["options"])
        indent = len(match["indent"])
        lines = "".join(line[indent:] if line.strip() else line for line in match["text"].splitlines(keepends=True))
        found.append(Block(text[: match.start()].count("\n") + 1, match["language"], title[1] if title else "", lines))
    return found


def runnable(pages):
    """Those of the pages that have commands to run."""
    return [page for page in pages if any(block.runs for block in blocks_of(page))]


def name_of(page):
    """A page's path below docs."""
    return str(page.relative_to(DOCS))


def shape(line):
    """A line without its numbers, ids and widths."""
    return re.sub(r"\s+", " ", re.sub(r"\d[\d.,:]*", "0", line)).strip()


class Shell:
    """A folder and an environment in which blocks run; what one starts lives until the shell is closed."""

    def __init__(self, folder, *, fleet=None):
        """`fleet` is what runs already; without one a page starts its own controller."""
        self.folder = folder
        # What a page's own controller listens on, and what its commands ask.
        started = {"listen": free_address(), "metrics": free_address(), "page": free_address(), "agent": free_address()}
        asked = fleet or started
        self.addresses = {
            "127.0.0.1:7443": asked["listen"],
            "127.0.0.1:9464": asked["metrics"],
            "127.0.0.1:8443": started["page"],
            "127.0.0.1:8444": free_address(),
        }
        self.kept = folder / ".variables"
        bin_folder = folder / ".bin"
        bin_folder.mkdir(parents=True)
        for name, (module, flags) in _PROGRAMS.items():
            given = " ".join(f'"{flag}"' for flag in flags)
            run = f'exec "{sys.executable}" -m {module}'
            lines = [f'{run} {given} "$@"']
            if name == "eelctl":
                lines = [
                    f'exec "{sys.executable}" -I -S "{fork_server.__file__}" "{fork_server.find_server(module).socket}" "$@"'
                ]
            if name == "eelgrid-agent":
                # Commands of the node take no flags of the daemon; layouts are those of simulated GPUs.
                lines = [
                    f'[ "$1" = energy ] && shift && {run} energy --address "$DOCS_AGENT" "$@"',
                    f'[ "$1" = mig ] && case "$*" in *--simulate*) {run} "$@";; *) {run} "$@" --simulate "$DOCS_MIG";; esac',
                    *lines,
                ]
            self._script(bin_folder / name, "\n".join(lines) + "\n")
        if make := shutil.which("make"):
            prefix = Path(sys.prefix)
            old = " ".join(f'-o "{prefix / name}"' for name in ("made", "installed", "installed-dev"))
            self._script(bin_folder / "make", f'exec {make} {old} VENV="{prefix}" -f "{ROOT / "Makefile"}" "$@"\n')
        self.environment = {
            key: value for key, value in os.environ.items() if not key.startswith(("EELGRID_", "NUMBA_DISABLE", "MAKE"))
        } | {
            "PATH": f"{bin_folder}:{Path(sys.executable).parent}:{os.environ['PATH']}",
            "DOCS_LISTEN": started["listen"],
            "DOCS_METRICS": started["metrics"],
            "DOCS_AGENT": asked["agent"],
            "DOCS_MIG": str(folder / "mig-fleet.json"),
            "EELGRID_CONTROLLER": asked["listen"],
            "NODE": "gpu-1",
            "WORKLOAD": "train",
            "MODEL": "H100-80GB-HBM3",
            "EELGRID_DATA": os.environ.get("EELGRID_DATA", ""),
            "COLUMNS": "160",
            "HOME": str(folder),
            "STATE_DIRECTORY": str(folder / ".state"),
            # The demo of a page is a small one: what it shows is the same, and its numbers are its own tests' matter.
            "DEMO": "--nodes 40 --tasks 200 --trace generated --no-gpu",
        }
        self._groups = []

    @staticmethod
    def _script(path, text):
        path.write_text(f"#!/bin/sh\n{text}")
        path.chmod(0o755)

    def __enter__(self):
        return self

    def __exit__(self, *reason):
        for group in self._groups:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)

    def run(self, text):
        """Runs a block, with free ports for those that programs have by default; its exit code and everything that it printed. Variables that it sets are there for the next."""
        for default, free in self.addresses.items():
            text = text.replace(default, free)
        script = f'[ -f "{self.kept}" ] && . "{self.kept}"\nset -eu\n{text}\nset +eu\n(set -o posix; set) | grep -E "^[a-z_]+=" > "{self.kept}" || true\n'
        out = self.folder / ".output"
        with out.open("wb") as stream:
            process = subprocess.Popen(
                ["bash", "-c", script],
                cwd=self.folder,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            self._groups.append(process.pid)
            try:
                code = process.wait(BLOCK_S)
            except subprocess.TimeoutExpired:
                code = 124
        return code, out.read_text("utf-8", errors="replace")

    def run_page(self, page):
        """Runs every block of a page in order; raises AssertionError with the block's line and what it printed."""
        printed = None
        blocks = blocks_of(page)
        for block in blocks:
            if block.is_file:
                (self.folder / block.title).write_text(block.text)
        for block in blocks:
            where = f"{page.relative_to(ROOT)}:{block.line}"
            if block.runs:
                code, printed = self.run(block.text)
                assert code == 0, f"{where} ended with {code}\n{block.text}\n{printed}"
                assert "Traceback" not in printed, f"{where}\n{printed}"
            elif block.language == "text" and block.title == OUTPUT:
                assert printed is not None, f"{where} is the output of no block"
                first = shape(block.text.splitlines()[0])
                assert first in {shape(line) for line in printed.splitlines()}, f"{where}: no {first!r} in\n{printed}"
