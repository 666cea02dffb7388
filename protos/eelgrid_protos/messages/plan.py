"""Node plans: the desired state of a node, and the result of applying it; mirrored by plan.proto."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import field, replace
from typing import Annotated

from eelgrid_protos.errors import Violation
from eelgrid_protos.messages.job_array import ARRAY_VARIABLE_PREFIX, PARAMETER_VARIABLE_PREFIX, PARAMETERS_MOST
from eelgrid_protos.messages.reading import INSTANCES_PER_GPU_MOST
from eelgrid_protos.quantities import (
    GPU_MILLI_WHOLE,
    MIB,
    Bytes,
    Count,
    CpuMilli,
    GpuMilli,
    Identifier,
    Label,
    Many,
    Megahertz,
    MigProfile,
    Name,
    Nanoseconds,
    OpenEnum,
    Range,
    RequiredMigProfile,
    Seconds,
    Sentence,
    Text,
    Uint32,
    Uint64,
    Watts,
)
from eelgrid_protos.values import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """The slice that a replica uses, chosen by the partition planner; an empty profile is the whole GPU."""

    profile: MigProfile = ""
    start: Count = 0
    batch: Uint32 = 1
    processes: Uint32 = 1
    label: Label = ""
    gpu_milli: GpuMilli = GPU_MILLI_WHOLE


# Linux accepts 128 kB of one argument; the journal keeps every command, and a plan all those of its node.
ARGUMENTS_MOST = 1000
_VARIABLES_MOST = 500
COMMAND_CHARACTERS_MOST = 65_536
ARGUMENT_CHARACTERS_MOST = 32_768
Argument = Annotated[
    str, Text(ARGUMENT_CHARACTERS_MOST, False, re.compile(r"[^\x00\ud800-\udfff]*"), "no NUL characters")
]
VariableName = Annotated[str, Text(253, True, re.compile(r"[A-Za-z_][A-Za-z0-9_]*"), "letters, digits and '_'")]
WorkingDirectory = Annotated[str, Text(4096, True, re.compile(r"/[^\x00-\x1f\x7f\ud800-\udfff]*"), "an absolute path")]
STOP_SIGNALS = ("TERM", "INT", "HUP", "QUIT", "USR1", "USR2", "KILL")
# A stopped process may take a day to write its checkpoint; a job may run for a year.
_GRACE_S_MOST = 86_400.0
_TIME_LIMIT_S_MOST = 366 * 86_400.0
LOG_BYTES_MOST = 2**40
OWN_VARIABLES = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER")


class StandardInput(OpenEnum):
    """What a process reads from as its standard input; unspecified is nothing."""

    UNSPECIFIED = 0
    PIPE = 1
    TERMINAL = 2


_TERMINAL_MOST = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class TerminalSize:
    """The size of a terminal in characters."""

    rows: Annotated[int, Range(1, _TERMINAL_MOST)] = 24
    columns: Annotated[int, Range(1, _TERMINAL_MOST)] = 80


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSpec:
    """The command that each replica of a workload runs, as the user of its owner or of the agent."""

    argv: Annotated[tuple[Argument, ...], Many(ARGUMENTS_MOST)]
    environment: Annotated[Mapping[VariableName, Argument], Many(_VARIABLES_MOST)] = field(default_factory=dict)
    working_directory: WorkingDirectory
    stop_signal: Annotated[str, Text(8, True)] = "TERM"
    grace_s: Annotated[float, Range(0.0, _GRACE_S_MOST, "s")] = 10.0
    time_limit_s: Annotated[float, Range(0.0, _TIME_LIMIT_S_MOST, "s")] = 0.0
    log_bytes_most: Annotated[int, Range(0, LOG_BYTES_MOST, "bytes")] = 64 * MIB
    # Of an element of an array; the controller sets them.
    element_variables: Annotated[Mapping[VariableName, Argument], Many(PARAMETERS_MOST + 3)] = field(
        default_factory=dict
    )
    standard_input: StandardInput = StandardInput.UNSPECIFIED
    # Of its terminal at its start; None for the usual 24 rows of 80 columns.
    terminal_size: TerminalSize | None = None
    # Announces the end so long before the time limit, or before the stop signal where it must end earlier.
    warn_signal: Annotated[str, Text(8)] = ""
    warn_before_s: Annotated[float, Range(0.0, _GRACE_S_MOST, "s")] = 0.0

    def mask_environment(self) -> "ProcessSpec":
        """Returns it for readers who may not see the values of its environment: of each stars are left, three at the most."""
        return replace(self, environment={name: "***"[: len(text)] for name, text in self.environment.items()})

    def violations(self) -> Iterator[Violation]:
        """Checks the size of the command, its signal, and that it sets no variable of the agent."""
        if not self.argv or not self.argv[0]:
            yield Violation("argv", "is empty", "give the program and its arguments")
        if self.stop_signal not in STOP_SIGNALS:
            yield Violation("stop_signal", f"is {self.stop_signal!r}", f"choose one of {', '.join(STOP_SIGNALS)}")
        if self.warn_signal and self.warn_signal not in STOP_SIGNALS:
            yield Violation("warn_signal", f"is {self.warn_signal!r}", f"choose one of {', '.join(STOP_SIGNALS)}")
        variables = (*self.environment.items(), *self.element_variables.items())
        characters = sum(map(len, self.argv)) + sum(len(key) + len(text) for key, text in variables)
        if characters > COMMAND_CHARACTERS_MOST:
            remedy = f"leave variables out, or pass a file: {COMMAND_CHARACTERS_MOST} at the most"
            yield Violation("environment", f"has {characters} characters together with argv", remedy)
        own = next((name for name in self.environment if name in OWN_VARIABLES or name.startswith("EELGRID_")), None)
        if own is not None:
            yield Violation("environment", f"sets {own}, which the agent sets", "leave it out")
        allowed = (ARRAY_VARIABLE_PREFIX, PARAMETER_VARIABLE_PREFIX)
        other = next((name for name in self.element_variables if not name.startswith(allowed)), None)
        if other is not None:
            yield Violation("element_variables", f"sets {other}, which is no variable of an element", "use environment")


class AttemptState(OpenEnum):
    """State of one run of a replica's process; a lost one left no record of its end."""

    UNSPECIFIED = 0
    RUNNING = 1
    ENDED = 2
    LOST = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class JobProgress:
    """How far a job says that it is: its step, of how many (0 if not known), and a figure of its own."""

    step: Uint64 = 0
    total: Uint64 = 0
    metric: Annotated[float, Range(-1e300, 1e300)] | None = None
    time_ns: Nanoseconds = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptStatus:
    """One run of a replica's process; without an exit code and a signal it was never started, or is lost."""

    workload_id: Identifier
    replica: Count
    attempt: Uint32
    state: AttemptState
    exit_code: Annotated[int, Range(0, 255)] | None = None
    signal: Annotated[int, Range(0, 64)] = 0
    reason: Label = ""
    started_ns: Nanoseconds = 0
    ended_ns: Nanoseconds = 0
    checkpointed_ns: Nanoseconds = 0
    # How long one of its checkpoints stops it.
    checkpoint_s: Seconds = 0.0
    # It never started, since another process held a GPU of it: no failure.
    gpu_held: bool = False
    # What it last reported of itself; never in the journal.
    progress: JobProgress | None = None
    # `digest_plain` of its process: of ended attempts that Welcome asked for; never in the journal.
    process_digest: Label = ""
    # Why its node is to blame for its end, and not its program.
    node_fault: Label = ""

    @property
    def is_over(self) -> bool:
        """Returns whether nothing of it runs any more."""
        return self.state in (AttemptState.ENDED, AttemptState.LOST)

    @property
    def is_success(self) -> bool:
        """Returns whether it exited with 0 by itself."""
        return self.state is AttemptState.ENDED and self.exit_code == 0 and not self.reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """One replica of a workload on devices of this node."""

    workload_id: Identifier
    replica: Count
    gpu_uuids: Annotated[tuple[Identifier, ...], Many(64)] = ()
    gpu_milli: GpuMilli = 0
    cpu_milli: CpuMilli = 0
    memory_bytes: Bytes = 0
    gpu_instance: Slice | None = None
    process: ProcessSpec | None = None
    attempt: Uint32 = 0
    replicas: Count = 0
    stop: bool = False
    # As of its placement; 0 if they are not known.
    checkpoint_interval_s: Seconds = 0.0
    interrupted_every_s: Seconds = 0.0
    # The process starts only once the plan's power limit is in force on each of its GPUs.
    limit_before_start: bool = False
    # The owner of the workload, if the owner proved who it is.
    run_as: Label = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSetting:
    """Desired limits of one device; None sets no limit."""

    gpu_uuid: Identifier
    power_limit_w: Watts | None = None
    sm_clock_min_mhz: Megahertz | None = None
    sm_clock_max_mhz: Megahertz | None = None
    power_profile: Annotated[int, Range(0, 255)] | None = None

    def violations(self) -> Iterator[Violation]:
        """Checks that clocks are locked as a pair, low before high."""
        low, high = self.sm_clock_min_mhz, self.sm_clock_max_mhz
        if (low is None) != (high is None) or (low is not None and high is not None and low > high):
            yield Violation("sm_clock_min_mhz", "is no range with sm_clock_max_mhz", "give both, low before high")


@dataclass(frozen=True, slots=True, kw_only=True)
class WantedInstance:
    """One GPU instance of a layout; no compute slices means one compute instance over all of it."""

    profile: RequiredMigProfile
    start: Count
    compute_slices: Annotated[tuple[Count, ...], Many(8)] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuLayout:
    """The complete MIG layout desired for one device."""

    gpu_uuid: Identifier
    mig_enabled: bool = False
    instances: Annotated[tuple[WantedInstance, ...], Many(INSTANCES_PER_GPU_MOST)] = ()

    def violations(self) -> Iterator[Violation]:
        """Checks that only MIG mode has instances."""
        if self.instances and not self.mig_enabled:
            yield Violation("instances", "are wanted with MIG off", "set mig_enabled, or ask for no instances")


@dataclass(frozen=True, slots=True, kw_only=True)
class NodePlan:
    """The complete desired state of a node; it replaces the previous plan."""

    node_name: Name
    epoch: Uint64
    lease_s: Seconds
    enforce: bool = False
    assignments: Annotated[tuple[Assignment, ...], Many(4096)] = ()
    gpu_settings: Annotated[tuple[GpuSetting, ...], Many(64)] = ()
    gpu_layouts: Annotated[tuple[GpuLayout, ...], Many(64)] = ()
    power_budget_w: Watts | None = None

    def mask_environments(self) -> "NodePlan":
        """Returns it for readers: without the values of the environments of its processes, which only their owners see."""
        masked = tuple(
            one if one.process is None else replace(one, process=one.process.mask_environment())
            for one in self.assignments
        )
        return replace(self, assignments=masked)


class ApplyStatus(OpenEnum):
    """Result of one item of a plan."""

    UNSPECIFIED = 0
    APPLIED = 1
    OBSERVED = 2
    REFUSED = 3
    FAILED = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class ApplyResult:
    """One item that was not applied normally, or a setting with the value read back."""

    subject: Identifier
    status: ApplyStatus
    detail: Sentence = ""
    power_limit_w: Watts | None = None
    rule: Label = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanApplied:
    """The result of a plan on its node."""

    epoch: Uint64
    status: ApplyStatus
    results: Annotated[tuple[ApplyResult, ...], Many(8192)] = ()
