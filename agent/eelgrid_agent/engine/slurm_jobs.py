"""Slurm's jobs on this node: the folder in which its prolog hands each job to the agent, and the agent's answers in it.

Owns the format of the files, their bounds, and whom the folder is believed. Must not know what becomes of a job's devices,
its energy or its limit.

Theory. A folder, not a socket: a prolog must never wait for the agent, a shell can write a file, and what was handed over
outlives a kill of either side, so an agent that starts again finds the jobs as they are. The folder lies in memory (/run),
since no job outlives a boot. A file is renamed into place, so none is read half written. Only root, or the agent's own user,
is believed: whoever could write here could lower everybody's limits.

    job-12     of the prolog: lines KEY=VALUE; restart, devices (by comma, as Slurm names them), power_limit_w, gpu_freq, and of a
               task of an array task, as 12_3
    answer-12  of the agent: a line for each device, once what the job asks is in force; the prolog may wait for it
    plan-12_3  of the agent: the plan has a limit for this job or task, for whose answer the prolog should wait
    0, 1.3     of other prologs: the ids of the jobs of a device or GPU instance, one a line (read by `node_energy`)

Source: Slurm's prolog and epilog guide (SLURM_JOB_GPUS, SLURM_JOB_RESTART_COUNT, CUDA_VISIBLE_DEVICES).
"""

import os
import re
import stat
import time
from collections.abc import Mapping
from pathlib import Path

from eelgrid_agent.state_files import replace_file
from eelgrid_protos.values import dataclass

# The UUID of each index of a GRES, on a node whose MIG layout Eelgrid changes.
UUIDS_FILE = Path("/run/eelgrid-slurmd/uuids")
JOBS_MOST = 1024
DEVICES_MOST = 256
_BYTES_MOST = 16 * 1024
_WATTS_MOST = 100_000.0
_JOB_FILE = re.compile(r"^job-([0-9]{1,10})$")
_ANSWER_FILE = re.compile(r"^answer-([0-9]{1,10})$")
_PLAN_FILE = re.compile(r"^plan-([0-9]{1,10}(?:_[0-9]{1,10})?)$")
# What a plan calls a job or task.
_WORKLOAD_PREFIX = "slurm-"
_NAME = re.compile(r"[0-9]{1,10}(?:_[0-9]{1,10})?")
_DEVICE = re.compile(r"^[A-Za-z0-9/.:-]{1,96}$")
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
# A folder's time of change is as coarse as the kernel's tick: a change right after a look may not show in it.
_COARSE_NS = 100_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class HandedJob:
    """One job of Slurm on this node; `devices` as Slurm names them, `gpu_freq` is empty unless the job sets clocks."""

    job: str
    restart: int = 0
    devices: tuple[str, ...] = ()
    power_limit_w: float | None = None
    gpu_freq: str = ""
    # Of a task of an array, as Slurm's users name it: 12_3.
    task: str = ""

    @property
    def workload_id(self) -> str:
        """What a plan calls it, without its restart."""
        return f"{_WORKLOAD_PREFIX}{self.task or self.job}"


class HandoverError(ValueError):
    """What was handed over cannot be used; the message names the file, the field and the remedy."""


def parse_job(job: str, text: str) -> HandedJob:
    """Returns the job of one file; unknown keys are passed over. Raises HandoverError, which names the field."""
    fields = dict(line.split("=", 1) for line in text.splitlines() if "=" in line)
    devices = tuple(dict.fromkeys(part for part in fields.get("devices", "").split(",") if part))
    if not devices or len(devices) > DEVICES_MOST or not all(map(_DEVICE.match, devices)):
        raise HandoverError(f"devices: must be 1 to {DEVICES_MOST} names joined by commas; see the prolog")
    restart, watts = fields.get("restart", "0"), fields.get("power_limit_w", "")
    if not re.fullmatch("[0-9]{1,9}", restart):
        raise HandoverError("restart: must be a whole number; see the prolog")
    if watts and not (re.fullmatch(r"[0-9]{1,6}(\.[0-9]{1,3})?", watts) and 0.0 < float(watts) <= _WATTS_MOST):
        raise HandoverError(f"power_limit_w: must be watts in (0, {_WATTS_MOST:g}]; correct the job's comment")
    task = fields.get("task", "")
    if task and not _NAME.fullmatch(task):
        raise HandoverError("task: must be the number of an array and of a task, such as 12_3; see the prolog")
    return HandedJob(
        job=job,
        task=task,
        restart=int(restart),
        devices=devices,
        power_limit_w=float(watts) if watts else None,
        gpu_freq=fields.get("gpu_freq", "")[:64],
    )


def describe_planned_limits(limits_w: Mapping[str, float]) -> dict[str, str]:
    """Returns by job or task what is written of its planned limit; work of others is left out."""
    found = dict[str, str]()
    for workload_id, limit_w in sorted(limits_w.items()):
        name = workload_id.removeprefix(_WORKLOAD_PREFIX)
        if name != workload_id and _NAME.fullmatch(name) and len(found) < JOBS_MOST:
            found[name] = f"power limit {limit_w:g} W\n"
    return found


class HandoverFolder:
    """The folder of one node."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._changed_ns: int | None = None
        # What the folder holds of answers, by job, and of planned limits, by job or task.
        self.answers: dict[str, str] = {}
        self.plans: dict[str, str] = {}
        # Files that could not be used, and why; of the newest look.
        self.refused: tuple[str, ...] = ()

    def read_jobs(self) -> tuple[HandedJob, ...]:
        """Returns the jobs by number, and what the answers say; a file that cannot be used is left out and named.

        Raises HandoverError where others may write to the folder; without a folder there is no job.
        """
        try:
            folder = os.open(self._path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except FileNotFoundError:
            self._changed_ns, self.answers, self.plans, self.refused = None, {}, {}, ()
            return ()
        except OSError as error:
            raise HandoverError(f"{self._path}: cannot be opened ({error.strerror}); make it a folder") from None
        try:
            return self._read(folder)
        finally:
            os.close(folder)

    def has_changed(self) -> bool:
        """Whether a look may find something else than the newest one did."""
        try:
            changed_ns = self._path.stat().st_mtime_ns
        except OSError:
            return self._changed_ns is not None
        return changed_ns != self._changed_ns

    def write_answers(self, answers: Mapping[str, str]) -> None:
        """Makes these the answers by job; those that were given already cost nothing. Raises OSError."""
        self._write("answer", self.answers, answers)

    def write_plans(self, plans: Mapping[str, str]) -> None:
        """Makes these the planned limits by job or task; without a folder nobody asks for them. Raises OSError."""
        if self._changed_ns is not None:
            self._write("plan", self.plans, plans)

    def _write(self, kind: str, written: dict[str, str], wanted: Mapping[str, str]) -> None:
        for job in written.keys() - wanted.keys():
            (self._path / f"{kind}-{job}").unlink(missing_ok=True)
            del written[job]
        for job, text in wanted.items():
            if written.get(job) != text:
                replace_file(self._path / f"{kind}-{job}", text.encode())
                written[job] = text

    def _read(self, folder: int) -> tuple[HandedJob, ...]:
        about = os.fstat(folder)
        if problem := _distrust(about):
            raise HandoverError(f"{self._path}: {problem}; make it root's alone (mode 0700)")
        found, refused, answers, plans = list[HandedJob](), list[str](), dict[str, str](), dict[str, str]()
        names = sorted(os.listdir(folder))
        for name in names:
            job, answer, plan = _JOB_FILE.match(name), _ANSWER_FILE.match(name), _PLAN_FILE.match(name)
            if job is None and answer is None and plan is None:
                continue
            try:
                if answer is not None:
                    answers[answer[1]] = _read_file(folder, name)
                elif plan is not None:
                    plans[plan[1]] = _read_file(folder, name)
                elif job is not None and len(found) < JOBS_MOST:
                    found.append(parse_job(job[1], _read_file(folder, name)))
                else:
                    refused.append(f"{name}: is one of more than {JOBS_MOST}; let the epilog remove what has ended")
            except FileNotFoundError:
                # An epilog at work.
                continue
            except (HandoverError, OSError) as error:
                refused.append(f"{name}: {error}")
        is_old = abs(time.time_ns() - about.st_mtime_ns) > _COARSE_NS
        self._changed_ns = about.st_mtime_ns if is_old else -1
        self.answers, self.plans, self.refused = answers, plans, tuple(refused)
        return tuple(sorted(found, key=lambda one: int(one.job)))


def _distrust(about: os.stat_result) -> str:
    """Why what somebody else may have written is not believed; empty if only root or this user can have."""
    if about.st_uid not in (0, os.geteuid()):
        return f"belongs to user {about.st_uid}"
    return "others may write to it" if about.st_mode & _OTHERS_WRITE else ""


def _read_file(folder: int, name: str) -> str:
    number = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
    with os.fdopen(number, "rb") as file:
        about = os.fstat(number)
        if not stat.S_ISREG(about.st_mode):
            raise HandoverError("is no plain file; remove it")
        if problem := _distrust(about):
            raise HandoverError(f"{problem}; only root's prolog may write it")
        content = file.read(_BYTES_MOST + 1)
    if len(content) > _BYTES_MOST:
        raise HandoverError(f"has more than {_BYTES_MOST} bytes; see the prolog")
    return content.decode("ascii", "replace")
