"""A control daemon of CUDA's Multi-Process Service without a GPU, by what nvidia-cuda-mps-control(1) says of it.

It writes its process id, takes `quit`, `get_server_list` and `terminate_client` through its pipe directory, and
notes each command beside the program, which `commands` returns.
"""

import os
from pathlib import Path

from eelgrid_agent.engine.mps_control import PROGRAM

SERVER_PID = 4711
# A script has its own name, by which the daemon is known; and any user may run the shell.
_SOURCE = """#!/bin/sh
pipes=$CUDA_MPS_PIPE_DIRECTORY note=$0.commands
case $1 in
-d)
    [ ! -e "$0.broken" ] || { echo "cannot find an NVIDIA driver" >&2; exit 1; }
    mkfifo "$pipes/control"
    setsid "$0" serve &
    ;;
serve)
    exec 3<> "$pipes/control"
    echo "start $CUDA_VISIBLE_DEVICES as $(id -u)" >> "$note"
    echo $$ > "$pipes/new" && mv "$pipes/new" "$pipes/PROGRAM.pid"
    while read -r line <&3; do
        echo "$line" >> "$note"
        [ "$line" != quit ] || { rm "$pipes/PROGRAM.pid"; exit 0; }
    done
    ;;
*)
    [ ! -w "$0.clients" ] || id -u >> "$0.clients"
    while read -r line; do
        echo "$line" > "$pipes/control"
        [ "$line" != get_server_list ] || echo SERVER
    done
    ;;
esac
""".replace("PROGRAM", PROGRAM).replace("SERVER", str(SERVER_PID))


class MpsProgram:
    """The program in a directory that is put on PATH."""

    def __init__(self, folder: Path, monkeypatch) -> None:
        self._path = folder / PROGRAM
        self._path.write_text(_SOURCE)
        self._path.chmod(0o755)
        folder.chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")

    def break_down(self) -> None:
        """Lets it fail from now on."""
        self._path.with_name(f"{PROGRAM}.broken").touch()

    def repair(self) -> None:
        """Lets it start again."""
        self._path.with_name(f"{PROGRAM}.broken").unlink()

    @property
    def clients(self) -> set[str]:
        """The users as whom it was run to give commands, where that is noted."""
        return set(self._path.with_name(f"{PROGRAM}.clients").read_text().split())

    @property
    def commands(self) -> list[str]:
        """What all daemons were told, in order, beginning with their starts."""
        note = self._path.with_name(f"{PROGRAM}.commands")
        return note.read_text().splitlines() if note.exists() else []
