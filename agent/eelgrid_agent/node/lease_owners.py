"""Owners of leases: whether those who took a device by the socket still exist, asked at intervals.

Owns how the end of an owner is proven. Must not know how leases overlap, nor the engines that end their leases themselves
(the local engine, claims, the kubelet).

Theory. An engine releases what it took when its owner ends; one that was killed in between does not. A lease is reclaimed only
if its owner is provably gone, and kept, and named with the reason, if that cannot be found out:

    process      the one that was named with the lease has ended: its id is free, or of a process with another start
    Slurm job    slurmctld knows it no more or says that it has ended or waits, and no process of it is on this machine
    else         not known

slurmd starts some jobs without a prolog (one that was sent back and is told to start at once), and these ask for nothing. So
processes that say they belong to a job with GPUs make the agent ask slurmctld what that job has on this node, and that is leased
to it. What the processes say is a hint only, since an environment is its user's. So are parts of what slurmctld shows: a job's
name and comment may hold what looks like other fields. A job has ended only if all that looks like its state says so, and it has
only what all that looks like its GPUs names.

A look at an owner takes time; a lease that its owner took again meanwhile has another serial number and stays. So an owner
that is gone has no lease two rounds later, and no other way leads to losing one.
"""

import asyncio
import bisect
import contextlib
import logging
import re
import shutil
from collections.abc import Awaitable, Callable, Iterable, Mapping
from enum import Enum
from pathlib import Path
from typing import NamedTuple

from eelgrid_agent.energy.node_energy import read_slurm_jobs
from eelgrid_agent.enforce.device_leases import DeviceLeases
from eelgrid_agent.enforce.lease_table import (
    KUBERNETES_ENGINE,
    LOCAL_ENGINE,
    LeaseEntry,
    LeaseHolder,
    find_lease_device,
    find_place_device,
)
from eelgrid_agent.engine.process_environments import iterate_environments
from eelgrid_agent.engine.slurm_jobs import UUIDS_FILE
from eelgrid_protos.messages import Gpu

_LOG = logging.getLogger("eelgrid.agent")
ROUND_S = 10.0
_ADOPT_AGAIN_S = 0.1
SLURM_ENGINE = "slurm"
# Owners that are asked about in one round; the oldest leases first, so that each has its turn.
_ASKED_MOST = 32
_ANSWER_S = 10.0
_ANSWER_BYTES_MOST = 64 * 1024
_JOB = re.compile(r"\d{1,12}")
_STATE = re.compile(r"\bJobState=(\w+)")
# Of each node of a job: its expression of names, and its GRES with the indexes of that node.
_NODE_GRES = re.compile(r"\bNodes=(\S+) CPU_IDs=\S* Mem=\S* GRES=(\S*)")
_GPU_INDEXES = re.compile(r"\bgpu(?::[^:(),]+)?:\d+\(IDX:([\d,-]+)\)")
_INDEX_SPAN = re.compile(r"(\d{1,4})(?:-(\d{1,4}))?")
_HAS_GPUS = (b"SLURM_JOB_GPUS=", b"SLURM_STEP_GPUS=")
_ENVIRONMENT_BYTES_MOST = 256 * 1024
_UNKNOWN_JOB = "Invalid job id specified"
# Slurm's states in which a job has its devices; in COMPLETING its epilog has not ended.
_HOLDING = frozenset({
    "RUNNING", "CONFIGURING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT", "RESIZING", "POWER_UP_NODE",
})  # fmt: skip
_ENDED = frozenset({
    "COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "BOOT_FAIL", "DEADLINE", "OUT_OF_MEMORY",
    "REVOKED", "PENDING", "REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT",
})  # fmt: skip


class OwnerState(Enum):
    """What is known of an owner."""

    HOLDS = "holds"
    GONE = "gone"
    UNKNOWN = "unknown"


class OwnerAnswer(NamedTuple):
    """What is known of an owner, and why nothing more is."""

    state: OwnerState
    reason: str = ""


AskOwner = Callable[[LeaseEntry], Awaitable[OwnerAnswer]]


def read_start_ticks(pid: int, proc: Path = Path("/proc")) -> int:
    """Returns when a process was started, in ticks since boot; 0 if there is none, or only its exit status."""
    try:
        fields = (proc / str(pid) / "stat").read_bytes().rpartition(b")")[2].split()
        return 0 if fields[0] in (b"Z", b"X") else int(fields[19])
    except (OSError, IndexError, ValueError):
        return 0


def ask_process(lease: LeaseEntry, proc: Path = Path("/proc")) -> OwnerAnswer:
    """Returns whether the process that was named with a lease lives."""
    lives = read_start_ticks(lease.pid, proc) == lease.start_ticks
    return OwnerAnswer(OwnerState.HOLDS if lives else OwnerState.GONE)


class SlurmOwners:
    """Asks slurmctld about jobs, by `scontrol`."""

    def __init__(self, *, program: str | None = None, proc: Path = Path("/proc"), uuids: Path = UUIDS_FILE) -> None:
        """`uuids` has the UUID of each index of a GRES, on a node whose MIG layout Eelgrid changes."""
        self._program, self._proc, self._uuids = program or shutil.which("scontrol"), proc, uuids
        self._asked_last = 0

    async def ask(self, lease: LeaseEntry) -> OwnerAnswer:
        """Returns whether a job holds its devices."""
        job = lease.holder.owner
        if self._program is None:
            return OwnerAnswer(OwnerState.UNKNOWN, "scontrol is not installed here; release the lease by hand")
        if not _JOB.fullmatch(job):
            return OwnerAnswer(OwnerState.UNKNOWN, "the owner is no number of a job; release the lease by hand")
        code, text = await self._run("-o", "show", "job", job)
        states = set(_STATE.findall(text))
        if code is None or (not states and _UNKNOWN_JOB not in text):
            told = " ".join(text.split())[:120] or "no answer"
            return OwnerAnswer(OwnerState.UNKNOWN, f"slurmctld did not say how job {job} is ({told})")
        if states & _HOLDING:
            return OwnerAnswer(OwnerState.HOLDS)
        if unknown := states - _ENDED:
            named = ", ".join(sorted(unknown))[:120]
            return OwnerAnswer(OwnerState.UNKNOWN, f"Slurm says that job {job} is {named}, which is not known here")
        pid = await asyncio.to_thread(find_job_process, job, self._proc)
        if pid:
            return OwnerAnswer(OwnerState.UNKNOWN, f"job {job} has ended in Slurm, and process {pid} of it is here")
        return OwnerAnswer(OwnerState.GONE)

    async def adopt_jobs(self, leases: DeviceLeases, node: str, gpus: Iterable[Gpu]) -> None:
        """Leases what jobs have on this node without a lease; what another engine has is named as used by two.

        Each call asks about some jobs at most, and the next one goes on where it ended.
        """
        if self._program is None:
            return
        known = {lease.holder.owner for lease in leases.table.of_engine(SLURM_ENGINE)}
        found = await asyncio.to_thread(list_gpu_jobs, self._proc)
        jobs = sorted(int(job) for job in found if job not in known)
        begin = bisect.bisect_right(jobs, self._asked_last)
        for job in [*jobs[begin:], *jobs[:begin]][:_ASKED_MOST]:
            self._asked_last = job
            names = await self._list_gpus(str(job), node)
            devices = [device for name in names if (device := find_lease_device(name, gpus)) is not None]
            if devices:
                _LOG.info("event=lease_adopted engine=slurm owner=%d devices=%s", job, ",".join(names))
            for device in devices:
                is_shared = any(
                    lease.is_shared and lease.device.overlaps(device) for lease in leases.table.of_engine(SLURM_ENGINE)
                )
                leases.adopt(LeaseHolder(SLURM_ENGINE, str(job)), (device,), is_shared=is_shared)

    async def _list_gpus(self, job: str, node: str) -> list[str]:
        """Returns the GPUs of a running job on this node, by index or UUID, as slurmctld knows them."""
        code, text = await self._run("-d", "-o", "show", "job", job)
        states = set(_STATE.findall(text))
        # In COMPLETING the epilog may have given them back already.
        if code != 0 or not states or not states <= _HOLDING - {"COMPLETING"}:
            return []
        found = [
            {index for one in _GPU_INDEXES.findall(gres) for index in read_indexes(one)}
            for expression, gres in _NODE_GRES.findall(text)
            if node in await self._expand(expression)
        ]
        names = read_device_names(self._uuids)
        return [names.get(index, str(index)) for index in sorted(set.intersection(*found))] if found else []

    async def _expand(self, expression: str) -> list[str]:
        if "[" not in expression and "," not in expression:
            return [expression]
        code, text = await self._run("show", "hostnames", expression)
        return text.split() if code == 0 else []

    async def _run(self, *words: str) -> tuple[int | None, str]:
        assert self._program is not None
        try:
            process = await asyncio.create_subprocess_exec(
                self._program,
                *words,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
            )
        except OSError as error:
            return None, error.strerror or str(error)
        try:
            async with asyncio.timeout(_ANSWER_S):
                output, _ = await process.communicate()
        except TimeoutError:
            return None, f"no answer within {_ANSWER_S:g} s"
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
        return process.returncode, output[:_ANSWER_BYTES_MOST].decode(errors="replace")


def find_job_process(job: str, proc: Path = Path("/proc")) -> int:
    """Returns a process of a Slurm job on this machine, by its environment; 0 if there is none."""
    mark = f"SLURM_JOB_ID={job}".encode()
    return next((pid for pid, variables in iterate_environments(proc) if mark in variables), 0)


def list_gpu_jobs(proc: Path = Path("/proc")) -> frozenset[str]:
    """Returns the Slurm jobs to which processes with GPUs say that they belong."""
    found = set[str]()
    for _, variables in iterate_environments(proc, _ENVIRONMENT_BYTES_MOST):
        if any(one.startswith(_HAS_GPUS) for one in variables):
            found |= {one[13:].decode(errors="replace") for one in variables if one.startswith(b"SLURM_JOB_ID=")}
    return frozenset(job for job in found if _JOB.fullmatch(job))


def read_indexes(text: str) -> list[int]:
    """Reads indexes as Slurm writes them, such as `0-1,3`; what is none of them is left out."""
    found = set[int]()
    for part in text.split(","):
        span = _INDEX_SPAN.fullmatch(part)
        if span is not None:
            found.update(range(int(span[1]), int(span[2] or span[1]) + 1))
    return sorted(found)


def read_device_names(path: Path) -> Mapping[int, str]:
    """Reads the UUID of each index of a GRES; empty where the layout is not Eelgrid's."""
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError):
        return {}
    pairs = (line.split() for line in lines)
    return {int(pair[0]): pair[1] for pair in pairs if len(pair) == 2 and pair[0].isdigit()}


def adopt_slurm_jobs(leases: DeviceLeases, folder: Path, gpus: Iterable[Gpu]) -> None:
    """Leases what Slurm's jobs have by the folder of their prolog, to a table that is begun anew."""
    devices = tuple(gpus)
    for one in read_slurm_jobs(folder, devices) or ():
        device = find_place_device(one.place.gpu_uuid, one.place.gpu_instance_id, devices)
        if device is not None:
            leases.adopt(LeaseHolder(SLURM_ENGINE, one.owner.job), (device,))


async def check_owners(leases: DeviceLeases, engines: Mapping[str, AskOwner], kubelet_problem: str = "") -> int:
    """Asks about owners once, reclaims the leases of those that are gone, and names those not known; returns how many ended.

    `kubelet_problem` says why the kubelet's pods are not known, or nothing.
    """
    leases.tidy()
    gone, unknown = set[int](), dict[int, str]()
    asked = 0
    answers: dict[tuple[object, int, int], OwnerAnswer] = {}
    for lease in sorted(leases.table.leases, key=lambda one: one.serial):
        if lease.holder.engine == LOCAL_ENGINE:
            continue
        if lease.holder.engine == KUBERNETES_ENGINE:
            if kubelet_problem:
                unknown[lease.serial] = kubelet_problem
            continue
        key = lease.holder, lease.pid, lease.start_ticks
        if key not in answers:
            if asked == _ASKED_MOST:
                unknown[lease.serial] = f"{_ASKED_MOST} other owners were asked about first"
                continue
            asked += 1
            answers[key] = await _ask(lease, engines)
        answer = answers[key]
        if answer.state is OwnerState.GONE:
            gone.add(lease.serial)
        elif answer.state is OwnerState.UNKNOWN:
            unknown[lease.serial] = answer.reason
    count = leases.reclaim(gone) if gone else 0
    leases.mark_unverified(unknown)
    return count


async def _ask(lease: LeaseEntry, engines: Mapping[str, AskOwner]) -> OwnerAnswer:
    if lease.pid:
        return ask_process(lease)
    ask = engines.get(lease.holder.engine)
    if ask is None:
        reason = (
            "it named no process (--pid) and its engine cannot be asked; release the lease by hand when it has ended"
        )
        return OwnerAnswer(OwnerState.UNKNOWN, reason)
    return await ask(lease)


async def run_owner_checks(
    leases: DeviceLeases,
    engines: Mapping[str, AskOwner],
    kubelet_problem: Callable[[], str] = str,
    *,
    on_change: Callable[[], None],
    adopt: Callable[[], bool] = lambda: True,
    adopt_running: Callable[[], Awaitable[None]] | None = None,
    round_s: float = ROUND_S,
) -> None:
    """Asks about owners until cancelled; `on_change` is called on this loop after leases have changed.

    `adopt` is called until it says that all that stands was adopted, for a table that is not complete; `adopt_running` before
    each round, for work that began without asking.
    """
    loop = asyncio.get_running_loop()

    def notify() -> None:
        loop.call_soon_threadsafe(on_change)

    leases.on_change = notify
    on_change()
    while not leases.is_complete:
        if adopt():
            leases.finish_adoption()
        else:
            await asyncio.sleep(_ADOPT_AGAIN_S)
    while True:
        if adopt_running is not None:
            await adopt_running()
        await check_owners(leases, engines, kubelet_problem())
        await asyncio.sleep(round_s)
