"""A real PostgreSQL for tests: a server of their own in a new folder, on loopback, never a service of the machine.

Owns the server's life: it runs as user postgres where the tests run as root, which PostgreSQL refuses, and is ended by its
own process id. Settings are those of a production server, fsync included, where a test does not say otherwise. Must not
know Eelgrid. Each test takes a database of its own on the one server of its process.
"""

import atexit
import contextlib
import functools
import importlib.util
import itertools
import os
import pwd
import select
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from pathlib import Path

import pytest

from tests.e2e.processes import free_port
from tests.waiting import poll_until

_PROGRAMS = Path("/usr/lib/postgresql")
_LIBRARIES = ("sqlalchemy", "psycopg", "alembic")
_START_S = 60.0
_SHOWN_LINES = 40


def find_programs():
    """The folder of the newest server that is installed; None without any."""
    if (found := shutil.which("initdb")) is not None:
        return Path(found).resolve().parent
    versions = [path for path in _PROGRAMS.glob("*/bin") if (path / "initdb").exists()]
    return max(versions, key=lambda path: int(path.parent.name), default=None)


@functools.cache
def find_missing():
    """What is not installed of what these tests need; empty if nothing is."""
    missing = [name for name in _LIBRARIES if importlib.util.find_spec(name) is None]
    if find_programs() is None:
        missing.append("postgresql (Debian: apt-get install postgresql)")
    elif not os.geteuid() and "postgres" not in {user.pw_name for user in pwd.getpwall()}:
        missing.append("the user postgres, as whom its server runs")
    return ", ".join(missing)


needs_server = pytest.mark.skipif(bool(find_missing()), reason=f"not installed: {find_missing()}")


class PostgresServer:
    """One server in a new folder; started by `start`, ended by `stop` or with the process.

    With `source` it is an asynchronous standby of that one, which has to run, until it is promoted.
    """

    def __init__(self, *settings, source=None, port=None):
        self.folder = Path(tempfile.mkdtemp(prefix="postgres-", dir="/tmp"))
        self.data = self.folder / "data"
        self.port = port or free_port()
        self._programs = find_programs()
        self._numbers = itertools.count(1)
        self._template = None
        self._user = None if os.geteuid() else pwd.getpwnam("postgres")
        self._process = None
        if self._user is not None:
            os.chown(self.folder, self._user.pw_uid, self._user.pw_gid)
        if source is None:
            make = ("initdb", "-U", "postgres", "-A", "trust", "-E", "UTF8", "--no-locale", "--no-sync")
        else:
            make = ("pg_basebackup", "-R", "-X", "stream", "-c", "fast", "--no-sync", "-d", source.url("postgres"))
        self.run(*make, "-D", self.data)
        lines = (f"port = {self.port}", "listen_addresses = '127.0.0.1'", f"unix_socket_directories = '{self.folder}'")
        with (self.data / "postgresql.conf").open("a") as file:
            file.write("\n".join(("", *lines, "max_connections = 200", *settings, "")))

    def run(self, program, *arguments):
        """Runs one of PostgreSQL's programs; returns what it printed."""
        done = subprocess.run(
            [*self._as_user(), self._programs / program, *map(str, arguments)],
            check=False,
            capture_output=True,
            text=True,
            timeout=_START_S,
            cwd=self.folder,
        )
        assert done.returncode == 0, f"{program} ended with {done.returncode}: {done.stdout}{done.stderr}"
        return done.stdout

    def _as_user(self):
        """A program that becomes the user: `subprocess` would fork for it, and gRPC's handlers may crash the child."""
        if self._user is None:
            return ()
        return ("setpriv", f"--reuid={self._user.pw_uid}", f"--regid={self._user.pw_gid}", "--clear-groups", "--")

    @property
    def pid(self):
        """The process that its others descend from."""
        return self._process.pid

    @property
    def log(self):
        """The file that the server writes its log to."""
        return self.folder / "log"

    def start(self):
        """Starts the server; returns when it answers."""
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [*self._as_user(), self._programs / "postgres", "-D", self.data],
                stdout=log,
                stderr=log,
                cwd=self.folder,
            )
        poll_until(self._answers, "PostgreSQL answers", within_s=_START_S)

    def _answers(self):
        import psycopg

        assert self._process.poll() is None, "\n".join(self.log.read_text().splitlines()[-_SHOWN_LINES:])
        with contextlib.suppress(psycopg.OperationalError), psycopg.connect(self.url("postgres"), connect_timeout=2):
            return True
        return False

    def promote(self):
        """Makes a primary of a standby; returns when it takes writes."""
        self.run("pg_ctl", "promote", "-w", "-D", self.data)

    def stop(self, number=signal.SIGINT):
        """Ends it: SIGINT stops fast, SIGQUIT as a crash would."""
        if self._process is not None:
            self._process.send_signal(number)
            self._process.wait(_START_S)
            self._process = None

    @contextlib.contextmanager
    def small_disk(self, megabytes=4):
        """A small file system for a tablespace, mounted until the end; skips where this process may mount none."""
        folder = self.folder / "small"
        folder.mkdir()
        mount = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", folder]
        done = subprocess.run(mount, check=False, capture_output=True)
        if done.returncode:
            pytest.skip(f"no file system can be mounted: {done.stderr.decode().strip()}")
        try:
            shutil.chown(folder, "postgres", "postgres")
            inner = folder / "tables"
            inner.mkdir()
            shutil.chown(inner, "postgres", "postgres")
            yield inner
            self.stop(signal.SIGQUIT)
        finally:
            subprocess.run(["umount", folder], check=True)

    def remove(self):
        """Ends it, and takes its folder away."""
        self.stop(signal.SIGQUIT)
        shutil.rmtree(self.folder, ignore_errors=True)

    def url(self, database):
        """The URL of one of its databases."""
        return f"postgresql://postgres@127.0.0.1:{self.port}/{database}"

    def create_database(self):
        """Makes an empty database; returns its URL."""
        name = f"test_{next(self._numbers)}"
        self.execute(f"CREATE DATABASE {name}")
        return self.url(name)

    def execute(self, statement, *values):
        """Runs a statement in the database of the administrator; returns its rows, if it has any."""
        import psycopg

        with psycopg.connect(self.url("postgres"), autocommit=True) as connection:
            done = connection.execute(statement, values)
            return done.fetchall() if done.description else None


@functools.cache
def shared_server():
    """The server of this process, started by the first test that needs it."""
    server = PostgresServer("fsync = off", "full_page_writes = off")
    atexit.register(server.remove)
    server.start()
    return server


def fill_disk(path):
    """Leaves no room for another page on the file system of a file."""
    with contextlib.suppress(OSError), path.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(8192))


class CuttingProxy:
    """Stands before a server, and cuts the connection that sends certain bytes next, or delays what clients send."""

    def __init__(self, port):
        self.cuts = []
        # How long each message of a client takes to the server.
        self.delay_s = 0.0
        self._server_port = port
        self._trap = None
        self._is_shut = False
        self._lock = threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]

    def __enter__(self):
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *reason):
        # Wakes whoever accepts.
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def cut_next(self, content, *, is_forwarded, is_shut=False):
        """Cuts at the next message with this content, before or after the server has answered it; then lets nobody in."""
        with self._lock:
            self._trap = (content, is_forwarded, is_shut)

    def open(self):
        """Lets connections in again."""
        self._is_shut = False

    def _accept(self):
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            if self._is_shut:
                client.close()
                continue
            threading.Thread(target=self._carry, args=(client,), daemon=True).start()

    def _carry(self, client):
        """Carries bytes of one connection both ways until either side ends, or it is cut."""
        # A server that is away accepts nobody.
        with client, contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self._server_port)) as server:
            while True:
                for source in select.select([client, server], [], [])[0]:
                    try:
                        content = source.recv(65536)
                        if not content or (source is client and self._is_cut(content, server)):
                            return
                        if source is client and self.delay_s:
                            time.sleep(self.delay_s)
                        (server if source is client else client).sendall(content)
                    except OSError:
                        return

    def _is_cut(self, content, server):
        with self._lock:
            if self._trap is None or self._trap[0] not in content:
                return False
            _, is_forwarded, self._is_shut = self._trap
            self._trap = None
        if is_forwarded:
            server.sendall(content)
            # Its answer comes when it is done, and goes nowhere.
            server.recv(65536)
        self.cuts.append(content)
        return True
