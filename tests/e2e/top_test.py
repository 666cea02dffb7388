"""Real `eelctl top` on a terminal of its own: keys go in, the screen comes out, and the terminal is as it was."""

import contextlib
import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time

import pytest
from tests.e2e.processes import _ENVIRONMENT, Cluster, fleet_of

NODES = [
    {"name": f"n{number}", "cpu_milli": 8000, "memory_bytes": 2**35, "gpus": [{"product": "a10", "count": 2}]}
    for number in range(1, 4)
]
_SEQUENCE = re.compile(r"\x1b(?:\[[0-9;?<>=]*[A-Za-z]|\][^\x07]*\x07|[PX^_].*?\x1b\\|[()][A-Z0-9]|.)")
# What ends the alternate screen and shows the cursor again.
_ENDED, _CURSOR = "\x1b[?1049l", "\x1b[?25h"


class Terminal:
    """A pseudo-terminal with eelctl on it."""

    def __init__(self, cluster, *, rows=30, columns=110, **environment):
        self.file, other = pty.openpty()
        fcntl.ioctl(other, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self.before = termios.tcgetattr(other)
        self.process = subprocess.Popen(
            [sys.executable, *cluster.eelctl_command("top", "--interval", "0.2")],
            stdin=other,
            stdout=other,
            stderr=other,
            env=_ENVIRONMENT | {"TERM": "xterm-256color"} | environment,
            start_new_session=True,
        )
        self.other = other
        self.written = ""

    def read(self, within_s=0.1):
        """Takes over what was written meanwhile."""
        while select.select([self.file], [], [], within_s)[0]:
            try:
                self.written += os.read(self.file, 65536).decode(errors="replace")
            except OSError:
                return
            within_s = 0.0

    def press(self, keys):
        """Types, and forgets what was written before."""
        self.read(0.0)
        self.written = ""
        os.write(self.file, keys.encode())

    def until(self, *pieces, within_s=30.0):
        """Waits until all of this was written since the last key."""
        deadline_s = time.monotonic() + within_s
        while True:
            self.read()
            text = _SEQUENCE.sub("", self.written)
            if all(piece in text for piece in pieces):
                return text
            assert self.process.poll() is None, text
            assert time.monotonic() < deadline_s, f"not written: {pieces}\n{text[-3000:]}"

    def ended(self):
        """The exit code, and whether the terminal is as it was."""
        deadline_s = time.monotonic() + 15.0
        while self.process.poll() is None:
            self.read()
            assert time.monotonic() < deadline_s, "it did not end"
        self.read()
        assert _ENDED in self.written
        assert _CURSOR in self.written
        assert "Traceback" not in self.written
        assert termios.tcgetattr(self.other)[:4] == self.before[:4]
        return self.process.returncode

    def close(self):
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        for file in (self.file, self.other):
            with contextlib.suppress(OSError):
                os.close(file)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    folder = tmp_path_factory.mktemp("top")
    with Cluster(folder) as found:
        found.controller()
        found.set_policy(sample_interval_s=0.5, send_interval_s=0.5)
        (folder / "faults").write_text("")
        found.agent(fleet_of(folder / "fleet.json", NODES), "--faults", str(folder / "faults"))
        found.until_ready(3)
        yield found


@pytest.fixture
def terminal(cluster):
    with contextlib.ExitStack() as terminals:

        def begin(**settings):
            found = Terminal(cluster, **settings)
            terminals.callback(found.close)
            return found

        yield begin


def test_keys_show_tabs_and_q_leaves_the_terminal_as_it_was(terminal):
    screen = terminal()
    screen.until("1 Overview", "needs attention", "3 ready", "live")
    screen.press("2")
    screen.until("nodes: 3", "n1", "n3")
    screen.press("\r")
    screen.until("node n1", "state      ready")
    screen.press("3")
    screen.until("gpus: 6")
    screen.press("q")
    assert screen.ended() == 0


@pytest.mark.parametrize("end", ["\x03", signal.SIGTERM])
def test_an_interrupt_leaves_the_terminal_as_it_was(terminal, end):
    screen = terminal(NO_COLOR="1", TERM="xterm")
    text = screen.until("needs attention", "3 ready")
    assert "3 ready" in text
    colours = re.findall(r"\x1b\[[0-9;]*m", screen.written)
    assert not any(re.search(r"[\[;](?:3|9)[1-6](?:[;m])|38;[25]", colour) for colour in colours)
    if isinstance(end, str):
        screen.press(end)
    else:
        screen.written = ""
        screen.process.send_signal(end)
    assert screen.ended() == 0


def test_a_lost_gpu_and_a_restarted_controller_are_seen(terminal, cluster):
    screen = terminal()
    screen.until("needs attention", "3 ready")
    with (cluster.folder / "faults").open("a") as out:
        out.write(json.dumps({"fault": "lose", "node": "n2", "gpu": 1}) + "\n")
    screen.until("n2/1", "1 lost")
    screen.press("2")
    screen.until("1 GPU lost")
    controller = next(child for child in cluster.children if child.name.startswith("controller"))
    controller.kill()
    screen.until("connection lost")
    screen.written = ""
    cluster.controller()
    screen.until("live")
    screen.press("q")
    assert screen.ended() == 0


def test_a_pipe_gets_one_snapshot_and_a_listing_imports_no_screen(cluster):
    done = cluster.eelctl("top")
    assert "\x1b" not in done.stdout
    assert "busiest nodes" in done.stdout
    words = ["eelctl", *cluster.eelctl_command("nodes")[2:]]
    program = f"import sys; sys.argv = {words!r}\nfrom eelgrid_controller.cli.__main__ import cli\n"
    program += "cli(standalone_mode=False)\nassert not any(name.split('.')[0] == 'textual' for name in sys.modules)"
    found = subprocess.run(
        [sys.executable, "-c", program], env=_ENVIRONMENT, capture_output=True, text=True, timeout=60, check=False
    )
    assert found.returncode == 0, found.stderr
    assert "n1" in found.stdout
