"""The node as a dynamic node of Slurm: out of service while its MIG layout changes, and back with the GRES of the new one.

Owns the order of the steps, their journal, and how a layout is spelled as GRES. Must not know how Slurm is asked, how slurmd is
started (slurm_node_host.py), or how a layout is changed (enforce/mig).

Theory. Slurm fixes the GRES of a node when the node is made: no update, reconfiguration or restart of slurmd changes them. A
dynamic node can be deleted and registered anew with others, and no other node notices. So a layout changes in an outage:

    in service -> DRAINING     no job starts any more; taken back if jobs are still there when the wait is over
               -> OUT          slurmd has ended, its options are gone, the node is deleted: the layout may change
               -> in service   gres.conf and options of the layout that is read back; slurmd registers the node

The journal is written before each step. The options of slurmd exist only in service and not over a boot, so nobody starts a
slurmd with the GRES of another layout. Recovery has no path of its own: a drain is taken back, and an outage is gone through
again from what Slurm shows. Whatever layout the MIG journal ends with, old or new, is what the node comes back with.

Source: Slurm's dynamic node guide, scontrol(1) on deleting nodes, gres.conf(5) on MultipleFiles; tried on 22.05.8.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from enum import StrEnum
from typing import Any, Protocol

from eelgrid_agent.enforce.mig.partitioner import TransitionRefused
from eelgrid_agent.enforce.rules import RefusalRule
from eelgrid_agent.state_files import StateFormat, StateStore, require_text
from eelgrid_protos.messages import ComputeInstance, Gpu, GpuInstance
from eelgrid_protos.values import dataclass

# The reason by which a drain of ours is known.
OUTAGE_REASON = "eelgrid: MIG layout"
SLURM_NODE_FILE = "slurm-node.json"
_DYNAMIC = "DYNAMIC_NORM"
_INVALID = frozenset({"INVALID_REG", "INVAL"})
# States in which a node takes no job, although it is registered.
_NOT_THERE = frozenset({"NOT_RESPONDING", "DOWN", "UNKNOWN", "FUTURE"}) | _INVALID
_JOBS_NAMED_MOST = 8
# Slurm's names of types and features are words without signs of its own syntax.
_TYPE_UNSAFE = re.compile(r"[^A-Za-z0-9._-]+")


class SlurmNodeError(Exception):
    """Slurm, or slurmd on this node, did not do what was asked; the message says what it said, and the remedy."""


class NodeNotRestored(TransitionRefused):
    """The node is out of service, with whatever layout, and could not be brought back yet."""

    def __init__(self, problem: object) -> None:
        super().__init__(
            RefusalRule.ENGINE,
            f"the node is out of service in Slurm until the next try (`eelgrid-agent mig resume`): {problem}",
        )


class OutagePhase(StrEnum):
    """How far this node is out of service."""

    IN_SERVICE = "in-service"
    DRAINING = "draining"
    OUT = "out"


@dataclass(frozen=True, slots=True, kw_only=True)
class OutageRecord:
    """What survives a crash; `kept_reason` is why somebody else had drained the node, who gets it back drained."""

    phase: OutagePhase = OutagePhase.IN_SERVICE
    kept_reason: str = ""


def _decode(document: Mapping[str, Any]) -> OutageRecord:
    return OutageRecord(phase=OutagePhase(document["phase"]), kept_reason=require_text(document["kept_reason"]))


SLURM_NODE_JOURNAL: StateFormat[OutageRecord] = StateFormat(
    title="journal of the Slurm node",
    schema=1,
    encode=lambda record: {"phase": record.phase.value, "kept_reason": record.kept_reason},
    decode=_decode,
    empty=OutageRecord,
    bytes_most=16 * 1024,
    damage_remedy="see `scontrol show node`, and resume the node there if it is drained",
    write_consequence="the node stays as it is before",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmNodeView:
    """The node as slurmctld shows it; `gres` is normalised as `NodeGres.text` is."""

    states: frozenset[str]
    gres: str = ""
    reason: str = ""

    @property
    def is_drained_by_us(self) -> bool:
        """Whether it is drained with our reason, and may be resumed: not while slurmctld does not accept the node."""
        return "DRAIN" in self.states and self.reason.startswith(OUTAGE_REASON) and not self.is_invalid

    @property
    def is_drained_by_others(self) -> bool:
        """Whether somebody else has drained it; Slurm itself does if slurmd offers other GRES than slurmctld knows."""
        return "DRAIN" in self.states and not self.reason.startswith(OUTAGE_REASON) and not self.is_invalid

    @property
    def is_invalid(self) -> bool:
        """Whether slurmctld does not accept what slurmd offers, as after it has recovered an old state of the node."""
        return not _INVALID.isdisjoint(self.states)


@dataclass(frozen=True, slots=True, kw_only=True)
class GresDevice:
    """One device as a GRES: its type, the files that open it, and its UUID."""

    type: str
    files: tuple[str, ...]
    uuid: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeGres:
    """The GRES of a node, in the order of Slurm's indexes."""

    devices: tuple[GresDevice, ...] = ()

    @property
    def text(self) -> str:
        """As `Gres=` has it: gpu:1g.10gb:2,gpu:3g.40gb:1; empty without a device."""
        counts = Counter(one.type for one in self.devices)
        return ",".join(f"gpu:{name}:{count}" for name, count in sorted(counts.items()))

    def format_gres_conf(self, node_name: str) -> str:
        """Returns the lines of gres.conf."""
        lines = ["# Written by eelgrid-agent from the MIG layout of this node; changes are lost.", "AutoDetect=off"]
        for one in self.devices:
            field = "MultipleFiles" if len(one.files) > 1 else "File"
            lines.append(f"NodeName={node_name} Name=gpu Type={one.type} {field}={','.join(one.files)}")
        return "\n".join(lines) + "\n"

    def format_uuids(self) -> str:
        """Returns a line with the UUID of each index, for prologs: an index of a slice is not one of the driver's."""
        return "".join(f"{index} {one.uuid}\n" for index, one in enumerate(self.devices))


ListFiles = Callable[[Gpu, GpuInstance | None, ComputeInstance | None], tuple[str, ...]]


def build_gres(gpus: Iterable[Gpu], list_files: ListFiles, *, whole_type: str = "") -> NodeGres:
    """Returns the GRES of the devices that exist: slices by their profile, whole GPUs by `whole_type` or their model.

    A GPU that is lost, or is cut and has no slice, offers nothing. Devices of one type follow each other, since Slurm sorts its
    indexes by type.
    """
    found = list[GresDevice]()
    for gpu in sorted(gpus, key=lambda one: one.index):
        if gpu.lost:
            continue
        if not gpu.mig_enabled:
            kind = name_gres_type(whole_type or gpu.catalogue_key or gpu.model)
            found.append(GresDevice(type=kind, files=list_files(gpu, None, None), uuid=gpu.uuid))
            continue
        for instance in sorted(gpu.gpu_instances, key=lambda one: one.start):
            is_shared = len(instance.compute_instances) > 1
            for child in sorted(instance.compute_instances, key=lambda one: one.id):
                share = f"{child.size}c." if is_shared and child.size else ""
                kind = name_gres_type(share + instance.profile.removeprefix("MIG "))
                files = list_files(gpu, instance, child)
                found.append(GresDevice(type=kind, files=files, uuid=child.uuid))
    return NodeGres(devices=tuple(sorted(found, key=lambda one: one.type)))


def name_gres_type(text: str) -> str:
    """Returns a name as a type of GRES: 1g.10gb+me is 1g.10gb.me."""
    return _TYPE_UNSAFE.sub(".", text).strip(".") or "gpu"


def normalize_gres(text: str) -> str:
    """Returns what slurmctld shows as GRES in the form of `NodeGres.text`: without sockets, sorted."""
    parts = (re.sub(r"\([^)]*\)", "", part).strip() for part in re.split(r",(?![^(]*\))", text))
    return ",".join(sorted(part for part in parts if part.startswith("gpu:")))


class SlurmNodePort(Protocol):
    """The node in Slurm, and its slurmd. Every call raises SlurmNodeError; each may be repeated."""

    @property
    def has_options(self) -> bool:
        """Whether slurmd has the options to start with."""

    def read_node(self) -> SlurmNodeView | None:
        """Returns the node as slurmctld shows it; None where it has none of this name."""

    def list_jobs(self) -> tuple[str, ...]:
        """Returns the jobs that hold something of the node."""

    def list_reservations(self) -> tuple[str, ...]:
        """Returns the reservations that name the node."""

    def drain(self, reason: str) -> None:
        """Has Slurm start no job there any more."""

    def resume(self) -> None:
        """Takes a drain back."""

    def delete(self) -> None:
        """Deletes the node, which holds no job."""

    def stop_slurmd(self) -> None:
        """Removes the options of slurmd and ends it, if it runs."""

    def start_slurmd(self, gres: NodeGres) -> None:
        """Writes gres.conf, the UUIDs and the options, and starts slurmd."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OutageLimits:
    """Waits in seconds: for jobs to end, which is no time at all by default, and for slurmd to register."""

    drain_wait_s: float = 0.0
    register_s: float = 30.0
    poll_s: float = 0.05


class SlurmNodeService:
    """Takes this node out of service and brings it back. Not thread-safe: layouts are changed by one thread."""

    def __init__(
        self,
        port: SlurmNodePort,
        journal: StateStore[OutageRecord],
        *,
        read_gres: Callable[[], NodeGres],
        sleep: Callable[[float], None],
        monotonic_s: Callable[[], float],
        limits: OutageLimits | None = None,
    ) -> None:
        """`read_gres` spells the layout that exists now, and raises what the device port raises."""
        self._port, self._journal, self._read_gres = port, journal, read_gres
        self._sleep, self._monotonic_s = sleep, monotonic_s
        self._limits = limits or OutageLimits()
        self._depth = 0
        self._out_since_s = 0.0
        # How long the newest outage has lasted, without the wait for jobs.
        self.outage_s = 0.0

    @property
    def is_in_service(self) -> bool:
        """Whether nothing is left to do for the node to be in service. Raises StateFileError."""
        return self._journal.load().phase is OutagePhase.IN_SERVICE and self._port.has_options

    @contextmanager
    def outage(self) -> Iterator[None]:
        """While the block runs the node is out of service; blocks may be nested.

        Raises TransitionRefused, and the node is in service as before, if it cannot be taken out; NodeNotRestored if it cannot
        be brought back, which `recovery` tries again; StateFileError; and what reading the layout raises.
        """
        if self._depth == 0:
            self._take_out()
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            if self._depth == 0:
                self._bring_back()

    @contextmanager
    def recovery(self) -> Iterator[None]:
        """Around the upkeep of layouts: what a crash or a boot left of an outage is ended. Raises as `outage` does."""
        record = self._journal.load()
        try:
            if record.phase is OutagePhase.DRAINING:
                self._take_drain_back(record)
        except SlurmNodeError as error:
            raise TransitionRefused(RefusalRule.ENGINE, f"the node stays drained for now: {error}") from error
        if self._depth or (self.is_in_service and self._is_as_slurm_has_it()):
            yield
            return
        with self.outage():
            yield

    def _is_as_slurm_has_it(self) -> bool:
        """Whether the node is in Slurm with the GRES that it has; takes back a drain that no journal knows.

        A slurmctld that was killed forgets dynamic nodes, or has an old state of them; and a layout may be changed without an outage.
        """
        try:
            view = self._port.read_node()
            if view is not None and view.is_drained_by_us:
                self._port.resume()
            if view is None:
                return False
            is_same = view.gres == self._read_gres().text and not view.is_invalid
            # What runs there is not ended for that.
            return is_same or bool(self._port.list_jobs())
        except SlurmNodeError:
            # Nothing can be done about it while slurmctld is away.
            return True

    # Out

    def _take_out(self) -> None:
        try:
            record = self._drain()
        except SlurmNodeError as error:
            raise TransitionRefused(RefusalRule.ENGINE, f"the node stays in service: {error}") from error
        self._out_since_s = self._monotonic_s()
        self._journal.store(OutageRecord(phase=OutagePhase.OUT, kept_reason=record.kept_reason))
        try:
            self._port.stop_slurmd()
            if self._port.read_node() is not None:
                self._port.delete()
        except SlurmNodeError as error:
            self._bring_back()
            raise TransitionRefused(
                RefusalRule.ENGINE, f"the node cannot be taken out of service, and is back: {error}"
            ) from error

    def _drain(self) -> OutageRecord:
        """Has no job on the node, and none come; returns what was journalled. Raises SlurmNodeError, TransitionRefused."""
        view, record = self._port.read_node(), self._journal.load()
        if view is None:
            return record
        if _DYNAMIC not in view.states:
            raise TransitionRefused(
                RefusalRule.ENGINE,
                "it is no dynamic node of Slurm, so its GRES cannot change; remove it from slurm.conf and start its slurmd with -Z",
            )
        is_begun = record.phase is not OutagePhase.IN_SERVICE
        if not is_begun and (reservations := self._port.list_reservations()):
            # Slurm drops a reservation all of whose nodes are away for a moment.
            names = ", ".join(reservations[:_JOBS_NAMED_MOST])
            raise TransitionRefused(
                RefusalRule.ENGINE,
                f"the node is in a reservation of Slurm ({names}); change it before, or after its end",
            )
        if self._limits.drain_wait_s <= 0.0 and (jobs := self._port.list_jobs()):
            # Nobody waits for them, so there is no use in a drain.
            raise _refuse_busy(jobs)
        if not is_begun:
            kept_reason = view.reason if view.is_drained_by_others else ""
            record = OutageRecord(phase=OutagePhase.DRAINING, kept_reason=kept_reason)
            self._journal.store(record)
        if "DRAIN" not in view.states:
            self._port.drain(OUTAGE_REASON)
        jobs = self._await_jobs()
        if jobs:
            self._take_drain_back(record)
            raise _refuse_busy(jobs)
        return record

    def _await_jobs(self) -> tuple[str, ...]:
        """Waits until no job is left, for a while; returns those that are."""
        until_s = self._monotonic_s() + self._limits.drain_wait_s
        while jobs := self._port.list_jobs():
            if self._monotonic_s() >= until_s:
                break
            self._sleep(self._limits.poll_s)
        return jobs

    def _take_drain_back(self, record: OutageRecord) -> None:
        view = self._port.read_node()
        if view is not None and view.is_drained_by_us:
            self._port.resume()
        # Of an outage that was cut off, the phase stays: its layout is not certain.
        if record.phase is OutagePhase.DRAINING:
            self._journal.store(OutageRecord())

    # Back

    def _bring_back(self) -> None:
        try:
            self._register(self._journal.load())
        except SlurmNodeError as error:
            raise NodeNotRestored(error) from error
        self._journal.store(OutageRecord())
        self.outage_s = self._monotonic_s() - self._out_since_s

    def _register(self, record: OutageRecord) -> None:
        gres = self._read_gres()
        self._port.start_slurmd(gres)
        view = self._await_registration(gres)
        if record.kept_reason and not view.is_drained_by_others:
            self._port.drain(record.kept_reason)
        elif view.is_drained_by_us:
            self._port.resume()

    def _await_registration(self, gres: NodeGres) -> SlurmNodeView:
        """Waits until slurmctld shows the node with this GRES, for a while; one that does not answer is asked again."""
        until_s = self._monotonic_s() + self._limits.register_s
        while True:
            try:
                view = self._port.read_node()
                if view is not None and view.gres == gres.text and view.states.isdisjoint(_NOT_THERE):
                    return view
                shown = (
                    "does not show the node" if view is None else f"shows {'+'.join(sorted(view.states))} {view.gres}"
                )
            except SlurmNodeError as error:
                shown = f"does not answer ({error})"
            if self._monotonic_s() >= until_s:
                raise SlurmNodeError(
                    f"slurmd has not registered {gres.text or 'no GRES'} in {self._limits.register_s:g} s: slurmctld {shown}; "
                    "see slurmd's log"
                )
            self._sleep(self._limits.poll_s)


def _refuse_busy(jobs: tuple[str, ...]) -> TransitionRefused:
    named = ", ".join(jobs[:_JOBS_NAMED_MOST]) + (", ..." if len(jobs) > _JOBS_NAMED_MOST else "")
    detail = f"jobs of Slurm run on the node ({named}); wait for them, or give it time to drain (--drain-wait)"
    return TransitionRefused(RefusalRule.BUSY, detail)
