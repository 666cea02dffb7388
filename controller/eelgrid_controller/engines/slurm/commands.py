"""Slurm's commands: the port by which the engine reads and changes a cluster, and its adapter, which runs them.

Owns processes, their time limits and exit codes, and how each request is spelled. Must not know which jobs are steered.

Theory. Commands are the interface that every Slurm has: they find the cluster by SLURM_CONF, authenticate by munge or
whatever is configured, and are stable over versions where slurmrestd's numbered ones come and go. Each call is bounded in
time and output, and a failed one changes nothing here: the next look decides anew. Arguments never pass a shell.

Sources: man pages of squeue, sinfo, scontrol, sbatch; --json of scontrol exists from 23.02 on.
"""

import asyncio
import contextlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from eelgrid_controller.engines.element_lists import UnreadableAnswer
from eelgrid_controller.engines.slurm.advice import PRIORITY_FORM, allows_factors
from eelgrid_controller.engines.slurm.answers import ANSWER_BYTES_MOST, STEP_COLUMNS, SlurmJob, parse_step_nodes
from eelgrid_controller.engines.slurm.job_table import COLUMNS, TIME_FORMAT

_SAID_MOST = 300
_SCONTROL_JSON = (23, 2)


class SlurmFailed(Exception):
    """A command of Slurm ended with an error, or not in time; what it said is in the message."""


class JobPlacement(NamedTuple):
    """The nodes of a job that waits; the comment is one word, since scontrol's input knows no quotes around spaces."""

    job_id: str
    nodes: tuple[str, ...]
    comment: str
    # Whether Slurm's own wait after a requeue is to end now.
    begins_now: bool = False
    # One that was released already only gets other nodes.
    is_held: bool = True


class SlurmCommands(Protocol):
    """One cluster, as the engine uses it. Every call raises SlurmFailed."""

    async def read_jobs(self) -> bytes:
        """Returns all jobs as JSON."""

    async def read_columns(self) -> bytes:
        """Returns the columns of all jobs that JobTable reads."""

    async def read_nodes(self) -> bytes:
        """Returns all nodes as JSON."""

    async def check_placement(self, job: SlurmJob, nodes: Sequence[str]) -> str:
        """Returns why Slurm would never start a job like this on these nodes; empty if it would."""

    async def place_jobs(self, placements: Sequence["JobPlacement"]) -> None:
        """Requires nodes for jobs, notes the comments and releases those that are held; one that fails keeps no other from it."""

    async def hold_jobs(self, job_ids: Sequence[str]) -> None:
        """Holds jobs that wait; one that has begun meanwhile runs on, and keeps no other from it."""

    async def leave_job(self, job_id: str, comment: str) -> None:
        """Takes a requirement of nodes back, notes the comment and releases the job if it is held."""

    async def requeue_job(self, job: SlurmJob, comment: str) -> None:
        """Notes the comment of a job, has it ended, if it has begun, and queued again, and holds it."""

    async def announce_shrink(self, job_id: str, comment: str) -> None:
        """Notes the comment of a running job and tells its batch script by SIGUSR2 to read it."""

    async def list_step_nodes(self, job_id: str) -> frozenset[str]:
        """Returns the nodes on which steps of a job run; its batch script is none."""

    async def shrink_job(self, job_id: str, nodes: Sequence[str]) -> None:
        """Takes all nodes but these from a running job, and ends its steps there."""

    async def cancel_job(self, job_id: str) -> None:
        """Cancels a job."""

    async def weigh_nodes(self, weight: int, nodes: Sequence[str]) -> None:
        """Gives nodes a weight, by which Slurm prefers those with a lower one, until slurmctld restarts."""

    async def read_priorities(self) -> str:
        """Returns the priorities of waiting jobs, a line each by PRIORITY_FORM; empty where Slurm takes no site factors from us."""

    async def rank_jobs(self, factors: Mapping[str, int]) -> None:
        """Gives waiting jobs site factors, which are added to their priorities; one that fails keeps no other from it."""

    async def set_nodes_power(self, nodes: Sequence[str], *, on: bool) -> None:
        """Has Slurm power nodes down once nothing runs there, or up."""


class SlurmCommandLine:
    """Runs Slurm's commands on this machine."""

    def __init__(
        self, *, folder: Path | None = None, environment: Mapping[str, str] | None = None, timeout_s: float = 10.0
    ) -> None:
        self._folder, self._timeout_s = folder, timeout_s
        fixed = {"SLURM_BITSTR_LEN": "0", "SLURM_TIME_FORMAT": TIME_FORMAT}
        self._environment = {**os.environ, **(environment or {}), **fixed}
        self._version: tuple[int, int] | None = None

    async def read_version(self) -> tuple[int, int]:
        """Returns Slurm's version; it is asked for once."""
        if self._version is None:
            said = (await self._run("sinfo", "--version")).decode(errors="replace").split()
            with contextlib.suppress(IndexError, ValueError):
                major, minor = said[-1].split(".")[:2]
                self._version = int(major), int(minor)
            if self._version is None:
                raise SlurmFailed(f"sinfo --version says {' '.join(said)[:_SAID_MOST]!r}, which is no version")
        return self._version

    async def read_jobs(self) -> bytes:
        """Returns all jobs as JSON."""
        return await self._run("squeue", "--json")

    async def read_columns(self) -> bytes:
        """Returns the columns of all jobs that JobTable reads."""
        return await self._run("squeue", "--noheader", "--all", "--array", "--states=all", "--Format", COLUMNS)

    async def read_nodes(self) -> bytes:
        """Returns all nodes as JSON."""
        if await self.read_version() >= _SCONTROL_JSON:
            return await self._run("scontrol", "show", "nodes", "--json")
        return await self._run("sinfo", "--json")

    async def check_placement(self, job: SlurmJob, nodes: Sequence[str]) -> str:
        """Returns why Slurm would never start a job like this on these nodes; empty if it would."""
        asked = [
            "sbatch", "--test-only", "--wrap=true", "--input=none",
            f"--nodes={job.node_count}", f"--ntasks={max(job.node_count, job.cpus)}", f"--nodelist={','.join(nodes)}",
        ]  # fmt: skip
        asked += [f"--partition={job.partition}"] if job.partition else []
        asked += [f"--constraint={job.features}"] if job.features else []
        asked += [f"--mem={job.memory_bytes >> 20}M"] if job.memory_bytes else []
        asked += [f"--gres=gpu:{one.type}:{one.count}" if one.type else f"--gres=gpu:{one.count}" for one in job.gpus]
        try:
            await self._run(*asked)
        except SlurmFailed as error:
            return str(error)
        return ""

    async def place_jobs(self, placements: Sequence[JobPlacement]) -> None:
        """Requires nodes for jobs, notes the comments and releases those that are held; one that fails keeps no other from it."""
        lines = [
            f"update JobId={one.job_id} ReqNodeList={','.join(one.nodes)} AdminComment={one.comment}"
            f"{' StartTime=now' if one.begins_now else ''}\n" + (f"release {one.job_id}\n" if one.is_held else "")
            for one in placements
        ]
        # A process takes longer than what it asks of slurmctld.
        await self._run("scontrol", text="".join(lines))

    async def hold_jobs(self, job_ids: Sequence[str]) -> None:
        """Holds jobs that wait; one that has begun meanwhile runs on, and keeps no other from it."""
        await self._run("scontrol", text="".join(f"hold {job_id}\n" for job_id in job_ids))

    async def leave_job(self, job_id: str, comment: str) -> None:
        """Takes a requirement of nodes back, notes the comment and releases the job if it is held."""
        await self._update(job_id, "ReqNodeList=", f"AdminComment={comment}")
        await self._run("scontrol", "release", job_id)

    async def requeue_job(self, job: SlurmJob, comment: str) -> None:
        """Notes the comment of a job, has it ended, if it has begun, and queued again, and holds it."""
        await self._update(job.job_id, f"AdminComment={comment}")
        await self._run("scontrol", "hold" if job.is_pending else "requeuehold", job.job_id)

    async def announce_shrink(self, job_id: str, comment: str) -> None:
        """Notes the comment of a running job and tells its batch script by SIGUSR2 to read it."""
        await self._update(job_id, f"AdminComment={comment}")
        await self._run("scancel", "--batch", "--signal=USR2", job_id)

    async def list_step_nodes(self, job_id: str) -> frozenset[str]:
        """Returns the nodes on which steps of a job run; its batch script is none."""
        words = ("--steps", "--noheader", f"--jobs={job_id}", "--Format", STEP_COLUMNS)
        text = await self._run("squeue", *words)
        try:
            return parse_step_nodes(text.decode(errors="replace"))
        except UnreadableAnswer as error:
            raise SlurmFailed(f"squeue {' '.join(words[:3])} {error}") from None

    async def shrink_job(self, job_id: str, nodes: Sequence[str]) -> None:
        """Takes all nodes but these from a running job, and ends its steps there."""
        await self._update(job_id, f"NodeList={','.join(nodes)}")

    async def cancel_job(self, job_id: str) -> None:
        """Cancels a job."""
        await self._run("scancel", job_id)

    async def weigh_nodes(self, weight: int, nodes: Sequence[str]) -> None:
        """Gives nodes a weight, by which Slurm prefers those with a lower one, until slurmctld restarts."""
        await self._run("scontrol", "update", f"NodeName={','.join(nodes)}", f"Weight={weight}")

    async def read_priorities(self) -> str:
        """Returns the priorities of waiting jobs, a line each by PRIORITY_FORM; empty where Slurm takes no site factors from us."""
        if not allows_factors((await self._run("scontrol", "show", "config")).decode(errors="replace")):
            return ""
        return (await self._run("sprio", "--noheader", "--format", PRIORITY_FORM)).decode(errors="replace")

    async def rank_jobs(self, factors: Mapping[str, int]) -> None:
        """Gives waiting jobs site factors, which are added to their priorities; one that fails keeps no other from it."""
        lines = (f"update JobId={job} SiteFactor={factor}\n" for job, factor in factors.items())
        await self._run("scontrol", text="".join(lines))

    async def set_nodes_power(self, nodes: Sequence[str], *, on: bool) -> None:
        """Has Slurm power nodes down once nothing runs there, or up."""
        await self._run("scontrol", "update", f"NodeName={','.join(nodes)}", f"State=POWER_{'UP' if on else 'DOWN'}")

    async def _update(self, job_id: str, *changes: str) -> None:
        await self._run("scontrol", "update", f"JobId={job_id}", *changes)

    async def _run(self, program: str, *arguments: str, text: str | None = None) -> bytes:
        path = program if self._folder is None else str(self._folder / program)
        try:
            process = await asyncio.create_subprocess_exec(
                path,
                *arguments,
                stdin=asyncio.subprocess.DEVNULL if text is None else asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env=self._environment,
                limit=ANSWER_BYTES_MOST,
            )
        except OSError as error:
            raise SlurmFailed(f"{path} cannot be run: {error.strerror}; install Slurm's commands here") from None
        try:
            async with asyncio.timeout(self._timeout_s):
                out, err = await process.communicate(None if text is None else text.encode())
        except TimeoutError:
            raise SlurmFailed(f"{program} did not answer in {self._timeout_s:g} s") from None
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
        if process.returncode:
            said = (err or out).decode(errors="replace").strip().splitlines()
            raise SlurmFailed(f"{program}: {said[-1][:_SAID_MOST] if said else f'ended with {process.returncode}'}")
        return out
