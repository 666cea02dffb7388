"""Interactive jobs by real processes: `eelctl run --pty` and `attach` in a terminal of their own, and input by pipes."""

import contextlib
import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest
from tests.e2e.processes import Cluster, fleet_of

from eelgrid_protos.messages import GetWorkloadRequest, WorkloadPhase

ROOT = ("--allow-root",) if os.geteuid() == 0 else ()
NODE = {"name": "box", "cpu_milli": 64_000, "memory_bytes": 2**36, "gpus": [{"product": "a10", "count": 2}]}
SHELL = ("/bin/sh",)
# Makes standard input the terminal that the session belongs to, so that its signals arrive.
OWN_TERMINAL = "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
CLIENT = Path(__file__).resolve().parents[2] / "client" / "eelgrid"


class Terminal:
    """eelctl in a terminal of its own, as a person has it."""

    def __init__(self, cluster, *words, rows=24, columns=80):
        self._master, self._slave = pty.openpty()
        self.resize(rows, columns)
        self.mode = termios.tcgetattr(self._slave)
        self.process = subprocess.Popen(
            [sys.executable, "-c", OWN_TERMINAL, *cluster.eelctl_command(*words)],
            stdin=self._slave,
            stdout=self._slave,
            stderr=self._slave,
            env={**os.environ, "TERM": "vt100", "PS1": "$ "},
            cwd=cluster.folder,
            start_new_session=True,
        )
        self.text = ""

    def resize(self, rows, columns):
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def type(self, keys):
        os.write(self._master, keys.encode())

    def until(self, mark, within_s=30.0):
        """Reads until the mark is shown after what was awaited before; returns the text up to it."""
        deadline_s = time.monotonic() + within_s
        while mark not in self.text:
            left_s = deadline_s - time.monotonic()
            ready, _, _ = select.select((self._master,), (), (), max(0.0, left_s))
            assert ready, f"{mark!r} is not shown: {self.text!r}"
            self.text += os.read(self._master, 65536).decode("utf-8", "replace")
        found, _, self.text = self.text.partition(mark)
        return found + mark

    def end(self):
        """Waits for the end of the command; returns its exit code."""
        deadline_s = time.monotonic() + 30.0
        while self.process.poll() is None:
            assert time.monotonic() < deadline_s, self.text
            if select.select((self._master,), (), (), 0.05)[0]:
                self.text += os.read(self._master, 65536).decode("utf-8", "replace")
        while select.select((self._master,), (), (), 0.0)[0]:
            self.text += os.read(self._master, 65536).decode("utf-8", "replace")
        return self.process.returncode

    @property
    def is_restored(self):
        """Whether the terminal works as before the command."""
        return termios.tcgetattr(self._slave) == self.mode

    def close(self):
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(10)
        os.close(self._master)
        os.close(self._slave)


@pytest.fixture
def cluster(tmp_path):
    with Cluster(tmp_path) as found:
        yield found


@pytest.fixture
def open_terminal(cluster):
    with contextlib.ExitStack() as stack:

        def start(*words, **size):
            terminal = Terminal(cluster, *words, **size)
            stack.callback(terminal.close)
            return terminal

        yield start


def begin_agent(cluster):
    fleet = fleet_of(cluster.folder / "fleet.json", [NODE])
    return cluster.agent(fleet, "--run-processes", *ROOT, "--state", str(cluster.folder / "agent"))


def begin(cluster):
    controller, agent = cluster.controller(), begin_agent(cluster)
    cluster.until_ready(1)
    return controller, agent


def get(cluster, key):
    return cluster.operators.get_workload(GetWorkloadRequest(workload_id=key), timeout=5.0).workload


def piped(cluster, text, *words, code=0):
    """eelctl with this standard input; returns what it prints."""
    command = [sys.executable, *cluster.eelctl_command(*words)]
    done = subprocess.run(command, check=False, input=text, capture_output=True, timeout=60, cwd=cluster.folder)
    assert done.returncode == code, done.stderr
    return done.stdout


def test_a_shell_in_a_terminal_answers_interrupts_resizes_and_passes_its_exit_code_on(cluster, open_terminal):
    begin(cluster)
    shell = open_terminal("run", "--pty", "--gpus", 1, "--", *SHELL, rows=33, columns=101)
    shell.until("# " if os.geteuid() == 0 else "$ ")
    assert not shell.is_restored
    shell.type("stty size; tty; echo $TERM $((6 * 7))\r")
    shell.until("33 101\r\n")
    assert "vt100 42" in shell.until("vt100 42\r\n")
    shell.resize(44, 120)
    # The size arrives with the signal, in its own time.
    shell.type("until [ \"$(stty size)\" = '44 120' ]; do sleep 0.05; done; echo re''sized\r")
    shell.until("resized\r\n")
    shell.type("echo be''gun; sleep 600\r")
    shell.until("begun\r\n")
    shell.type("\x03")
    shell.type("echo st''ill $?\r")
    shell.until("still 130\r\n")
    shell.type("exit 7\r")
    assert shell.end() == 7
    assert shell.is_restored
    assert get(cluster, "w-1").exit_code == 7


def test_the_escape_detaches_and_attach_comes_back_to_the_same_shell(cluster, open_terminal):
    begin(cluster)
    first = open_terminal("run", "--pty", "--", *SHELL)
    first.until("# " if os.geteuid() == 0 else "$ ")
    first.type("kept=value; echo re''ady\r")
    first.until("ready\r\n")
    first.type("\r~.")
    assert first.end() == 0
    assert first.is_restored
    assert "eelctl attach w-1" in first.text
    assert get(cluster, "w-1").phase is WorkloadPhase.PLACED
    second = open_terminal("attach", "w-1")
    second.type("echo [$kept]\r")
    second.until("[value]\r\n")
    # A second client sees the same, and what one types the other sees.
    third = open_terminal("attach", "--tail", 0, "last")
    third.type("echo from th''ird\r")
    second.until("from third\r\n")
    second.type("exit 3\r")
    assert (second.end(), third.end()) == (3, 3)
    assert second.is_restored
    assert third.is_restored
    audited = cluster.eelctl("audit", "--call", "Attach").stdout
    assert audited.count("Attach") >= 3


def test_a_shell_outlives_the_agent_and_the_controller_and_the_client_goes_on(cluster, open_terminal):
    controller, agent = begin(cluster)
    shell = open_terminal("run", "--pty", "--", *SHELL)
    shell.until("# " if os.geteuid() == 0 else "$ ")
    shell.type("kept=agent; echo re''ady\r")
    shell.until("ready\r\n")
    agent.kill()
    begin_agent(cluster)
    cluster.until_ready(1)
    # Keys that were typed while it was away may be lost, as on a line that was cut.
    deadline_s = time.monotonic() + 30.0
    while "[agent]" not in shell.text:
        assert time.monotonic() < deadline_s, shell.text
        shell.type("echo [$kept]\r")
        with contextlib.suppress(AssertionError):
            shell.until("[agent]", within_s=1.0)
            break
    controller.kill()
    cluster.controller()
    cluster.until_ready(1)
    while "[again]" not in shell.text:
        assert time.monotonic() < deadline_s + 30.0, shell.text
        shell.type("echo [ag''ain]\r")
        with contextlib.suppress(AssertionError):
            shell.until("[again]", within_s=1.0)
            break
    shell.type("exit 4\r")
    assert shell.end() == 4


def test_a_killed_client_leaves_the_job_and_a_terminated_one_restores_its_terminal(cluster, open_terminal):
    begin(cluster)
    shell = open_terminal("run", "--pty", "--", *SHELL)
    shell.until("# " if os.geteuid() == 0 else "$ ")
    shell.process.send_signal(signal.SIGTERM)
    assert shell.end() == 128 + signal.SIGTERM
    assert shell.is_restored
    assert get(cluster, "w-1").phase is WorkloadPhase.PLACED
    cluster.eelctl("cancel", "w-1")
    cluster.until(lambda: get(cluster, "w-1").phase.is_ended, what="the shell hangs up")
    assert get(cluster, "w-1").attempts[0].signal == signal.SIGHUP


def test_a_pipe_passes_bytes_and_their_end_on_and_the_job_ends_with_its_code(cluster):
    begin(cluster)
    data = bytes(range(256)) * 2000
    assert piped(cluster, data, "run", "-i", "--", "cat") == data
    assert piped(cluster, b"one\ntwo\n", "run", "-i", "--", "sh", "-c", "wc -l; exit 5", code=5) == b"2\n"
    # Without -i a job reads an end at once.
    assert piped(cluster, b"unread", "run", "--", "cat") == b""


def test_a_detached_pipe_waits_for_somebody_who_attaches(cluster):
    begin(cluster)
    key = cluster.eelctl("run", "-d", "-i", "--", "cat").stdout.strip()
    assert piped(cluster, b"late\n", "attach", key) == b"late\n"
    assert get(cluster, key).phase is WorkloadPhase.SUCCEEDED


def test_attach_to_a_job_without_input_prints_the_last_lines_and_what_comes(cluster):
    begin(cluster)
    script = f"seq 1 30; echo printed > {cluster.folder}/printed; until [ -e {cluster.folder}/go ]; do sleep 0.05; done; echo more; exit 6"
    key = cluster.eelctl("run", "-d", "--", "sh", "-c", script).stdout.strip()
    cluster.until((cluster.folder / "printed").exists, what="it prints")
    command = [sys.executable, *cluster.eelctl_command("attach", "--tail", "2", key)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as attached:
        assert [attached.stdout.readline() for _ in range(2)] == ["29\n", "30\n"]
        (cluster.folder / "go").touch()
        assert attached.stdout.readline() == "more\n"
        assert attached.wait(30) == 6
    assert cluster.eelctl("attach", key, code=6).stdout.splitlines()[-1] == "more"


def test_output_of_a_failed_attempt_is_read_before_the_next_begins_and_after(cluster):
    begin(cluster)
    key = cluster.eelctl(
        "run", "-d", "--retries", 3, "--", "sh", "-c", "echo attempt $EELGRID_ATTEMPT; exit 9"
    ).stdout.strip()
    cluster.until(lambda: get(cluster, key).failures == 1 and not get(cluster, key).placements, what="it failed")
    assert cluster.eelctl("logs", key).stdout == "attempt 1\n"
    assert cluster.eelctl("logs", "--attempt", 1, key).stdout == "attempt 1\n"
    refused = cluster.eelctl("logs", "--attempt", 4, key, code=5)
    assert "attempt: is 4, and 1 have begun" in refused.stderr
    cluster.until(lambda: get(cluster, key).failures == 2, what="it failed again")
    assert cluster.eelctl("logs", "--attempt", 2, key).stdout == "attempt 2\n"
    assert cluster.eelctl("logs", "--attempt", 1, key).stdout == "attempt 1\n"
    cluster.eelctl("cancel", key)
    assert cluster.eelctl("logs", "--attempt", 1, key).stdout == "attempt 1\n"


def test_progress_and_a_warning_of_a_job_are_seen(cluster):
    begin(cluster)
    script = (
        "import signal, sys, time\n"
        f"sys.path.insert(0, {str(CLIENT)!r})\n"
        "import progress\n"
        "signal.signal(signal.SIGUSR1, lambda *_: sys.exit(8))\n"
        "progress.report(step=30, total=120, metric=0.5)\n"
        "print('up', flush=True)\n"
        "time.sleep(600)\n"
    )
    words = ("--signal", "USR1@300", "--", sys.executable, "-c", script)
    key = cluster.eelctl("run", "-d", *words).stdout.strip()
    cluster.until(lambda: get(cluster, key).progress, what="it reports")
    assert "25% 0.5" in cluster.eelctl("jobs").stdout
    assert "step 30 of 120, 0.5, as it says" in cluster.eelctl("get", key).stdout
    cluster.until(lambda: "up" in cluster.eelctl("logs", key).stdout, what="it handles the signal")
    cluster.eelctl("cancel", key)
    cluster.until(lambda: get(cluster, key).phase.is_ended, what="it ends by the warning")
    assert get(cluster, key).attempts[0].exit_code == 8
    assert get(cluster, key).progress.step == 30
