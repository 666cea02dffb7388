"""The launcher: runs one process of a workload, and stays until everything that it started is gone.

It is forked by `launcher_server`, has one thread, imports the standard library only, has a session of its own and outlives
both the server and the agent. Its folder has the command in the records of the attempt (`attempt_records`), to which it adds a step before
the start, and another when nothing is left; and the output (`output.log`).

A process that is asked input of has a pipe or a terminal, which the launcher keeps open: so it is there however often
the agent is replaced. The agent connects to `input.sock` in the folder, where each packet is a letter and what it
carries: `d` data, `e` the end, `s` rows and columns. Each is answered by `a` once it is taken, or `x` if nobody reads
it any more; `o` tells that there is output. The next packet is read when the last is taken, so nothing piles up here.

As a subreaper it is the parent of every orphan below it, so that a process that left its session is found as well; in a
cgroup of its own they are killed at once, without a race against fork. It reads the output through a pipe, so that
neither a full disk nor the limit of the log stops the process. SIGTERM asks it to stop the process: the stop signal to
its group, then KILL to all that is left when the grace is over. Time limits count suspended time.

Where the agent has named a file of its last contact with the controller (`contact.py`), the process is stopped as well
once that is too old, whether the agent lives or not: the controller may start it elsewhere then.
"""

import contextlib
import ctypes
import errno
import fcntl
import json
import os
import select
import signal
import socket
import struct
import termios
import time
import traceback

from eelgrid_agent.engine.mps_control import terminate_clients

TYPE_CHECKING = False
if TYPE_CHECKING:
    # Not loaded by the server, which is small.
    from typing import Any

# Loaded once, by the server.
_LIBC = ctypes.CDLL(None, use_errno=True)
_SUBREAPER = 36
_CHUNK_BYTES = 65_536
# While what was killed is still there; a process in an uninterruptible call ends when that returns.
_KILL_AGAIN_S = 0.02
# How often the last contact with the controller is looked at, at least so many times until it is too old.
_CONTACT_S_MOST = 5.0
_LOOKS_PER_FENCE = 4.0
# For each of the two questions to an MPS daemon before.
_TERMINATE_S = 2.0
# Its output is read for so long after it ended and nothing of it is left.
_DRAIN_CHUNKS_MOST = 64
# As waitpid has it.
_FAILED = 126 << 8
_NOT_FOUND, _NOT_EXECUTABLE = 127, 126
_UMASK = 0o022
IGNORED_BY_PYTHON = frozenset((signal.SIGPIPE, signal.SIGXFSZ))
# Of input: a letter, and what the contract allows in one message.
INPUT_PACKET_BYTES_MOST = 1 + 16_384
INPUT_SOCKET = "input.sock"
RECORDS = "records.jsonl"
# Why an attempt ended that was told to.
STOPPED = "stopped"
_END_OF_FILE = b"\x04"
_LINE_ENDS = (b"\n", b"\r", _END_OF_FILE)
# Linux takes 4096 bytes for a path.
REQUEST_BYTES_MOST = 8192


def append_record(descriptor: int, step: str, content: object) -> None:
    """Adds a step to the records of an attempt (`attempt_records`); raises OSError."""
    # The first byte ends a line that was cut short.
    data = b"\n" + json.dumps({step: content}).encode() + b"\n"
    while data:
        data = data[os.write(descriptor, data) :]


def read_start_ticks(pid: int) -> int:
    """Returns when a process was started, in ticks since boot: with it a reused id is told apart; 0 if it is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return int(file.read().rpartition(b")")[2].split()[19])
    except (OSError, IndexError, ValueError):
        return 0


def list_descendants(root: int) -> list[int]:
    """Lists the ids of all processes below one, by their parents as they are now."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                parent = int(file.read().rpartition(b")")[2].split()[1])
        except (OSError, IndexError, ValueError):
            continue
        children.setdefault(parent, []).append(int(name))
    found, waiting = [], [root]
    while waiting:
        below = children.get(waiting.pop(), [])
        found += below
        waiting += below
    return found


class BoundedLog:
    """A file that grows to a limit; what does not fit, and what a full disk refuses, is discarded and noted.

    It is made with the first output, so that no start waits for it.
    """

    def __init__(self, path: str, bytes_most: int, uid: int) -> None:
        self._path, self._uid = path, uid
        self._file = -1
        self._left = self._bytes_most = bytes_most
        self._is_noted = False

    def write(self, data: bytes) -> None:
        """Appends as much as fits."""
        if not data:
            return
        kept = data[: self._left]
        self._append(kept)
        self._left -= len(kept)
        if len(kept) < len(data) and not self._is_noted:
            self._is_noted = True
            self._append(f"\n[eelgrid: output beyond {self._bytes_most} bytes is discarded]\n".encode())

    def _append(self, data: bytes) -> None:
        # A full disk costs output, not the process.
        with contextlib.suppress(OSError):
            if self._file < 0:
                self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
                # Counted against the user's quota, where there is one; -1 leaves it.
                os.fchown(self._file, self._uid, -1)
            while data:
                data = data[os.write(self._file, data) :]


class JobInput:
    """Standard input of the process, a pipe or a terminal, and the socket by which the agent passes it on.

    The newest connection is served: the agent of the one before has ended, or has lost it.
    """

    def __init__(self, folder: str, *, is_terminal: bool, rows: int, columns: int, poll: "select.poll") -> None:
        self._poll, self._is_terminal = poll, is_terminal
        if is_terminal:
            self.output, self.child_end = os.openpty()
            # A descriptor of its own, since output is waited for apart from room for input.
            self._target = os.dup(self.output)
            self._set_size(rows, columns)
        else:
            self.output = -1
            self.child_end, self._target = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self._target, False)
        self._is_open = True
        # What the process has not taken, and whether the agent that sent it waits for the answer.
        self._pending, self._is_awaited = b"", False
        self._is_line_begun = False
        self._connection: socket.socket | None = None
        self._listener = _listen(folder)
        poll.register(self._listener.fileno(), select.POLLIN)

    def serve(self, descriptor: int) -> None:
        """Does what one of its descriptors is ready for."""
        if descriptor == self._listener.fileno():
            with contextlib.suppress(OSError):
                self._accept(self._listener.accept()[0])
        elif self._connection is not None and descriptor == self._connection.fileno():
            self._receive(self._connection)
        elif self._is_open and descriptor == self._target:
            self._write()

    def ring(self) -> None:
        """Tells the agent that there is output; it looks for itself now and then."""
        self._send(b"o")

    def _accept(self, connection: socket.socket) -> None:
        self._disconnect()
        connection.setblocking(False)
        self._connection, self._is_awaited = connection, False
        if not self._pending:
            self._poll.register(connection.fileno(), select.POLLIN)

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._unregister(self._connection.fileno())
            self._connection.close()
            self._connection = None

    def _receive(self, connection: socket.socket) -> None:
        try:
            packet = connection.recv(INPUT_PACKET_BYTES_MOST)
        except BlockingIOError:
            return
        except OSError:
            packet = b""
        letter, content = packet[:1], packet[1:]
        if not letter:
            self._disconnect()
        elif not self._is_open:
            self._send(b"x")
        elif letter == b"s":
            with contextlib.suppress(ValueError, OSError):
                self._set_size(*map(int, content.split()))
            self._send(b"a")
        elif letter == b"e" and not self._is_terminal:
            self._close_target()
            self._send(b"a")
        else:
            # Within a line, an end of file ends the line only.
            ends = _END_OF_FILE * (2 if self._is_line_begun else 1)
            self._pending, self._is_awaited = ends if letter == b"e" else content, True
            self._write()

    def _set_size(self, rows: int, columns: int) -> None:
        if self._is_terminal:
            fcntl.ioctl(self._target, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def _write(self) -> None:
        """Passes on what waits; the next packet is read once it is gone."""
        answer = b"a"
        try:
            while self._pending:
                count = os.write(self._target, self._pending)
                self._is_line_begun = self._pending[count - 1 : count] not in _LINE_ENDS
                self._pending = self._pending[count:]
        except BlockingIOError:
            self._poll.register(self._target, select.POLLOUT)
            if self._connection is not None:
                self._unregister(self._connection.fileno())
            return
        except OSError:
            # The process has closed its end.
            answer, self._pending = b"x", b""
            self._close_target()
        if self._is_open:
            self._unregister(self._target)
        if self._is_awaited:
            self._is_awaited = False
            self._send(answer)
        if self._connection is not None:
            self._poll.register(self._connection.fileno(), select.POLLIN)

    def _close_target(self) -> None:
        self._is_open = False
        self._unregister(self._target)
        os.close(self._target)

    def _unregister(self, descriptor: int) -> None:
        with contextlib.suppress(KeyError):
            self._poll.unregister(descriptor)

    def _send(self, letter: bytes) -> None:
        if self._connection is None:
            return
        try:
            self._connection.send(letter)
        except OSError as error:
            # An agent that reads no answers learns of it by the end of its connection; a bell may be lost.
            if letter != b"o" or error.errno != errno.EAGAIN:
                self._disconnect()


def _listen(folder: str) -> socket.socket:
    """Listens on the socket of a folder, for this user alone; by a relative name, since a path may be too long."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    os.chdir(folder)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(INPUT_SOCKET)
    umask = os.umask(0o177)
    try:
        listener.bind(INPUT_SOCKET)
    finally:
        os.umask(umask)
        os.chdir("/")
    listener.setblocking(False)
    listener.listen(4)
    return listener


class ProcessGroupKiller:
    """Ends everything below this process: by its cgroup where there is one, else by going through the tree."""

    def __init__(self, cgroup: str, mps_program: str = "", mps_pipes: str = "") -> None:
        self._cgroup, self._mps_program, self._mps_pipes = cgroup, mps_program, mps_pipes

    def kill(self) -> None:
        """Sends KILL to every process; a new one that a fork made meanwhile is for the next call."""
        if self._mps_program:
            # Once: a daemon that does not answer now would not for the next process.
            program, self._mps_program = self._mps_program, ""
            terminate_clients(program, self._mps_pipes, list_descendants(os.getpid()), _TERMINATE_S)
        if self._cgroup:
            try:
                with open(os.path.join(self._cgroup, "cgroup.kill"), "w", encoding="ascii") as file:
                    file.write("1")
            except OSError:
                # Before Linux 5.14.
                pass
            else:
                return
        found = list_descendants(os.getpid())
        # Stopped first, so that none of them forks while the others are killed.
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for pid in found:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, number)


class Launcher:
    """One process, from its start to its exit record."""

    def __init__(self) -> None:
        """Prepares this process for what is the same for every attempt."""
        _LIBC.prctl(_SUBREAPER, 1, 0, 0, 0)
        self._wake, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGTERM, self._on_stop)
        signal.signal(signal.SIGCHLD, wake_poll)
        for number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
            # Not ignored, which the process would inherit.
            signal.signal(number, wake_poll)
        self._poll = select.poll()
        self._poll.register(self._wake, select.POLLIN)
        self._identity = {"pid": os.getpid(), "start_ticks": read_start_ticks(os.getpid())}
        self._folder, self._records = "", -1
        self._spec: dict[str, Any] = {}
        self._killer = ProcessGroupKiller("")
        self._pid = 0
        self._status: int | None = None
        self._reason = ""
        self._stop_due = False
        self._kill_at_s: float | None = None
        # When the warning was sent, and when the stop signal follows it if it must end before its time limit.
        self._is_warned = False
        self._stop_at_s: float | None = None
        self._limit_at_s: float | None = None
        # When the last contact with the controller is looked at next, and what was read last.
        self._contact_at_s: float | None = None
        self._contact = 0.0, 0.0
        self._looked_s = 0.0
        self._is_silent = False
        self._started_ns = 0
        self._input: JobInput | None = None

    def wait_for_attempt(self, requests: socket.socket) -> bool:
        """Waits for the folder of an attempt and its records, open and locked; False if none will come.

        The server hands a request over before it tells the agent of this process, so a stop that comes without one is
        not for an attempt.
        """
        self._poll.register(requests.fileno(), select.POLLIN)
        while all(descriptor == self._wake for descriptor, _ in self._poll.poll()):
            if self._stop_due:
                return False
            os.read(self._wake, 4096)
        self._poll.unregister(requests.fileno())
        folder, passed, _, _ = socket.recv_fds(requests, REQUEST_BYTES_MOST, 1)
        requests.close()
        if not folder:
            return False
        (self._records,) = passed
        os.set_inheritable(self._records, False)
        self._folder = os.fsdecode(folder)
        self._spec = json.loads(os.pread(self._records, os.fstat(self._records).st_size, 0))["spec"]
        pipes = self._spec["environment"].get("CUDA_MPS_PIPE_DIRECTORY", "")
        self._killer = ProcessGroupKiller(self._spec["cgroup"], self._spec.get("mps_program", ""), pipes)
        return True

    def run(self) -> None:
        """Runs the process of the attempt to its end."""
        owner = self._spec.get("user") or {}
        log = BoundedLog(os.path.join(self._folder, "output.log"), self._spec["log_bytes_most"], owner.get("uid", -1))
        poll = self._poll
        self._started_ns = time.time_ns()
        if self._spec.get("contact"):
            self._looked_s = _now_s()
            self._contact = self._looked_s, 0.0
            self._contact_at_s = 0.0
        running = self._identity | {"started_ns": self._started_ns}
        append_record(self._records, "running", running)
        os.fsync(self._records)
        output = self._start(poll)
        while not self._reap():
            self._act()
            for descriptor, _ in poll.poll(self._timeout_ms()):
                if descriptor == self._wake:
                    os.read(self._wake, 4096)
                elif descriptor != output:
                    assert self._input is not None
                    self._input.serve(descriptor)
                elif not _copy_chunk(output, log):
                    # Every writer is gone, or has closed its output.
                    poll.unregister(output)
                elif self._input is not None:
                    self._input.ring()
        for _ in range(_DRAIN_CHUNKS_MOST):
            if not _copy_chunk(output, log):
                break
        # The agent flushes it, unless the controller has written it down first.
        append_record(self._records, "exit", self._exit_record())

    def _start(self, poll: "select.poll") -> int:
        """Starts the process; why it cannot be started becomes its reason. Returns where its output is read."""
        if self._is_late():
            # An order that waited in a stopped agent.
            return -1
        try:
            self._make_checkpoint_folder()
            streams, output = self._open_streams(poll)
        except OSError as error:
            self._reason, self._status = f"cannot prepare its start: {error.strerror or error}", _FAILED
            return -1
        try:
            if not (_is_spawnable(self._spec) and self._spawn(streams)):
                self._fork(streams)
        finally:
            for descriptor in set(streams):
                os.close(descriptor)
        if self._spec["time_limit_s"]:
            self._limit_at_s = _now_s() + self._spec["time_limit_s"]
        os.set_blocking(output, False)
        poll.register(output, select.POLLIN)
        return output

    def _make_checkpoint_folder(self) -> None:
        """Makes the folder of checkpoints, unless an attempt before has."""
        folder = str(self._spec["environment"]["EELGRID_CHECKPOINT_DIR"])
        with contextlib.suppress(FileExistsError):
            os.mkdir(folder, 0o700)
        if "user" in self._spec:
            uid, gid = self._spec["user"]["uid"], self._spec["user"]["gid"]
            # The id may be that of somebody's job that the controller has forgotten since.
            if os.stat(folder).st_uid not in (uid, os.geteuid()):
                problem = f"{folder} is another user's; submit the job under another id, or remove the folder"
                raise OSError(errno.EPERM, problem)
            os.chown(folder, uid, gid)

    def _spawn(self, streams: "tuple[int, int]") -> bool:
        """Starts the process without a copy of this one, which would cost more than the rest of a start.

        Returns whether this interpreter can.
        """
        try:
            os.umask(_UMASK)
            self._reason = _enter(str(self._spec["working_directory"]))
            if self._reason:
                self._status = _NOT_EXECUTABLE << 8
            elif not self._is_late():
                self._pid = _spawn_command(self._spec["argv"], self._spec["environment"], streams)
        except OSError as error:
            code, self._reason = _describe_failure(str(self._spec["argv"][0]), error)
            self._status = code << 8
        except NotImplementedError:
            # Built for a C library without sessions in `posix_spawn`.
            return False
        finally:
            os.chdir("/")
        return True

    def _fork(self, streams: "tuple[int, int]") -> None:
        failure, failure_write = os.pipe2(os.O_CLOEXEC)
        self._pid = os.fork()
        if self._pid == 0:
            fence_after_s = self._contact[1]
            late_at_s = self._looked_s + fence_after_s if fence_after_s else float("inf")
            _run_command(self._spec | {"late_at_s": late_at_s}, streams, failure_write)
        os.close(failure_write)
        problem = b""
        while part := os.read(failure, 4096):
            problem += part
        os.close(failure)
        self._reason = problem.decode("utf-8", "replace")
        if self._contact_at_s is not None:
            # Its folder or its program may have been on a disk that was away.
            self._look_for_contact(_now_s())

    def _is_late(self) -> bool:
        """Returns whether a process must not start any more, since it may run elsewhere by now."""
        is_late = self._contact_at_s is not None and self._look_for_contact(_now_s())
        if is_late:
            self._status = _FAILED
        return is_late

    def _open_streams(self, poll: "select.poll") -> "tuple[tuple[int, int], int]":
        """Opens standard input and output of the process, and what its output is read from."""
        kind = self._spec.get("input")
        if kind is None:
            source = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
        else:
            rows, columns = self._spec["terminal_size"]
            self._input = JobInput(self._folder, is_terminal=kind == "terminal", rows=rows, columns=columns, poll=poll)
            source = self._input.child_end
            self._give_to_user(source)
        if self._input is not None and self._input.output >= 0:
            return (source, source), self._input.output
        output, output_write = os.pipe2(os.O_CLOEXEC)
        self._give_to_user(output_write)
        return (source, output_write), output

    def _give_to_user(self, stream: int) -> None:
        """Lets the process open a stream of its own by its name, such as /dev/stderr."""
        if "user" in self._spec:
            os.fchown(stream, self._spec["user"]["uid"], -1)

    def _on_stop(self, _number: int, _frame: object) -> None:
        self._stop_due = True

    def _act(self) -> None:
        """Does what is due: a stop, the time limit, the end of the grace, and what the process left behind."""
        now_s = _now_s()
        if self._status is not None:
            self._killer.kill()
            return
        if self._kill_at_s is None:
            self._act_before_stop(now_s)
        if self._kill_at_s is not None and now_s >= self._kill_at_s:
            self._killer.kill()
            self._kill_at_s = now_s + _KILL_AGAIN_S

    def _act_before_stop(self, now_s: float) -> None:
        """Sends the warning and the stop signal when they are due."""
        warn_before_s = self._spec.get("warn_before_s", 0.0)
        if self._contact_at_s is not None and now_s >= self._contact_at_s:
            self._look_for_contact(now_s)
        if self._limit_at_s is not None and now_s >= self._limit_at_s:
            self._begin_stop(f"time limit of {self._spec['time_limit_s']:g} s", now_s)
        elif self._stop_due and self._stop_at_s is None:
            self._reason = self._reason or STOPPED
            self._stop_at_s = now_s + (0.0 if self._is_warned or not self._warns else warn_before_s)
            self._warn()
        elif self._limit_at_s is not None and now_s >= self._limit_at_s - warn_before_s:
            self._warn()
        if self._kill_at_s is None and self._stop_at_s is not None and now_s >= self._stop_at_s:
            self._begin_stop(STOPPED, now_s)

    def _look_for_contact(self, now_s: float) -> bool:
        """Begins a stop if the controller was not heard for too long, and returns whether that is so.

        Where the file cannot be read, what was read last holds. A time at which nobody looked counts as silence, since
        the controller may have been heard again only at its end.
        """
        try:
            with open(self._spec["contact"], "rb") as file:
                noted = json.loads(file.read())
            self._contact = float(noted["contact_s"]), float(noted["fence_after_s"])
        except (OSError, ValueError, KeyError, TypeError):
            pass
        contact_s, fence_after_s = self._contact
        silent_s, self._looked_s = now_s - min(contact_s, self._looked_s), now_s
        self._contact_at_s = now_s + min(_CONTACT_S_MOST, (fence_after_s or _CONTACT_S_MOST) / _LOOKS_PER_FENCE)
        if fence_after_s and silent_s >= fence_after_s and not self._stop_due:
            self._is_silent = self._stop_due = True
            self._reason = self._reason or f"no controller was heard for {fence_after_s:g} s"
        return self._is_silent

    @property
    def _warns(self) -> bool:
        return bool(self._spec.get("warn_signal"))

    def _warn(self) -> None:
        if self._warns and not self._is_warned:
            self._is_warned = True
            self._signal_group(self._spec["warn_signal"])

    def _begin_stop(self, reason: str, now_s: float) -> None:
        self._reason = self._reason or reason
        self._kill_at_s = now_s + self._spec["grace_s"]
        self._signal_group(self._spec["stop_signal"])

    def _signal_group(self, name: str) -> None:
        # A program with rights of its own, such as sudo, cannot be told.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._pid, getattr(signal, f"SIG{name}"))

    def _timeout_ms(self) -> int:
        if self._status is not None:
            return int(_KILL_AGAIN_S * 1000)
        due = [self._kill_at_s]
        if self._kill_at_s is None:
            limit_at_s = self._limit_at_s
            if limit_at_s is not None and self._warns and not self._is_warned:
                limit_at_s -= self._spec["warn_before_s"]
            due = [limit_at_s, self._stop_at_s, self._contact_at_s]
        waits = [at for at in due if at is not None]
        return -1 if not waits else max(0, min(60_000, int((min(waits) - _now_s()) * 1000) + 1))

    def _reap(self) -> bool:
        """Collects what has ended; returns whether nothing is left."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return True
            if pid == 0:
                return False
            if pid == self._pid:
                self._status = status

    def _exit_record(self) -> dict[str, object]:
        status = self._status or 0
        is_signalled = os.WIFSIGNALED(status)
        if is_signalled and not self._reason and _was_out_of_memory(self._spec["cgroup"]):
            self._reason = "out of memory"
        return {
            "exit_code": None if is_signalled else os.WEXITSTATUS(status),
            "signal": os.WTERMSIG(status) if is_signalled else 0,
            "reason": self._reason,
            "node_fault": self._reason if self._is_silent else "",
            "started_ns": self._started_ns,
            "ended_ns": max(self._started_ns, time.time_ns()),
        }


def wake_poll(_number: int, _frame: object) -> None:
    """Wakes the poll, by the wake-up descriptor."""


def _now_s() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def _copy_chunk(output: int, log: BoundedLog) -> bool:
    """Copies some output; returns whether there may be more."""
    try:
        data = os.read(output, _CHUNK_BYTES)
    except OSError:
        # Nothing yet; or a terminal that no process has any more.
        return False
    log.write(data)
    return bool(data)


def _was_out_of_memory(cgroup: str) -> bool:
    try:
        with open(os.path.join(cgroup, "memory.events"), encoding="ascii") as file:
            return any(int(line.split()[1]) > 0 for line in file if line.startswith("oom_kill "))
    except OSError:
        return False


def _is_spawnable(spec: dict[str, object]) -> bool:
    """Returns whether a process needs nothing between fork and exec that only its own code can do."""
    return not spec["cgroup"] and not spec.get("user") and spec.get("input") != "terminal"


def _spawn_command(argv: "list[str]", environment: "dict[str, str]", streams: "tuple[int, int]") -> int:
    """Starts a command, found as `os.execvpe` finds it, in a session of its own; raises OSError."""
    source, output = streams
    actions = [(os.POSIX_SPAWN_DUP2, source, 0), *((os.POSIX_SPAWN_DUP2, output, target) for target in (1, 2))]
    folders = [b""] if "/" in argv[0] else os.get_exec_path(environment)
    refused: OSError = FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
    for folder in folders:
        program = os.path.join(os.fsencode(folder), os.fsencode(argv[0]))
        try:
            # To look is cheaper than a process that finds nothing.
            os.stat(program)
            return os.posix_spawn(
                program,
                argv,
                environment,
                file_actions=actions,
                setsid=True,
                setsigmask=(),
                setsigdef=IGNORED_BY_PYTHON,
            )
        except OSError as error:
            # One that is there and cannot be run is what the user wants to hear of.
            if error.errno not in (errno.ENOENT, errno.ENOTDIR) and isinstance(refused, FileNotFoundError):
                refused = error
    raise refused


def _enter(directory: str) -> str:
    """Makes a folder the current one; returns why that is impossible."""
    try:
        os.chdir(directory)
    except OSError as error:
        return f"cannot enter {directory}: {os.strerror(error.errno or errno.EIO)}"
    return ""


def _describe_failure(program: str, error: OSError) -> "tuple[int, str]":
    """Returns the exit code, as a shell has it, and the reason of a command that cannot be executed."""
    if isinstance(error, FileNotFoundError):
        return _NOT_FOUND, f"cannot run {program!r}: not found"
    return _NOT_EXECUTABLE, f"cannot run {program!r}: {os.strerror(error.errno or errno.EIO)}"


def _run_command(spec: dict[str, object], streams: "tuple[int, int]", failure: int) -> None:
    """In the child: becomes the command; never returns."""
    code, problem, program = _NOT_EXECUTABLE, "", str(spec["argv"][0])  # type: ignore[index]
    try:
        problem = _become(spec, streams)
    except OSError as error:
        code, problem = _describe_failure(program, error)
    except BaseException as error:  # noqa: BLE001  # whatever it is, two launchers must not run on
        problem = f"cannot start: {error}"
    with contextlib.suppress(OSError):
        os.write(failure, problem.encode("utf-8", "replace")[:1000])
    os._exit(code)


def _become(spec: dict[str, object], streams: "tuple[int, int]") -> str:
    """Sets up the process and executes the command; returns why that is impossible, or raises OSError."""
    os.setsid()
    if spec.get("input") == "terminal":
        fcntl.ioctl(streams[0], termios.TIOCSCTTY, 0)
    if spec["cgroup"]:
        with open(os.path.join(str(spec["cgroup"]), "cgroup.procs"), "w", encoding="ascii") as file:
            file.write("0")
    user = spec.get("user")
    if user:
        # From here on with the user's rights: its folder, its program.
        os.setgroups(user["groups"])  # type: ignore[index]
        os.setgid(user["gid"])  # type: ignore[index]
        os.setuid(user["uid"])  # type: ignore[index]
    problem = _enter(str(spec["working_directory"]))
    if problem:
        return problem
    if _now_s() >= spec["late_at_s"]:  # type: ignore[operator]
        return "no controller was heard while it started"
    os.umask(_UMASK)
    source, output = streams
    for descriptor, target in ((source, 0), (output, 1), (output, 2)):
        os.dup2(descriptor, target)
    # What has a handler here gets its default by exec.
    signal.set_wakeup_fd(-1)
    for number in IGNORED_BY_PYTHON:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    argv: list[str] = list(spec["argv"])  # type: ignore[call-overload]
    # All other descriptors, the lock among them, close on exec.
    os.execvpe(argv[0], argv, dict(spec["environment"]))  # type: ignore[call-overload]  # noqa: S606
    return "cannot start"


def run_launcher(requests: socket.socket, unused: "tuple[int, ...]") -> None:
    """In a child of the server: is a launcher; never returns.

    Closes the descriptors of the server. The records of its attempt stay open, and locked, until the end.
    """
    code = 1
    try:
        os.setsid()
        signal.set_wakeup_fd(-1)
        for descriptor in unused:
            os.close(descriptor)
        launcher = Launcher()
        if launcher.wait_for_attempt(requests):
            launcher.run()
        code = 0
    except BaseException:  # noqa: BLE001  # whatever it is, two servers must not run on
        traceback.print_exc()
    finally:
        os._exit(code)
