"""Whether the GPUs of an attempt are free, by what the driver says: a plan knows only the work that it placed.

Owns the attempts that wait for their GPUs, and why. Must not start anything, nor call the driver: the loop hands in
what it found. Only whole GPUs are waited for; a share has neighbours, and a MIG device belongs to its slice.

A GPU is free when no compute process has a context on it, and its memory is back: a context that ends gives its memory
back a little later than the process is gone. What the driver itself holds differs by machine, so the least that was
ever seen without a process is the measure. Memory that does not return in time is leaked; waiting does not mend it, so
the attempt starts then, and the log says so.

Where a power budget does not hold what GPUs draw at their default limits, an attempt waits until the driver says that
each of its GPUs has the limit that the plan sets (`Assignment.limit_before_start`); it never starts above it. A GPU that
does not get it in time is cordoned for a while: the attempt would come back to it at once. Not where the plan only observes,
which is no fault of the GPU: the controller starts no work at limits there.

Another's process is never killed. While it holds the GPU, the device is cordoned with its name, which goes to the
controller with the inventory: no more work is placed there, and `eelctl` shows why.
"""

import logging
import pwd
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from eelgrid_agent.devices.port import DeviceError, DevicePort, ProcessKind
from eelgrid_agent.engine.port import AttemptKey, attempt_key
from eelgrid_protos.messages import Assignment, GpuSetting, Reading
from eelgrid_protos.quantities import GPU_MILLI_WHOLE

_LOG = logging.getLogger("eelgrid.agent")
# How often a GPU that another holds is looked at; one whose memory returns is looked at in every turn of the loop.
_FOREIGN_AGAIN_NS = 1_000_000_000
MEMORY_BACK_WITHIN_NS = 10_000_000_000
# An attempt whose GPU another holds for so long, or does not get its limit, returns to the queue, where any GPU will do.
HELD_MOST_NS = 60_000_000_000
# A GPU that awaits its limit is looked at so often.
_LIMIT_AGAIN_NS = 100_000_000
# A GPU that did not get its limit in time takes no new work for so long.
_WITHOUT_LIMIT_NS = 600_000_000_000
# Drivers round limits.
_LIMIT_SLACK_W = 1.0
_MEMORY_SLACK_BYTES = 256 * 1024 * 1024
# CUDA's multi-process server stays on its GPUs while it has no clients. The kernel keeps 15 letters of a name.
_SHARED_SERVERS = ("nvidia-cuda-mps",)


class GpuUse(NamedTuple):
    """What the driver says of one GPU; None is what it does not tell."""

    pids: tuple[int, ...] | None
    memory_bytes: float | None
    power_limit_w: float | None = None


def needs_free_gpus(assignment: Assignment) -> bool:
    """Returns whether an assignment has whole GPUs."""
    return assignment.gpu_milli == GPU_MILLI_WHOLE and assignment.gpu_instance is None and bool(assignment.gpu_uuids)


def read_gpu_use(device: DevicePort, uuids: Collection[str]) -> dict[str, GpuUse]:
    """Asks the driver for compute processes and memory; what it cannot tell is left open."""
    found = {}
    for uuid in uuids:
        pids, values = None, dict[Reading, object]()
        try:
            pids = tuple(one.pid for one in device.processes(uuid) if one.kind is ProcessKind.COMPUTE)
            values = dict(device.read(uuid).values)
        except DeviceError:
            pass
        memory_bytes, limit_w = (
            value if isinstance(value := values.get(reading), int | float) else None
            for reading in (Reading.MEMORY_USED_BYTES, Reading.POWER_LIMIT_W)
        )
        found[uuid] = GpuUse(pids, memory_bytes, limit_w)
    return found


def read_process_name(pid: int) -> str:
    """Returns a process's program, as the kernel has it; empty if it cannot be seen from here."""
    try:
        name = Path(f"/proc/{pid}/comm").read_text("utf-8", "replace").strip()
    except OSError:
        return ""
    # A program may name itself as it likes.
    return "".join(letter if letter.isascii() and letter.isprintable() else "?" for letter in name)


def describe_process(pid: int) -> str:
    """Names a process by id, user and program, as far as they can be seen from here."""
    try:
        uid = Path(f"/proc/{pid}").stat().st_uid
    except OSError:
        return f"process {pid}"
    try:
        user = pwd.getpwuid(uid).pw_name
    except KeyError:
        user = str(uid)
    return f"process {pid} ({user}, {read_process_name(pid) or 'unknown program'})"


@dataclass(slots=True)
class _Waiting:
    """An assignment that waits; since when only memory keeps it, another's process, or a limit, 0 if that does not."""

    assignment: Assignment
    memory_since_ns: int = 0
    held_since_ns: int = 0
    limit_since_ns: int = 0
    above_limit: Collection[str] = ()


class GpuReadiness:
    """The attempts that wait for their GPUs. Times are monotonic."""

    def __init__(
        self, *, describe: Callable[[int], str] = describe_process, name: Callable[[int], str] = read_process_name
    ) -> None:
        self._describe = describe
        self._name = name
        self._waiting: dict[AttemptKey, _Waiting] = {}
        # By UUID: the most that its limit may be, in watts, before an attempt that says so starts.
        self._limits_w: dict[str, float] = {}
        # By UUID: why it takes no work since it did not get its limit, and until when.
        self._unlimited: dict[str, tuple[str, int]] = {}
        # By UUID: who holds it, and when it is looked at again.
        self._foreign: dict[str, str] = {}
        self._look_at_ns: dict[str, int] = {}
        self._idle_bytes: dict[str, float] = {}

    @property
    def cordons(self) -> Mapping[str, str]:
        """GPUs that others hold, and who they are, and those that did not get their limit."""
        return {**{uuid: reason for uuid, (reason, _) in self._unlimited.items()}, **self._foreign}

    @property
    def waiting(self) -> frozenset[AttemptKey]:
        """The attempts that wait."""
        return frozenset(self._waiting)

    def set_wanted(self, wanted: Collection[Assignment], settings: Collection[GpuSetting] = ()) -> None:
        """Replaces the attempts that wait: those of the newest plan that were not started; `settings` are that plan's."""
        keys = {attempt_key(item): item for item in wanted}
        self._waiting = {key: self._renew(key, item) for key, item in keys.items()}
        limited = {uuid for item in wanted if item.limit_before_start for uuid in item.gpu_uuids}
        self._limits_w = {
            one.gpu_uuid: one.power_limit_w
            for one in settings
            if one.gpu_uuid in limited and one.power_limit_w is not None
        }

    def _renew(self, key: AttemptKey, item: Assignment) -> _Waiting:
        """Returns a wait as the newest plan has it, which goes on unless that names other GPUs."""
        one = self._waiting.get(key)
        if one is None or one.assignment.gpu_uuids != item.gpu_uuids:
            return _Waiting(item)
        return replace(one, assignment=item)

    def list_due_gpus(self, now_ns: int) -> tuple[str, ...]:
        """Returns the GPUs to ask the driver about now."""
        wanted = {uuid for one in self._waiting.values() for uuid in one.assignment.gpu_uuids}
        wanted |= {uuid for uuid, (_, until_ns) in self._unlimited.items() if now_ns >= until_ns}
        return tuple(sorted(uuid for uuid in wanted | self._foreign.keys() if now_ns >= self._look_at_ns.get(uuid, 0)))

    def observe(self, uses: Mapping[str, GpuUse], now_ns: int) -> tuple[Assignment, ...]:
        """Takes what the driver said; returns the assignments whose GPUs are free, which wait no longer."""
        short = {uuid for uuid, use in uses.items() if not self._is_free(uuid, use, now_ns)}
        self._unlimited = {uuid: one for uuid, one in self._unlimited.items() if now_ns < one[1]}
        ready = []
        for key, one in list(self._waiting.items()):
            uuids = one.assignment.gpu_uuids
            is_held = any(uuid in self._foreign for uuid in uuids)
            one.held_since_ns = (one.held_since_ns or now_ns) if is_held else 0
            if is_held or not all(uuid in uses for uuid in uuids):
                one.memory_since_ns = 0
                # While another holds a GPU, no limit is what keeps the attempt.
                one.limit_since_ns = 0 if is_held else one.limit_since_ns
                continue
            one.above_limit = [uuid for uuid in uuids if self._is_above_limit(uuid, uses[uuid])]
            one.limit_since_ns = (one.limit_since_ns or now_ns) if one.above_limit else 0
            if one.above_limit:
                self._look_at_ns |= dict.fromkeys(one.above_limit, now_ns + _LIMIT_AGAIN_NS)
                continue
            leaked = [uuid for uuid in uuids if uuid in short]
            if leaked:
                one.memory_since_ns = one.memory_since_ns or now_ns
                if now_ns - one.memory_since_ns < MEMORY_BACK_WITHIN_NS:
                    continue
                _LOG.warning(
                    "event=gpu_memory_not_returned gpu=%s workload=%s remedy='eelctl gpus; reset the GPU when it is idle'",
                    ",".join(leaked),
                    key.workload_id,
                )
            del self._waiting[key]
            ready.append(one.assignment)
        return tuple(ready)

    def withdraw_overdue(self, now_ns: int, *, is_enforcing: bool = True) -> dict[AttemptKey, tuple[Assignment, str]]:
        """Gives up the attempts whose GPUs others hold, or have no limit, for too long; returns them with the reason.

        `is_enforcing` says whether the plan sets limits.
        """
        overdue = {}
        for key, one in list(self._waiting.items()):
            uuids = one.assignment.gpu_uuids
            if one.held_since_ns and now_ns - one.held_since_ns >= HELD_MOST_NS:
                holder = next((self._foreign[uuid] for uuid in uuids if uuid in self._foreign), "")
                overdue[key] = one.assignment, f"its GPU is {holder.partition(', which')[0] or 'held by another'}"
                del self._waiting[key]
            elif one.limit_since_ns and now_ns - one.limit_since_ns >= HELD_MOST_NS:
                limit_w = min((self._limits_w[uuid] for uuid in uuids if uuid in self._limits_w), default=0.0)
                lacking = f"did not get its power limit of {limit_w:g} W in time"
                _LOG.warning(
                    "event=power_limit_not_set workload=%s gpus=%s watts=%g remedy='nvidia-smi -q -d POWER; see what else sets it'",
                    key.workload_id,
                    ",".join(one.above_limit),
                    limit_w,
                )
                overdue[key] = one.assignment, f"a GPU of it {lacking}"
                del self._waiting[key]
                if not is_enforcing:
                    continue
                closed = f"without new work for ten minutes, since it {lacking}", now_ns + _WITHOUT_LIMIT_NS
                self._unlimited |= dict.fromkeys(one.above_limit, closed)
        return overdue

    def _is_above_limit(self, uuid: str, use: GpuUse) -> bool:
        """Returns whether a GPU has not the limit yet that an attempt needs before it starts, or does not say its limit."""
        most_w = self._limits_w.get(uuid)
        return most_w is not None and (use.power_limit_w is None or use.power_limit_w > most_w + _LIMIT_SLACK_W)

    def _is_free(self, uuid: str, use: GpuUse, now_ns: int) -> bool:
        """Records who holds a GPU; returns whether nothing is missing of its memory."""
        pids = [pid for pid in use.pids or () if not self._name(pid).startswith(_SHARED_SERVERS)]
        if pids:
            more = f" and {len(pids) - 1} more" if len(pids) > 1 else ""
            found = f"held by {self._describe(pids[0])}{more}, which no plan knows: work waits until it ends"
            if self._foreign.get(uuid) != found:
                _LOG.warning("event=gpu_held gpu=%s reason=%r", uuid, found)
            self._foreign[uuid] = found
            self._look_at_ns[uuid] = now_ns + _FOREIGN_AGAIN_NS
            return False
        self._foreign.pop(uuid, None)
        self._look_at_ns.pop(uuid, None)
        if use.memory_bytes is None or use.pids is None:
            return True
        idle = self._idle_bytes[uuid] = min(use.memory_bytes, self._idle_bytes.get(uuid, use.memory_bytes))
        return use.memory_bytes <= idle + _MEMORY_SLACK_BYTES
