"""The Slurm node of this machine: its settings file, and the adapter that asks slurmctld and starts and ends slurmd.

Owns processes and their time limits, the files that slurmd reads, and what is read of scontrol's text. Must not know in which
order a node goes out of service (slurm_node.py).

Three files are written: gres.conf, the UUIDs of its indexes, and the options with which slurmd starts as a dynamic node. The last
one belongs in memory (/run): its unit has no other source of options, so slurmd does not start while they are not there.

Source: man pages of scontrol, squeue, slurmd (-Z, --conf), gres.conf, systemd.exec (EnvironmentFile); tried on 22.05.8.
"""

import os
import re
import shlex
import socket
import subprocess
import time
import tomllib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import field, fields
from pathlib import Path
from typing import Any

from eelgrid_agent.enforce.mig.host import CapabilityNodes
from eelgrid_agent.engine.slurm_jobs import UUIDS_FILE
from eelgrid_agent.engine.slurm_node import (
    SLURM_NODE_FILE,
    SLURM_NODE_JOURNAL,
    NodeGres,
    OutageLimits,
    OutageRecord,
    SlurmNodeError,
    SlurmNodeService,
    SlurmNodeView,
    build_gres,
    normalize_gres,
)
from eelgrid_agent.state_files import MemoryState, StateFile, StateStore, replace_file
from eelgrid_protos.errors import Violation
from eelgrid_protos.messages import ComputeInstance, Gpu, GpuInstance
from eelgrid_protos.values import dataclass

_ANSWER_S, _ANSWER_BYTES_MOST, _SAID_MOST = 20.0, 1024 * 1024, 200
_FILE_BYTES_MOST = 64 * 1024
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_STATE = re.compile(r" State=(\S+)")
_GRES = re.compile(r" Gres=(\S+)")
# scontrol puts who gave it and when behind a reason.
_REASON = re.compile(r" Reason=(.*?)(?: \[[^\[\]]*\])?(?: [A-Z]\w*=|\s*$)")
_RESERVATION = re.compile(r"ReservationName=(\S+) .*?\bNodes=(?!\(null\))(\S+)")
_NO_NODE = "not found"
# What holds a node; jobs that wait hold nothing.
_JOB_STATES = "RUNNING,COMPLETING,CONFIGURING,SUSPENDED,STOPPED,SIGNALING,STAGE_OUT,RESIZING"
_OPTIONS = "SLURMD_OPTIONS"
# Nothing that a shell or systemd would take apart.
_CONF = re.compile(r"[A-Za-z0-9 ._,:=@/\[\]()*+-]{0,1000}")
_NOT_CONF = re.compile(r"\b(?:gres|nodename|port)\s*=", re.IGNORECASE)
_CONF_REMEDY = "write it as in slurm.conf, without quotes, Gres, NodeName and Port"
_SLURM_CONF = Path("/etc/slurm/slurm.conf")


class SlurmNodeFileError(ValueError):
    """The settings file cannot be used; the message names the file, the field and the remedy."""

    def __init__(self, path: Path, field_name: str, problem: str, remedy: str) -> None:
        self.violation = Violation(f"{path}: {field_name}" if field_name else str(path), problem, remedy)
        super().__init__(str(self.violation))


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmNodeSettings:
    """One node; `conf` is what slurm.conf would say of it, without its name, address and GRES."""

    node: str = field(default_factory=lambda: socket.gethostname().partition(".")[0])
    conf: str = ""
    # GRES type of GPUs without MIG; by default their model.
    whole_type: str = ""
    slurm_conf: Path = _SLURM_CONF
    gres_file: Path = Path("/etc/slurm/gres.conf")
    uuids_file: Path = UUIDS_FILE
    options_file: Path = Path("/run/eelgrid-slurmd/options")
    start: tuple[str, ...] = ("systemctl", "start", "slurmd")
    stop: tuple[str, ...] = ("systemctl", "stop", "slurmd")
    # How long jobs may run on once the node is drained for a change, in seconds.
    drain_wait_s: float = 0.0
    # Where /dev and /proc are.
    root: Path = Path("/")


def load_slurm_node(path: Path) -> SlurmNodeSettings:
    """Reads a settings file (TOML); raises SlurmNodeFileError."""
    try:
        with path.open("rb") as file:
            content = file.read(_FILE_BYTES_MOST + 1)
        if len(content) > _FILE_BYTES_MOST:
            raise SlurmNodeFileError(path, "", f"has more than {_FILE_BYTES_MOST} bytes", "describe one node")
        document = tomllib.loads(content.decode())
    except OSError as error:
        raise SlurmNodeFileError(path, "", f"cannot be read ({error.strerror})", "write it") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SlurmNodeFileError(path, "", f"is no TOML ({error})", "correct it") from None
    kinds = {one.name: one.type for one in fields(SlurmNodeSettings)}
    found: dict[str, Any] = {}
    for name, value in document.items():
        if name not in kinds:
            raise SlurmNodeFileError(path, name, "is no setting", f"use {', '.join(kinds)}")
        found[name] = _parse_setting(path, name, kinds[name], value)
    settings = SlurmNodeSettings(**found)
    if not _NAME.fullmatch(settings.node):
        raise SlurmNodeFileError(path, "node", f"is {settings.node!r}", "give the node's name in Slurm")
    if not _CONF.fullmatch(settings.conf) or _NOT_CONF.search(settings.conf):
        raise SlurmNodeFileError(path, "conf", f"is {settings.conf[:80]!r}", _CONF_REMEDY)
    return settings


def _parse_setting(path: Path, name: str, kind: object, value: object) -> object:
    if kind == tuple[str, ...]:
        if not isinstance(value, list) or not value or not all(isinstance(one, str) and one for one in value):
            raise SlurmNodeFileError(path, name, "is no command", "give a list of words")
        return tuple(value)
    if kind is float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0.0 <= value <= 86_400.0:
            raise SlurmNodeFileError(path, name, f"is {value!r}", "give seconds between 0 and a day")
        return float(value)
    if not isinstance(value, str):
        raise SlurmNodeFileError(path, name, f"is {value!r}", "give text")
    return Path(value) if kind is Path else value


class SlurmNodeHost:
    """The node of this machine. Its calls are those of `SlurmNodePort`."""

    def __init__(
        self, settings: SlurmNodeSettings, *, run: Callable[[Sequence[str], Path], "CommandAnswer"] | None = None
    ) -> None:
        """`run` runs a command with a slurm.conf."""
        self._settings, self._run = settings, run or run_command

    @property
    def has_options(self) -> bool:
        """Whether slurmd has the options to start with."""
        return self._settings.options_file.exists()

    def read_node(self) -> SlurmNodeView | None:
        """Returns the node as slurmctld shows it; None where it has none of this name."""
        answer = self._ask("scontrol", "--oneliner", "show", "node", self._settings.node)
        if answer.code and _NO_NODE in answer.text:
            return None
        if answer.code:
            raise _failed("scontrol show node", answer)
        return parse_node(answer.text)

    def list_jobs(self) -> tuple[str, ...]:
        """Returns the jobs that hold something of the node."""
        words = (
            "squeue",
            "--noheader",
            f"--nodelist={self._settings.node}",
            f"--states={_JOB_STATES}",
            "--Format=JobID:20",
        )
        return tuple(dict.fromkeys(self._demand(*words).split()))

    def list_reservations(self) -> tuple[str, ...]:
        """Returns the reservations that name the node."""
        found = list[str]()
        for line in self._demand("scontrol", "--oneliner", "show", "reservation").splitlines():
            named = _RESERVATION.match(line)
            if (
                named is not None
                and self._settings.node in self._demand("scontrol", "show", "hostnames", named[2]).split()
            ):
                found.append(named[1])
        return tuple(found)

    def drain(self, reason: str) -> None:
        """Has Slurm start no job there any more."""
        self._demand("scontrol", "update", f"NodeName={self._settings.node}", "State=DRAIN", f"Reason={reason}")

    def resume(self) -> None:
        """Takes a drain back."""
        self._demand("scontrol", "update", f"NodeName={self._settings.node}", "State=RESUME")

    def delete(self) -> None:
        """Deletes the node, which holds no job."""
        self._demand("scontrol", "delete", f"NodeName={self._settings.node}")

    def stop_slurmd(self) -> None:
        """Removes the options of slurmd and ends it, if it runs."""
        try:
            self._settings.options_file.unlink(missing_ok=True)
        except OSError as error:
            raise SlurmNodeError(f"{self._settings.options_file}: cannot be removed ({error.strerror})") from error
        self._demand(*self._settings.stop)

    def start_slurmd(self, gres: NodeGres) -> None:
        """Writes gres.conf, the UUIDs and the options, and starts slurmd."""
        settings = self._settings
        conf = " ".join(filter(None, (settings.conf, f"Gres={gres.text}" if gres.devices else "")))
        options = shlex.join(["-Z", "-N", settings.node, "--conf", conf])
        # systemd, like a shell, takes a value in double quotes; nothing in it has one.
        files = {
            settings.gres_file: gres.format_gres_conf(settings.node),
            settings.uuids_file: gres.format_uuids(),
            settings.options_file: f'{_OPTIONS}="{options}"\n',
        }
        for path, text in files.items():
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                # Prologs of users' jobs read them, too.
                replace_file(path, text.encode(), mode=0o644)
            except OSError as error:
                raise SlurmNodeError(
                    f"{path}: cannot be written ({error.strerror}); make room or give another path"
                ) from error
        self._demand(*settings.start)

    def _ask(self, *words: str) -> "CommandAnswer":
        return self._run(words, self._settings.slurm_conf)

    def _demand(self, *words: str) -> str:
        answer = self._ask(*words)
        if answer.code:
            raise _failed(" ".join(words[:3]), answer)
        return answer.text


def parse_node(text: str) -> SlurmNodeView:
    """Parses a node of `scontrol --oneliner show node`; raises SlurmNodeError."""
    line = " " + " ".join(text.split())
    state, gres, reason = _STATE.search(line), _GRES.search(line), _REASON.search(line)
    if state is None:
        raise SlurmNodeError(f"scontrol says {line[1:80]!r} of the node, which is no state")
    shown = "" if gres is None or gres[1] == "(null)" else gres[1]
    # IDLE*+DRAIN: the sign says that the node does not respond.
    states = frozenset(word.strip("*~#!%$@^-") for word in state[1].split("+"))
    states |= {"NOT_RESPONDING"} if "*" in state[1] else set()
    return SlurmNodeView(states=states, gres=normalize_gres(shown), reason="" if reason is None else reason[1])


def list_device_files(
    settings: SlurmNodeSettings,
) -> Callable[[Gpu, GpuInstance | None, ComputeInstance | None], tuple[str, ...]]:
    """Returns what lists the files of a GPU, or of a MIG device of it."""
    nodes = CapabilityNodes(settings.root)

    def list_files(gpu: Gpu, instance: GpuInstance | None, child: ComputeInstance | None) -> tuple[str, ...]:
        names = nodes.list_device_nodes(gpu, instance, child)
        return tuple(str(settings.root / name.lstrip("/")) for name in names)

    return list_files


def build_slurm_node(
    settings: SlurmNodeSettings,
    directory: Path | None,
    *,
    list_gpus: Callable[[], Iterable[Gpu]],
    open_nodes: Callable[[Gpu], str] = lambda _: "",
    drain_wait_s: float | None = None,
) -> SlurmNodeService:
    """Builds the node of this machine, with its journal in a state directory, or in memory.

    `list_gpus` reads the devices, and `open_nodes` creates the files that a device's slices need: slurmd does not start without.
    """
    list_files = list_device_files(settings)

    def read_gres() -> NodeGres:
        gpus = tuple(list_gpus())
        for gpu in gpus:
            open_nodes(gpu)
        return build_gres(gpus, list_files, whole_type=settings.whole_type)

    journal: StateStore[OutageRecord] = (
        MemoryState(OutageRecord()) if directory is None else StateFile(directory / SLURM_NODE_FILE, SLURM_NODE_JOURNAL)
    )
    return SlurmNodeService(
        SlurmNodeHost(settings),
        journal,
        read_gres=read_gres,
        sleep=time.sleep,
        monotonic_s=time.monotonic,
        limits=OutageLimits(drain_wait_s=settings.drain_wait_s if drain_wait_s is None else drain_wait_s),
    )


@dataclass(frozen=True, slots=True)
class CommandAnswer:
    """How a command ended, and what it printed."""

    code: int
    text: str


def run_command(words: Sequence[str], slurm_conf: Path) -> CommandAnswer:
    """Runs a command, bounded in time and output; one that cannot be run has a code, too."""
    environment = {**os.environ, "SLURM_CONF": str(slurm_conf)}
    try:
        # No shell, and words of ours and of the operator only. A daemon keeps what it is given open: it gets nothing.
        done = subprocess.run(  # noqa: S603
            words, stdin=subprocess.DEVNULL, capture_output=True, timeout=_ANSWER_S, check=False, env=environment
        )
    except FileNotFoundError:
        return CommandAnswer(127, f"{words[0]} is not installed here")
    except subprocess.TimeoutExpired:
        return CommandAnswer(124, f"no answer in {_ANSWER_S:g} s")
    except OSError as error:
        return CommandAnswer(126, error.strerror or str(error))
    output = done.stdout + (done.stderr if done.returncode else b"")
    return CommandAnswer(done.returncode, output[:_ANSWER_BYTES_MOST].decode(errors="replace"))


def _failed(what: str, answer: CommandAnswer) -> SlurmNodeError:
    return SlurmNodeError(f"{what}: {' '.join(answer.text.split())[-_SAID_MOST:] or f'ended with {answer.code}'}")
