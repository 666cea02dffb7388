"""Job table: the jobs of the last full answer, brought up to date by columns of squeue, which cost a tenth of its JSON.

Owns which columns are read and how they change a job, and for which jobs only a full answer will do. Must not know how commands
run, nor when which answer is read.

Theory. While a job waits, runs and ends little of it changes: its state, its nodes, its times, how it ended, and what was
noted of it here. These are columns of `squeue --Format` in every version, and none of them holds a user's words. All else is in the full answer, the
only truth: a job that was not in the last one is left out until the next, and a GPU that began to be held since is not yet
known by its index. So the table says for how many jobs a full answer is due, and for how many only because of their GPUs, which is less urgent. A job that the columns do not
name may be forgotten by Slurm, which a full answer has to confirm: it stays as it was. Columns that cannot be read leave the job as it was, and the table incomplete.

Cost. Slurm tells of jobs for minutes after they have ended, thousands of them where jobs are short. So only columns that differ
from those of the last time are taken apart, and whoever asks for jobs gets those that have not ended, with the few ended ones
that matter.

Sources: man page of squeue (--Format, SLURM_TIME_FORMAT).
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace

from eelgrid_controller.engines.host_lists import expand_hosts
from eelgrid_controller.engines.slurm.answers import SlurmJob, SlurmJobs, SlurmUnreadable

# Their widths are those at which squeue cuts them: what fills its column may be cut.
_WIDTHS = {
    "JobArrayID": 32, "ArrayTaskID": 12, "State": 24, "Reason": 64, "PriorityLong": 12, "RestartCnt": 8, "StartTime": 16,
    "EndTime": 16, "EligibleTime": 16, "NodeList": 200, "ReqNodes": 200, "exit_code": 12, "admin_comment": 200,
}  # fmt: skip
# With a mark after each; the administrator's comment is the last, since it may hold one itself.
COLUMNS = ",".join(f"{name}:{width}|" for name, width in _WIDTHS.items())
# Times as seconds since 1970.
TIME_FORMAT = "%s"
# The end of a requeued job is NONE in 22.05.
_UNKNOWN = ("", "N/A", "Unknown", "None", "NONE", "(null)", "n/a")
_EXIT = re.compile(r"([0-9]{1,3}):([0-9]{1,3})")


class JobTable:
    """All jobs as far as they are known, with an index of those that have not ended.

    `incomplete` counts those of which only a full answer tells, and `unindexed` those whose GPUs only that names.
    """

    def __init__(self) -> None:
        self.incomplete = self.unindexed = 0
        self.unreadable: tuple[str, ...] = ()
        self._jobs: dict[str, SlurmJob] = {}
        self._live: dict[str, SlurmJob] = {}
        # Those that have ended since the time that was last asked for.
        self._ended: dict[str, SlurmJob] = {}
        # By array its tasks.
        self._tasks: dict[str, list[str]] = {}
        # The columns that say what is known, each with its job: most are the same each time.
        self._keys: dict[bytes, str] = {}
        self._lines: dict[str, bytes] = {}
        # By job its nodes in the last full answer, of those that hold some.
        self._full_nodes: dict[str, tuple[str, ...]] = {}

    @property
    def jobs(self) -> tuple[SlurmJob, ...]:
        """The jobs, in the order of Slurm's last full answer."""
        return tuple(self._jobs.values())

    def select_jobs(self, *, ended_since_s: float) -> list[SlurmJob]:
        """Returns the jobs that have not ended, and those that have ended since a time.

        Times only rise: what had ended before is passed over from then on.
        """
        for key in [key for key, job in self._ended.items() if job.end_s < ended_since_s]:
            del self._ended[key]
        return [*self._live.values(), *self._ended.values()]

    def list_jobs(self, job_ids: Iterable[str]) -> list[SlurmJob]:
        """Returns the jobs with these numbers, of those that are known."""
        return [job for key in job_ids if (job := self._jobs.get(key)) is not None]

    def find_jobs(self, name: str) -> list[SlurmJob]:
        """Returns the jobs of a name: 12, 12_3, or 12_* for all tasks of an array."""
        tasks = self._tasks.get(name.removesuffix("_*"), ())
        keys = [*tasks, name] if name in self._jobs and name not in tasks else tasks
        return [self._jobs[key] for key in keys]

    def fill(self, answer: SlurmJobs) -> None:
        """Takes a full answer."""
        before, self._jobs = self._jobs, {}
        for job in answer.jobs:
            known = before.get(job.job_id)
            # What is as it was stays the same object, by which others know that.
            self._jobs[job.job_id] = known if known is not None and known == job else job
        self.unreadable = answer.unreadable
        self._full_nodes = {job.job_id: job.nodes for job in answer.jobs if job.nodes}
        # Columns are read again where the answer says something else.
        for line, key in [
            (line, key) for line, key in self._keys.items() if self._jobs.get(key) is not before.get(key)
        ]:
            del self._keys[line]
            self._lines.pop(key, None)
        self._live = {key: job for key, job in self._jobs.items() if not job.has_ended}
        self._ended = {key: job for key, job in self._jobs.items() if job.has_ended}
        self._tasks.clear()
        for job in answer.jobs:
            if job.array_id:
                self._tasks.setdefault(job.array_id, []).append(job.job_id)
        self.incomplete = self.unindexed = 0

    def update(self, text: bytes) -> None:
        """Brings the jobs up to date by columns; raises SlurmUnreadable if these are none.

        Only columns that were not there the last time are read.
        """
        lines = dict.fromkeys(text.split(b"\n"))
        rows = [(line, *_split(line)) for line in lines if line not in self._keys and line.strip()]
        for line in self._keys.keys() - lines.keys():
            key = self._keys.pop(line)
            if self._lines.get(key) == line:
                del self._lines[key]
        unknown = 0
        for line, key, columns in rows:
            job = self._jobs.get(key)
            if job is None:
                unknown += 1
                continue
            try:
                self._put(key, _change(job, columns))
            except (SlurmUnreadable, ValueError):
                continue
            self._keys[line], self._lines[key] = key, line
        # A job that is not named may be forgotten by Slurm, and one whose columns cannot be read stays as it was.
        self.incomplete = unknown + len(self._jobs) - len(self._lines)
        self.unindexed = sum(
            job.holds_resources and bool(job.gpus) and job.nodes != self._full_nodes.get(key)
            for key, job in self._live.items()
        )

    def _put(self, key: str, job: SlurmJob) -> None:
        self._jobs[key] = job
        for jobs, is_there in ((self._live, not job.has_ended), (self._ended, job.has_ended)):
            if is_there:
                jobs[key] = job
            else:
                jobs.pop(key, None)


def _split(line: bytes) -> tuple[str, Mapping[str, str]]:
    """Splits a line of columns; returns the job and what is said of it."""
    text = line.decode(errors="replace")
    columns = [column.strip() for column in text.split("|", len(_WIDTHS) - 1)]
    if len(columns) != len(_WIDTHS):
        raise SlurmUnreadable(f"squeue has {text[:80]!r} where {len(_WIDTHS)} columns are expected")
    # In 22.05 the first column of a task is 12_3, later 12.
    is_task = columns[1] not in _UNKNOWN and "_" not in columns[0]
    key = f"{columns[0]}_{columns[1]}" if is_task else columns[0]
    return key, dict(zip(_WIDTHS, columns, strict=True))


def _change(job: SlurmJob, columns: Mapping[str, str]) -> SlurmJob:
    for name, width in _WIDTHS.items():
        if len(columns[name]) >= width and name != "admin_comment":
            raise SlurmUnreadable(f"{name} may be cut")
    state, nodes = columns["State"], expand_hosts(_read_text(columns["NodeList"]))
    if not re.fullmatch(r"[A-Z_]+", state):
        raise SlurmUnreadable(f"State has {state[:40]!r}")
    # A job that was shrunk has fewer, in proportion, as far as columns tell.
    cpus = job.cpus * len(nodes) // len(job.nodes) if nodes and len(nodes) < len(job.nodes) else job.cpus
    exit_code, exit_signal = job.exit_code, job.exit_signal
    if columns["exit_code"]:
        exit_code, exit_signal = _read_exit(columns["exit_code"])
    return replace(
        job,
        state=state,
        # A flag hides the state beside it here, as in the JSON of 22.05.
        flags=frozenset(),
        reason=columns["Reason"],
        is_held=int(columns["PriorityLong"]) == 0,
        restarts=int(columns["RestartCnt"]),
        start_s=_read_time(columns["StartTime"]),
        end_s=_read_time(columns["EndTime"]),
        eligible_s=_read_time(columns["EligibleTime"]),
        nodes=nodes,
        node_count=len(nodes) or job.node_count,
        cpus=max(1, cpus),
        gpu_indexes=job.gpu_indexes if nodes == job.nodes else None,
        required_nodes=expand_hosts(_read_text(columns["ReqNodes"])),
        exit_code=exit_code,
        exit_signal=exit_signal,
        admin_comment=_read_text(columns["admin_comment"].removesuffix("|").rstrip()),
    )


def _read_exit(text: str) -> tuple[int, int]:
    """Reads an exit code and a signal: in 22.05 the status of wait(2), later 3:0."""
    if text.isdigit():
        return int(text) >> 8 & 0xFF, int(text) & 0x7F
    matched = _EXIT.fullmatch(text)
    if matched is None:
        raise SlurmUnreadable(f"exit_code has {text[:40]!r}")
    return int(matched[1]), int(matched[2])


def _read_text(text: str) -> str:
    return "" if text in _UNKNOWN else text


def _read_time(text: str) -> int:
    return 0 if text in _UNKNOWN else int(text)
