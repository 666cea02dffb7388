"""Where the controller of this machine's box is, for every run of eelctl: reads one small file and imports nothing heavy.

A box is a controller and an agent that `eelctl box start` began as this user. They listen on sockets in a folder that
only this user may enter, so that nobody else on the machine can start processes in this user's name. The controller of
a box that root shares listens where everybody can connect, and asks for proofs of who does.
"""

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path


def find_box_folder() -> Path:
    """Returns the folder of this user's box."""
    home = os.environ.get("XDG_STATE_HOME") or str(Path(os.environ.get("HOME", "/")) / ".local" / "state")
    return Path(home) / "eelgrid" / "box"


def find_shared_folder() -> Path:
    """Returns the folder of the box that all users of this machine share: its socket, and the checkpoints of jobs."""
    return Path(os.environ.get("EELGRID_SHARED_BOX") or "/var/lib/eelgrid/box")


def read_start_ticks(pid: int) -> int:
    """Returns when a process was started, in ticks since boot, so that a reused id is told apart; 0 if it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        return 0 if fields[0] in {b"Z", b"X"} else int(fields[19])
    except (OSError, IndexError, ValueError):
        return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class BoxProcesses:
    """The two processes of a box, each by its id and when it was started, and where the controller listens."""

    address: str
    controller: tuple[int, int]
    agent: tuple[int, int]

    @property
    def is_complete(self) -> bool:
        """Returns whether both live."""
        return is_process_alive(self.controller) and is_process_alive(self.agent)


def is_process_alive(process: tuple[int, int]) -> bool:
    """Returns whether a process still lives."""
    return process[1] > 0 and read_start_ticks(process[0]) == process[1]


def load_box(folder: Path) -> BoxProcesses | None:
    """Returns what was started last; None if nothing was, or the file is damaged."""
    try:
        found = json.loads((folder / "box.json").read_bytes())
        return BoxProcesses(
            address=str(found["address"]), controller=_process(found["controller"]), agent=_process(found["agent"])
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None


def store_box(folder: Path, box: BoxProcesses) -> None:
    """Records what was started."""
    path = folder / "box.json"
    new = path.with_suffix(".new")
    new.write_text(json.dumps(asdict(box)))
    new.replace(path)


def find_box_controller() -> str | None:
    """Returns the address of this user's box if it runs, else of the one that all users share if there is one."""
    box = load_box(find_box_folder())
    if box is not None and is_process_alive(box.controller):
        return box.address
    shared = find_shared_folder() / "controller.sock"
    try:
        # Only root can have put it there.
        return f"unix:{shared}" if shared.is_socket() and shared.stat().st_uid == 0 else None
    except OSError:
        return None


def _process(value: list[int]) -> tuple[int, int]:
    pid, ticks = value
    return int(pid), int(ticks)
