"""The local engine: starts launchers, watches their ends, and adopts those that a previous run of the agent started.

Each attempt has a folder, made once. Its records (attempt_records.py) are locked by the launcher from before it begins
until it ends, since it inherits the descriptor: so whether one lives is known without a process id. After a restart of
the agent:

    lock held               the launcher lives: it is watched through a pidfd, and never started again
    lock free, exit         it has ended: the record is reported
    lock free, running      its process may have run: LOST, after what is left of it was killed
    lock free, neither      its process never began: a plan that still names it starts it

A folder is moved to `collected` when its end is known to the controller, and stays there for a while for its output.

Each attempt leases its devices before its launcher starts, and until its end was collected (enforce/device_leases.py);
one that is refused never begins, and returns to the queue.

A fork server starts the launchers. If it is killed during a start, the table says what became of that start.

Used on one event loop; files and starts are small enough for it (about 2 ms for a start). Whoever waits for a GPU waits
for this: a file that is made costs more than all that is computed here, so few are made.
"""

import asyncio
import contextlib
import hashlib
import logging
import os
import shutil
import signal
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any
from urllib.parse import quote

from eelgrid_agent.devices.host import read_boot_id
from eelgrid_agent.enforce.device_leases import DeviceLeases
from eelgrid_agent.enforce.lease_table import LOCAL_ENGINE, LeaseDevice, LeaseEntry, LeaseHolder, LeaseRefused
from eelgrid_agent.engine import launcher
from eelgrid_agent.engine.attempt_records import (
    flush_records,
    is_launcher_alive,
    lock_records,
    read_records,
    record_exit,
    was_launcher_forked,
)
from eelgrid_agent.engine.cgroups import AttemptCgroups
from eelgrid_agent.engine.contact import LeaderContact
from eelgrid_agent.engine.fork_server import REQUESTS_MOST, ForkServer, ForkServerEnded
from eelgrid_agent.engine.input import InputConnection
from eelgrid_agent.engine.job_notes import read_checkpoint_note, read_progress_note
from eelgrid_agent.engine.mps import MpsDaemons
from eelgrid_agent.engine.output import read_output
from eelgrid_agent.engine.port import AttemptKey, attempt_key, is_gpu_shared
from eelgrid_agent.engine.process_environments import iterate_environments
from eelgrid_agent.engine.users import JobUser, JobUsers, UserRefused
from eelgrid_protos.messages import (
    Assignment,
    AttemptState,
    AttemptStatus,
    InputChunk,
    InputResult,
    LogChunk,
    LogRequest,
    ProcessSpec,
    StandardInput,
    TerminalSize,
)
from eelgrid_protos.plain_messages import digest_plain, to_plain

_LOG = logging.getLogger("eelgrid.agent")
# In the state directory of the agent.
PROCESSES = "processes"
_OUTPUT = "output.log"
# By which versions before 0.3 marked the folder of what was collected.
_COLLECTED = "collected"
# A launcher says within milliseconds that it runs.
_LOOK_AGAIN_S = 0.01
# By which a job says that its checkpoint is whole: JSON with the time, `client/eelgrid/checkpoint.py` writes it.
_CHECKPOINT_NOTE = ".eelgrid-checkpoint"
# By which it says how far it is: `client/eelgrid/progress.py` writes it.
_PROGRESS_NOTE = ".eelgrid-progress"
# Who reads a checkpoint's time compares it with seconds of run time.
_CHECKPOINTS_READ_S = 2.0
# Ends that are remembered after nobody named the attempt any more: far more than a database's standby is behind.
_ENDED_MOST = 1024
_KILL_AGAIN_S = 0.05
# An end that the controller has not taken by then is flushed.
_FLUSH_S = 1.0
_STARTS_MOST = 3
# Folders of ended attempts that are kept for their output.
_KEPT_MOST = 1000
_NOT_KEPT = "the node keeps none of it"
_FOLDER_NAME_MOST = 180
# Of an attempt's reason in the contract.
_REASON_MOST = 253
_DEFAULT_PATH = "/usr/local/bin:/usr/bin:/bin"
_DEFAULT_LOG_BYTES_MOST = 64 * 1024 * 1024


class _Attempt:
    """One attempt: its folder, its newest status, and the launcher while it lives."""

    def __init__(self, folder: Path, status: AttemptStatus) -> None:
        self.folder = folder
        self.status = status
        self.pidfd = -1
        self.is_stop_due = False
        # Of the note of its checkpoint that was read last.
        self.checkpoint_mtime_ns = self.progress_mtime_ns = 0
        # To its launcher, while somebody is attached.
        self.input: InputConnection | None = None
        # What it ran, where this run of the agent started it; and whether it is told a second time.
        self.process: ProcessSpec | None = None
        self.is_repeated = False


class LocalEngine:
    """Runs processes as their users; implements `port.ProcessEngine`."""

    def __init__(
        self,
        folder: Path,
        *,
        cgroups: AttemptCgroups | None = None,
        checkpoints_read_s: float = _CHECKPOINTS_READ_S,
        users: JobUsers | None = None,
        leases: DeviceLeases | None = None,
        mps: MpsDaemons | None = None,
        contact: LeaderContact | None = None,
    ) -> None:
        """Reads the notes of checkpoints in this interval; raises OSError for a folder that cannot be used.

        Without `users` every process runs as this process's own user; without `leases` no other engine is here; without
        `mps` processes that share a GPU take turns on it, without `contact` they run on whatever becomes of the controller.
        """
        self.contact = contact or LeaderContact()
        self._leases, self._mps, self._boot_id = leases, mps, read_boot_id()
        if mps is not None:
            mps.on_settled = self._on_mps_settled
        self.on_change: Callable[[], None] = _ignore_change
        self.on_output: Callable[[], object] = _ignore_change
        self._attempts: dict[AttemptKey, _Attempt] = {}
        # Of those forgotten last, how they ended: a journal that lost its last entries names them again.
        self._ended: OrderedDict[AttemptKey, _Attempt] = OrderedDict()
        self._folder, self._collected = folder / "attempts", folder / "collected"
        self._checkpoints = folder / "checkpoints"
        # Folders of collected attempts, the oldest first.
        self._kept: deque[Path] = deque()
        self._cgroups = cgroups or AttemptCgroups(None)
        self._is_reading_due, self._checkpoints_read_s = False, checkpoints_read_s
        self.fork_server = ForkServer(folder / "launchers.log")
        for made in (self._folder, self._collected, self._checkpoints):
            made.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._users = users
        if users is not None and users.changes_user:
            # Users reach their checkpoints by name, and list nothing of others.
            for passed in (folder.parent, folder, self._checkpoints):
                passed.chmod(passed.stat().st_mode & 0o777 | 0o011)

    def list_attempts(self) -> Mapping[AttemptKey, AttemptStatus]:
        """Returns every attempt that is not forgotten."""
        return MappingProxyType({key: attempt.status for key, attempt in self._attempts.items()})

    def adopt(self) -> None:
        """Finds the attempts of the agent's previous run."""
        with contextlib.suppress(OSError):
            # So that the first start does not wait for it; one that fails says why.
            self.fork_server.prepare()
        for folder in sorted(self._collected.iterdir(), key=_modified_ns):
            self._keep(folder)
        clients: dict[AttemptKey, str] = {}
        for folder in sorted(self._folder.iterdir()):
            if (folder / _COLLECTED).exists():
                self._collect(folder)
                continue
            records = read_records(folder)
            # Versions before 0.3 flushed the second alone.
            spec = records.get("spec") or records.get("running", {})
            if "key" not in spec:
                # Its start was cut short before there was anything to start.
                self._remove_unstarted(folder)
                continue
            key = AttemptKey(*spec["key"])
            self._attempts[key] = _Attempt(folder, _status(key, AttemptState.RUNNING))
            if self._leases is not None:
                _adopt_lease(self._leases, key, records)
            if "mps_program" in spec:
                clients[key] = spec["environment"]["CUDA_MPS_PIPE_DIRECTORY"]
            self._look(key)
        running = {key for key, attempt in self._attempts.items() if not attempt.status.is_over}
        if self._leases is not None:
            self._leases.keep_only(LOCAL_ENGINE, frozenset(map(_name_owner, running)))
        if self._mps is not None:
            self._mps.adopt({key: pipes for key, pipes in clients.items() if key in running})
        self.on_change()

    def _take_lease(self, key: AttemptKey, assignment: Assignment) -> tuple[LeaseEntry, ...]:
        """Leases the devices of an attempt; raises LeaseRefused."""
        if self._leases is None or not assignment.gpu_uuids:
            return ()
        return self._leases.take(_name_holder(key), assignment.gpu_uuids, is_shared=is_gpu_shared(assignment))

    def _release_devices(self, key: AttemptKey) -> None:
        if self._leases is not None:
            self._leases.release(_name_holder(key))
        if self._mps is not None:
            self._mps.leave(key)

    def _on_mps_settled(self, waiting: Sequence[Assignment], problem: str) -> None:
        """Starts the attempts that waited for their MPS daemon, or returns them to the queue."""
        if not problem:
            self.start(*waiting)
            return
        for assignment in waiting:
            self.refuse(assignment, problem, gpu_held=True)

    def start(self, *assignments: Assignment) -> None:
        """Starts the processes of assignments, unless their attempts are known."""
        new = {attempt_key(item): item for item in assignments if attempt_key(item) not in self._attempts}
        # Asked of the fork server, and not answered.
        asked = deque[AttemptKey]()
        for key, assignment in new.items():
            if self._repeat_end(key, assignment) or (self._mps is not None and self._mps.is_waiting(key)):
                continue
            try:
                lease = self._take_lease(key, assignment)
            except LeaseRefused as refused:
                self.refuse(assignment, str(refused), gpu_held=True)
                continue
            status = _status(key, AttemptState.RUNNING, started_ns=time.time_ns())
            self._attempts[key] = _Attempt(self._folder / _folder_name(key), status)
            self._attempts[key].process = assignment.process
            try:
                if not self._ask_launcher(key, assignment, lease):
                    del self._attempts[key]
                    continue
            except ForkServerEnded as ended:
                asked.append(key)
                self._start_unanswered(asked, ended)
            except (OSError, UserRefused) as error:
                self._fail(key, error)
            else:
                asked.append(key)
            if len(asked) == REQUESTS_MOST:
                self._receive_launcher(asked)
        while asked:
            self._receive_launcher(asked)
        if new:
            self.on_change()

    def drop_waiting(self, wanted: Collection[Assignment]) -> None:
        """Gives up the starts that wait for their MPS daemon, but for these."""
        for item in () if self._mps is None else self._mps.list_waiting():
            if item not in wanted:
                self._release_devices(attempt_key(item))

    def _repeat_end(self, key: AttemptKey, assignment: Assignment) -> bool:
        """Tells again how an attempt ended, instead of running it twice; whether that was so."""
        ended = self._ended.get(key)
        if ended is None or ended.process is None or ended.process != assignment.process:
            return False
        ended.is_repeated = True
        self._attempts[key] = ended
        return True

    def _ask_launcher(self, key: AttemptKey, assignment: Assignment, lease: Sequence[LeaseEntry]) -> bool:
        """Makes the folder of an attempt, and asks for its launcher, unless it waits for an MPS daemon: then returns False.

        Raises OSError, UserRefused and ForkServerEnded.
        """
        folder = self._attempts[key].folder
        user = None if self._users is None else self._users.resolve(assignment.run_as)
        share = {} if self._mps is None else self._mps.admit(assignment, user)
        if share is None:
            return False
        folder.mkdir(mode=0o700, exist_ok=True)
        cgroup = self._cgroups.create(folder.name, cpu_milli=assignment.cpu_milli, memory_bytes=assignment.memory_bytes)
        devices = [entry.device for entry in lease]
        records = self._write_spec(folder, assignment, cgroup, user, devices=devices, share=share)
        self.fork_server.request(folder, records)
        return True

    def _receive_launcher(self, asked: deque[AttemptKey]) -> None:
        """Takes the answer about the attempt that was asked for first."""
        try:
            pidfd = self.fork_server.receive()
        except ForkServerEnded as ended:
            self._start_unanswered(asked, ended)
        except OSError as error:
            self._fail(asked.popleft(), error)
        else:
            key = asked.popleft()
            self._watch(self._attempts[key], key, pidfd)

    def _start_unanswered(self, asked: deque[AttemptKey], ended: ForkServerEnded) -> None:
        """Starts the attempts whose launchers a fork server that ended has not forked."""
        _LOG.warning("event=fork_server_ended reason=%r", str(ended))
        while asked:
            key = asked.popleft()
            try:
                pidfd = self._start_launcher(self._attempts[key].folder)
            except OSError as error:
                self._fail(key, error)
            else:
                if pidfd < 0:
                    self._look(key)
                else:
                    self._watch(self._attempts[key], key, pidfd)

    def _start_launcher(self, folder: Path) -> int:
        """Returns the launcher's pidfd; -1 if a fork server that has ended had forked it. Raises OSError."""
        for _ in range(_STARTS_MOST):
            if was_launcher_forked(folder):
                return -1
            try:
                self.fork_server.request(folder, lock_records(folder))
                return self.fork_server.receive()
            except ForkServerEnded as error:
                _LOG.warning("event=fork_server_ended reason=%r", str(error))
        if was_launcher_forked(folder):
            return -1
        raise OSError("the fork server ended several times")

    def _fail(self, key: AttemptKey, error: OSError | UserRefused) -> None:
        """Ends an attempt that cannot be started."""
        attempt = self._attempts[key]
        self._remove_unstarted(attempt.folder)
        reason = f"cannot start: {getattr(error, 'strerror', None) or error}"
        attempt.status = replace(attempt.status, state=AttemptState.ENDED, reason=reason, ended_ns=time.time_ns())
        _LOG.warning("event=attempt_failed workload=%s replica=%d reason=%r", key.workload_id, key.replica, reason)
        self._release_devices(key)

    def _remove_unstarted(self, folder: Path) -> None:
        """Removes what was made for an attempt that never began."""
        shutil.rmtree(folder, ignore_errors=True)
        self._cgroups.remove(self._cgroups.find(folder.name))

    def refuse(self, assignment: Assignment, reason: str, *, gpu_held: bool = False) -> None:
        """Records that an attempt ended before it was started."""
        key = attempt_key(assignment)
        if key in self._attempts:
            return
        # One that waited for its MPS daemon has them.
        self._release_devices(key)
        folder = self._folder / _folder_name(key)
        now_ns = time.time_ns()
        with contextlib.suppress(OSError):
            folder.mkdir(mode=0o700, exist_ok=True)
            os.close(self._write_spec(folder, assignment, ""))
            record = {"reason": reason, "started_ns": 0, "ended_ns": now_ns, "gpu_held": gpu_held}
            record_exit(folder, record)
        status = _status(key, AttemptState.ENDED, reason=reason, ended_ns=now_ns, gpu_held=gpu_held)
        self._attempts[key] = _Attempt(folder, status)
        self.on_change()

    def stop(self, key: AttemptKey) -> None:
        """Asks a running attempt to end."""
        attempt = self._attempts.get(key)
        if attempt is not None and not attempt.status.is_over and not attempt.is_stop_due:
            attempt.is_stop_due = True
            self._signal_stop(attempt)

    def forget(self, key: AttemptKey) -> None:
        """Drops an attempt that has ended; its output stays for a while."""
        attempt = self._attempts.get(key)
        if attempt is None or not attempt.status.is_over:
            return
        del self._attempts[key]
        if not attempt.is_stop_due:
            self._ended[key] = attempt
        while len(self._ended) > _ENDED_MOST:
            self._ended.popitem(last=False)
        if attempt.is_repeated:
            return
        self._collect(attempt.folder)
        with contextlib.suppress(OSError):
            # One without a checkpoint; what it said of its progress was read.
            for note in (_PROGRESS_NOTE, f"{_PROGRESS_NOTE}.new"):
                (self._checkpoint_folder(key) / note).unlink(missing_ok=True)
            self._checkpoint_folder(key).rmdir()

    def list_ended(self) -> Sequence[AttemptStatus]:
        """Returns attempts that ended by themselves and are forgotten, the newest first; see the port."""
        found = (_read_ended(read_records(folder)) for folder in reversed(self._kept))
        return tuple(one for one in found if one is not None and attempt_key(one) not in self._attempts)

    def read_output(self, request: LogRequest) -> LogChunk:
        """Returns output as it is now."""
        key = AttemptKey(request.workload_id, request.replica, request.attempt)
        attempt = self._attempts.get(key)
        folder = self._collected / _folder_name(key) if attempt is None else attempt.folder
        # Before the file is read: what ends meanwhile may have written more.
        is_over = attempt is None or attempt.status.is_over
        chunk = LogChunk(request_id=request.request_id, next_offset=request.offset, is_end=is_over)
        if attempt is None and not _is_of_owner(folder, request.owner):
            return replace(chunk, is_end=False, problem=_NOT_KEPT)
        try:
            part = read_output(folder / _OUTPUT, request.offset, request.tail_lines, raw=request.raw)
        except FileNotFoundError:
            is_known = attempt is not None or folder.exists()
            return chunk if is_known else replace(chunk, is_end=False, problem=_NOT_KEPT)
        except OSError as error:
            return replace(chunk, problem=f"it cannot be read: {error.strerror}")
        return replace(
            chunk, text=part.text, data=part.data, next_offset=part.next_offset, is_end=is_over and part.is_whole
        )

    def write_input(self, chunk: InputChunk, on_result: Callable[[InputResult], None]) -> None:
        """Passes standard input on to a process; see the port."""
        attempt = self._attempts.get(AttemptKey(chunk.workload_id, chunk.replica, chunk.attempt))
        answer = InputResult(request_id=chunk.request_id)
        if attempt is None:
            # One that waits for its GPU, or that no plan named yet.
            on_result(replace(answer, problem="the process has not started", is_early=True))
        elif attempt.status.is_over:
            on_result(replace(answer, problem="the process has ended"))
        else:
            try:
                if attempt.input is None or attempt.input.is_closed:
                    attempt.input = InputConnection(attempt.folder, self.on_output)
            except OSError:
                records = read_records(attempt.folder)
                is_ready = "running" in records and "input" not in records.get("spec", ())
                problem = "the process has no standard input" if is_ready else "the process has not started"
                on_result(replace(answer, problem=problem, is_early=not is_ready))
            else:
                attempt.input.write(chunk, on_result)

    def _look(self, key: AttemptKey) -> None:
        """Finds out what became of an attempt that this process did not start."""
        attempt = self._attempts[key]
        is_alive, records = is_launcher_alive(attempt.folder), read_records(attempt.folder)
        if is_alive:
            running = records.get("running")
            if running is not None:
                attempt.status = replace(attempt.status, started_ns=running["started_ns"])
                with contextlib.suppress(ProcessLookupError):
                    pidfd = os.pidfd_open(running["pid"])
                    if launcher.read_start_ticks(running["pid"]) == running["start_ticks"]:
                        self._watch(attempt, key, pidfd)
                        return
                    os.close(pidfd)
            asyncio.get_running_loop().call_later(_LOOK_AGAIN_S, self._look, key)
        elif not ("running" in records or "exit" in records):
            del self._attempts[key]
            self._release_devices(key)
            self._remove_unstarted(attempt.folder)
        else:
            self._finish(key)

    def _watch(self, attempt: _Attempt, key: AttemptKey, pidfd: int) -> None:
        attempt.pidfd = pidfd
        asyncio.get_running_loop().add_reader(pidfd, self._on_launcher_end, key)
        self._read_checkpoints_later()
        if attempt.is_stop_due:
            self._signal_stop(attempt)

    def _read_checkpoints_later(self) -> None:
        if not self._is_reading_due:
            self._is_reading_due = True
            asyncio.get_running_loop().call_later(self._checkpoints_read_s, self._read_checkpoints)

    def _read_checkpoints(self) -> None:
        """Reads which running attempts have made a checkpoint since the last time."""
        self._is_reading_due = False
        running = {key: attempt for key, attempt in self._attempts.items() if not attempt.status.is_over}
        changed = [self._read_checkpoint(key, one) | self._read_progress(key, one) for key, one in running.items()]
        if any(changed):
            self.on_change()
        if running:
            self._read_checkpoints_later()

    def _read_checkpoint(self, key: AttemptKey, attempt: _Attempt) -> bool:
        """Reads the time of an attempt's checkpoint; returns whether it is new."""
        path = self._checkpoint_folder(key) / _CHECKPOINT_NOTE
        modified_ns = _modified_ns(path)
        if not modified_ns or modified_ns == attempt.checkpoint_mtime_ns:
            return False
        attempt.checkpoint_mtime_ns = modified_ns
        noted = read_checkpoint_note(path)
        if noted is None or noted[0] == attempt.status.checkpointed_ns:
            return False
        attempt.status = replace(attempt.status, checkpointed_ns=noted[0], checkpoint_s=noted[1])
        return True

    def _read_progress(self, key: AttemptKey, attempt: _Attempt) -> bool:
        """Reads what an attempt says of its progress; returns whether it is new."""
        path = self._checkpoint_folder(key) / _PROGRESS_NOTE
        modified_ns = _modified_ns(path)
        if not modified_ns or modified_ns == attempt.progress_mtime_ns:
            return False
        attempt.progress_mtime_ns = modified_ns
        progress = read_progress_note(path, attempt.status.started_ns)
        if progress is None or progress == attempt.status.progress:
            return False
        attempt.status = replace(attempt.status, progress=progress)
        return True

    def _on_launcher_end(self, key: AttemptKey) -> None:
        attempt = self._attempts[key]
        asyncio.get_running_loop().remove_reader(attempt.pidfd)
        os.close(attempt.pidfd)
        attempt.pidfd = -1
        if attempt.input is not None:
            attempt.input.close("the process has ended")
        self._finish(key)

    def _finish(self, key: AttemptKey) -> None:
        """Collects the exit record of a launcher that has ended; without one, kills what it left behind."""
        attempt = self._attempts[key]
        records = read_records(attempt.folder)
        record, spec = records.get("exit"), records.get("spec", {})
        if record is None:
            left = _find_left(spec.get("environment", {}))
            if left:
                for pid in left:
                    with contextlib.suppress(ProcessLookupError, PermissionError):
                        os.kill(pid, signal.SIGKILL)
                asyncio.get_running_loop().call_later(_KILL_AGAIN_S, self._finish, key)
                return
            is_restarted = spec.get("boot_id", self._boot_id) != self._boot_id
            record = {
                "is_lost": True,
                "reason": "the machine restarted" if is_restarted else "its launcher was killed",
                "node_fault": "the machine restarted" if is_restarted else "",
                "started_ns": attempt.status.started_ns,
                "ended_ns": time.time_ns(),
            }
            with contextlib.suppress(OSError):
                record_exit(attempt.folder, record)
        self._cgroups.remove(spec.get("cgroup", ""))
        self._read_checkpoint(key, attempt)
        self._read_progress(key, attempt)
        attempt.status = replace(
            _describe_end(key, record),
            checkpointed_ns=attempt.status.checkpointed_ns,
            checkpoint_s=attempt.status.checkpoint_s,
            progress=attempt.status.progress,
        )
        self._release_devices(key)
        asyncio.get_running_loop().call_later(_FLUSH_S, self._flush_end, key)
        self.on_change()

    def _flush_end(self, key: AttemptKey) -> None:
        """Flushes the end of an attempt that no journal has; whoever waits for a GPU did not wait for this."""
        attempt = self._attempts.get(key)
        if attempt is not None:
            asyncio.get_running_loop().run_in_executor(None, _flush_quietly, attempt.folder)

    def _signal_stop(self, attempt: _Attempt) -> None:
        """Sends SIGTERM to the launcher once it can take it: before it says that it runs, that would end it."""
        if attempt.status.is_over or attempt.pidfd < 0:
            return
        if "running" not in read_records(attempt.folder):
            asyncio.get_running_loop().call_later(_LOOK_AGAIN_S, self._signal_stop, attempt)
            return
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(attempt.pidfd, signal.SIGTERM)

    def _write_spec(
        self,
        folder: Path,
        assignment: Assignment,
        cgroup: str,
        user: JobUser | None = None,
        *,
        devices: Sequence[LeaseDevice] = (),
        share: Mapping[str, str] = MappingProxyType({}),
    ) -> int:
        """Records what the launcher of an attempt runs; returns the locked descriptor. Raises OSError."""
        process, key = assignment.process, attempt_key(assignment)
        assert process is not None
        environment = {
            "PATH": os.environ.get("PATH", _DEFAULT_PATH),
            "HOME": os.environ.get("HOME", "/"),
            **({} if user is None else {"HOME": user.home, "USER": user.name, "LOGNAME": user.name}),
            "PYTHONUNBUFFERED": "1",
            **process.environment,
            **process.element_variables,
            # By UUID: an index depends on the order. Empty for work without GPUs, which would see all.
            "CUDA_VISIBLE_DEVICES": ",".join(assignment.gpu_uuids),
            "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
            "EELGRID_WORKLOAD_ID": key.workload_id,
            "EELGRID_ATTEMPT": str(key.attempt),
            "EELGRID_REPLICA": str(key.replica),
            "EELGRID_REPLICAS": str(assignment.replicas),
            "EELGRID_CHECKPOINT_DIR": str(self._checkpoint_folder(key)),
            "EELGRID_PREEMPT_SIGNAL": process.stop_signal,
            "EELGRID_GRACE_S": f"{process.grace_s:g}",
            **_describe_interruptions(assignment),
            **_warning_variables(process),
            **share,
        }
        spec = {
            "key": key,
            "run_as": assignment.run_as,
            # Of which the digest is told, if the controller asks how it ended.
            "process": to_plain(process, brief=True),
            "boot_id": self._boot_id,
            "argv": process.argv,
            "environment": environment,
            "working_directory": process.working_directory,
            "stop_signal": process.stop_signal,
            "grace_s": process.grace_s,
            "time_limit_s": process.time_limit_s,
            "log_bytes_most": process.log_bytes_most or _DEFAULT_LOG_BYTES_MOST,
            "cgroup": cgroup,
            "gpu_shared": is_gpu_shared(assignment),
            "devices": [asdict(device) for device in devices],
        }
        if self.contact.path is not None:
            spec["contact"] = str(self.contact.path)
        if self._mps is not None and share:
            spec["mps_program"] = self._mps.program
        if process.warn_signal:
            spec |= {"warn_signal": process.warn_signal, "warn_before_s": process.warn_before_s}
        if user is not None:
            spec["user"] = {"uid": user.uid, "gid": user.gid, "groups": user.groups}
        if process.standard_input is not StandardInput.UNSPECIFIED:
            size = process.terminal_size or TerminalSize()
            spec |= {"input": process.standard_input.name.lower(), "terminal_size": (size.rows, size.columns)}
        records = lock_records(folder)
        try:
            os.ftruncate(records, 0)
            launcher.append_record(records, "spec", spec)
        except OSError:
            os.close(records)
            raise
        return records

    def _checkpoint_folder(self, key: AttemptKey) -> Path:
        return self._checkpoints / _folder_name(AttemptKey(key.workload_id, key.replica, 0)).removesuffix(".0")

    def _collect(self, folder: Path) -> None:
        """Moves the folder of an attempt whose end is known to the controller."""
        kept = self._collected / folder.name
        try:
            folder.replace(kept)
        except FileNotFoundError:
            # Its start failed.
            return
        except OSError:
            # Of the same name, by a controller that had lost its state.
            shutil.rmtree(kept, ignore_errors=True)
            with contextlib.suppress(OSError):
                folder.replace(kept)
        self._keep(kept)

    def _keep(self, folder: Path) -> None:
        """Keeps the folder of a collected attempt for its output, and removes the oldest beyond the bound."""
        self._kept.append(folder)
        while len(self._kept) > _KEPT_MOST:
            shutil.rmtree(self._kept.popleft(), ignore_errors=True)


def _warning_variables(process: ProcessSpec) -> dict[str, str]:
    if not process.warn_signal:
        return {}
    return {"EELGRID_WARN_SIGNAL": process.warn_signal, "EELGRID_WARN_S": f"{process.warn_before_s:g}"}


def _ignore_change() -> None:
    """Nobody listens yet."""


def _status(key: AttemptKey, state: AttemptState, reason: str = "", **known: Any) -> AttemptStatus:
    """Builds a status; a reason may name a path of any characters, and becomes one line."""
    line = "".join(letter if letter.isprintable() else "?" for letter in reason)[:_REASON_MOST]
    return AttemptStatus(
        workload_id=key.workload_id, replica=key.replica, attempt=key.attempt, state=state, reason=line, **known
    )


def _describe_end(key: AttemptKey, record: Mapping[str, Any]) -> AttemptStatus:
    """Builds the status of an attempt from the record of its end."""
    return _status(
        key,
        AttemptState.LOST if record.get("is_lost") else AttemptState.ENDED,
        exit_code=record.get("exit_code"),
        signal=record.get("signal", 0),
        reason=record["reason"],
        started_ns=record["started_ns"],
        ended_ns=record["ended_ns"],
        gpu_held=record.get("gpu_held", False),
        node_fault=record.get("node_fault", ""),
    )


def _is_of_owner(folder: Path, owner: str) -> bool:
    """Returns whether an attempt that has ended may be of a job of this owner; an older version did not record whose it was."""
    return not owner or read_records(folder).get("spec", {}).get("run_as", owner) == owner


def _read_ended(records: Mapping[str, Any]) -> AttemptStatus | None:
    """Reads how an attempt ended by itself; None if it was stopped, lost or never began, or is of an older version."""
    spec, record = records.get("spec", {}), records.get("exit", {})
    is_own = bool(record.get("started_ns")) and not record.get("is_lost") and record.get("reason") != launcher.STOPPED
    if not is_own or "process" not in spec:
        return None
    return replace(_describe_end(AttemptKey(*spec["key"]), record), process_digest=digest_plain(spec["process"]))


def _flush_quietly(folder: Path) -> None:
    with contextlib.suppress(OSError):
        flush_records(folder)


def adopt_attempts(leases: DeviceLeases, folder: Path) -> None:
    """Leases what the attempts in the folder of an engine have whose launchers live, for a program without the engine."""
    for attempt in sorted((folder / "attempts").glob("*")):
        if is_launcher_alive(attempt):
            records = read_records(attempt)
            if "key" in records.get("spec", ()):
                _adopt_lease(leases, AttemptKey(*records["spec"]["key"]), records)


def has_unfenced_attempts(folder: Path) -> bool:
    """Returns whether launchers of an earlier run live, in the folder of an engine, that watch no contact."""
    alive = filter(is_launcher_alive, (folder / "attempts").glob("*"))
    return any("contact" not in read_records(attempt).get("spec", ()) for attempt in alive)


def _adopt_lease(leases: DeviceLeases, key: AttemptKey, records: Mapping[str, Any]) -> None:
    """Leases what an attempt has by its records."""
    spec = records.get("spec", {})
    # Before 0.3 the journal of leases had them.
    devices = [LeaseDevice(**device) for device in spec.get("devices", ())]
    since_ns = records.get("running", {}).get("started_ns", 0)
    leases.adopt(_name_holder(key), devices, is_shared=spec.get("gpu_shared") is True, since_ns=since_ns)


def _name_owner(key: AttemptKey) -> str:
    """The owner of an attempt's leases."""
    return f"{key.workload_id}/{key.replica}/{key.attempt}"


def _name_holder(key: AttemptKey) -> LeaseHolder:
    return LeaseHolder(LOCAL_ENGINE, _name_owner(key))


def _folder_name(key: AttemptKey) -> str:
    name = quote(key.workload_id, safe="")
    if len(name) > _FOLDER_NAME_MOST:
        name = hashlib.sha256(name.encode()).hexdigest()
    return f"{name}.{key.replica}.{key.attempt}"


def _describe_interruptions(assignment: Assignment) -> dict[str, str]:
    """Returns the variables by which a process learns how often to save, as far as that is known."""
    known = {
        "EELGRID_CHECKPOINT_INTERVAL": assignment.checkpoint_interval_s,
        "EELGRID_INTERRUPTED_EVERY_S": assignment.interrupted_every_s,
    }
    return {name: f"{seconds:.0f}" for name, seconds in known.items() if seconds >= 1.0}


def _modified_ns(folder: Path) -> int:
    try:
        return folder.lstat().st_mtime_ns
    except OSError:
        return 0


def _find_left(environment: Mapping[str, str]) -> list[int]:
    """Returns processes that carry the variables of an attempt, whoever their parent is."""
    marks = [f"{name}={environment.get(name)}".encode() for name in ("EELGRID_CHECKPOINT_DIR", "EELGRID_ATTEMPT")]
    own = os.getpid()
    return [pid for pid, variables in iterate_environments() if pid != own and all(mark in variables for mark in marks)]
