"""Our programs as processes of their own that need not begin from nothing.

Owns one server for each program, which has imported what the program imports, and its forks: each has its own
arguments, environment, folder, umask and streams, takes signals and ends with its own code. A fresh interpreter spends
a second of processor on imports, a controller three with its kernels, and a run of all tests starts a thousand of them.
Must not know what a test is about. How a program starts from nothing is the matter of tests that start it themselves.

A server imports and waits: no thread, no event loop and nothing of gRPC is started in it, which a fork would not
survive. A program dies with its server, and the server when its standard input ends, as it does however the process of
the tests ends (not with the thread that started it, as PR_SET_PDEATHSIG has it). The server reaps its forks and passes on how each
ended, so a caller looks for the end first and signals afterwards: a process id is never that of another process.

`python tests/fork_server.py SOCKET ARGUMENT ...` is one run by a server that listens there, for shells.
"""

import array
import atexit
import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

# What a program imports after it has begun, beside its main module.
_LATER = {
    "eelgrid_agent": (
        "eelgrid_agent.composition",
        "eelgrid_agent.simulation.node_files",
        "grpc_health.v1.health",
        "grpc_reflection.v1alpha.reflection",
    ),
    "eelgrid_controller": (
        "eelgrid_controller.composition",
        "eelgrid_kernels.warmup",
        "grpc_health.v1.health",
        "grpc_reflection.v1alpha.reflection",
    ),
    "eelgrid_controller.cli": (
        "eelgrid_controller.cli.connection",
        "eelgrid_controller.cli.replay",
        "eelgrid_protos.rpc",
        "eelgrid_protos.transport",
        "grpc.aio",
        "rich.live",
        "yaml",
    ),
}
PROGRAMS = frozenset(_LATER)
START_S = 120.0
_REQUEST_BYTES_MOST = 1 << 20
# Of prctl: the signal that a process gets when its parent has died.
_PR_SET_PDEATHSIG = 1
_servers = {}
_starting = threading.Lock()


class ForkedProcess:
    """A fork of a server: what tests use of subprocess.Popen."""

    def __init__(self, connection):
        self._connection = connection
        # Several threads may ask at once; one of them reads the answer.
        self._reading = threading.Lock()
        self.pid = int.from_bytes(self._receive(8), "big")
        self.returncode = None

    def _receive(self, size):
        found = b""
        while len(found) < size:
            part = self._connection.recv(size - len(found))
            if not part:
                raise ConnectionError("the fork server has ended")
            found += part
        return found

    def wait(self, timeout=None):
        """Its exit code, negative for a signal; raises TimeoutExpired."""
        while self.returncode is None:
            try:
                ready, _, _ = select.select([self._connection], [], [], timeout)
            except (OSError, ValueError):
                # Another thread has read the answer and closed the connection.
                if self.returncode is None:
                    raise
                break
            if not ready:
                raise subprocess.TimeoutExpired(["fork", str(self.pid)], timeout)
            with self._reading:
                if self.returncode is None:
                    self.returncode = int.from_bytes(self._receive(4), "big", signed=True)
                    self._connection.close()
        return self.returncode

    def poll(self):
        """Its exit code; None while it lives."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.wait(0.0)
        return None

    def send_signal(self, number):
        """Sends a signal, unless it has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self):
        """SIGKILL."""
        self.send_signal(signal.SIGKILL)


class ForkServer:
    """A process that has imported a program and forks it."""

    def __init__(self, program):
        self._folder = tempfile.TemporaryDirectory(prefix="eelgrid-fork-", ignore_cleanup_errors=True)
        self.socket = f"{self._folder.name}/server"
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("EELGRID_", "NUMBA_DISABLE"))}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.fork_server", "--serve", program, self.socket],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=Path(__file__).parents[1],
            env=environment,
        )
        with self._process.stdout as said:
            ready, _, _ = select.select([said], [], [], START_S)
            if not ready or said.readline() != b"ready\n":
                self.close()
                raise AssertionError(f"no fork server of {program}")

    def close(self):
        """Ends the server, and with it what it has forked."""
        self._process.kill()
        self._process.wait()
        self._process.stdin.close()
        self._folder.cleanup()

    def start(self, arguments, *, env, cwd, streams):
        """A run of the program with these three files as its streams, which are the caller's to close."""
        numbers = [stream.fileno() for stream in streams]
        return ForkedProcess(_request(self.socket, arguments, env, cwd, numbers))


def find_server(program):
    """The server of a program of PROGRAMS, started at the first call; it ends with this process."""
    with _starting:
        if program not in _servers:
            _servers[program] = ForkServer(program)
            atexit.register(_servers[program].close)
        return _servers[program]


def run_program(program, arguments, *, cwd=None, env=None, timeout_s=60.0, stdin=""):
    """One run of a program of PROGRAMS, as subprocess.run would make it, here and with this environment unless told; raises TimeoutExpired."""
    with contextlib.ExitStack() as open_files:
        files = [open_files.enter_context(tempfile.TemporaryFile("w+")) for _ in range(3)]
        files[0].write(stdin)
        files[0].seek(0)
        environment = os.environ if env is None else env
        child = find_server(program).start(arguments, env=environment, cwd=cwd or Path.cwd(), streams=files)
        try:
            code = child.wait(timeout_s)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
            raise
        for file in files[1:]:
            file.seek(0)
        return subprocess.CompletedProcess([program, *arguments], code, files[1].read(), files[2].read())


def _request(path, arguments, env, cwd, streams):
    mask = os.umask(0o022)
    os.umask(mask)
    wanted = {"arguments": [str(word) for word in arguments], "env": dict(env), "cwd": str(cwd), "umask": mask}
    text = json.dumps(wanted).encode("utf-8", "surrogateescape")
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(path)
    rights = array.array("i", streams).tobytes()
    connection.sendmsg([len(text).to_bytes(4, "big")], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
    connection.sendall(text)
    return connection


class _Server:
    """What listens in the server's process; `serve` returns in a fork with what it was asked for."""

    def __init__(self, path):
        self._path = path
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(path)
        self._listener.listen(64)
        self._wake, waker = socket.socketpair()
        self._waker = waker
        waker.setblocking(False)
        signal.set_wakeup_fd(waker.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._callers = {}

    def serve(self):
        while True:
            ready, _, _ = select.select([sys.stdin, self._listener, self._wake, *self._callers.values()], [], [])
            for one in ready:
                if one is sys.stdin:
                    # Nobody is left to be served, or to take this folder away; never more than it was made for.
                    Path(self._path).unlink(missing_ok=True)
                    with contextlib.suppress(OSError):
                        Path(self._path).parent.rmdir()
                    os._exit(0)
                elif one is self._wake:
                    self._wake.recv(4096)
                    self._reap()
                elif one is self._listener:
                    if (wanted := self._fork(self._listener.accept()[0])) is not None:
                        return wanted
                else:
                    self._on_caller(one)

    def _reap(self):
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                connection = self._callers.pop(ended[0], None)
                if connection is not None:
                    with connection, contextlib.suppress(OSError):
                        connection.sendall(os.waitstatus_to_exitcode(ended[1]).to_bytes(4, "big", signed=True))

    def _on_caller(self, connection):
        """A caller that has gone away takes its fork along."""
        for pid, known in self._callers.items():
            if known is connection and not connection.recv(1):
                os.kill(pid, signal.SIGKILL)
                del self._callers[pid]
                connection.close()
                return

    def _fork(self, connection):
        try:
            wanted, streams = self._receive(connection)
        except (OSError, ValueError):
            connection.close()
            return None
        if pid := os.fork():
            for stream in streams:
                os.close(stream)
            self._callers[pid] = connection
            with contextlib.suppress(OSError):
                connection.sendall(pid.to_bytes(8, "big"))
            return None
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for one in (self._listener, self._wake, self._waker, connection, *self._callers.values()):
            one.close()
        return wanted, streams

    @staticmethod
    def _receive(connection):
        head, streams, _, _ = socket.recv_fds(connection, 4, 3)
        size = int.from_bytes(head, "big")
        if len(head) != 4 or len(streams) != 3 or size > _REQUEST_BYTES_MOST:
            raise ValueError("not a request")
        text = b""
        while len(text) < size:
            part = connection.recv(size - len(text))
            if not part:
                raise ConnectionError("the caller has gone")
            text += part
        return json.loads(text.decode("utf-8", "surrogateescape")), streams


def _become(program, wanted, streams):
    """Turns a fork into the program, up to its main."""
    import ctypes

    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # A run of the tests in the background of a shell ignores it, as do its children.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    sys.stdin, sys.stdout = open(0, closefd=False), open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
    os.environ.clear()
    os.environ.update(wanted["env"])
    time.tzset()
    os.umask(wanted["umask"])
    os.chdir(wanted["cwd"])
    sys.argv = [program, *wanted["arguments"]]
    # Its own children look for the main module here.
    main = sys.modules["__main__"] = sys.modules[f"{program}.__main__"]
    return main.main


def _serve(program, path):
    import gc
    import importlib

    for name in (f"{program}.__main__", *_LATER[program]):
        importlib.import_module(name)
    if "eelgrid_kernels.warmup" in _LATER[program]:
        sys.modules["eelgrid_kernels.warmup"].warm_kernels()
    server = _Server(path)
    gc.collect()
    gc.freeze()
    os.write(1, b"ready\n")
    return _become(program, *server.serve())


def _ask(path, arguments):
    """One run by the server that listens there, with the streams and signals of this process."""
    child = ForkedProcess(_request(path, arguments, os.environ, Path.cwd(), (0, 1, 2)))
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: child.send_signal(number))
    return child.wait()


if __name__ == "__main__":
    if sys.argv[1] == "--serve":
        sys.exit(_serve(*sys.argv[2:])())
    code = _ask(sys.argv[1], sys.argv[2:])
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    sys.exit(code)
