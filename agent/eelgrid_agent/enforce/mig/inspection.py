"""Read-only inspection of MIG on a node: layouts, origins, requests and plans, as plain values.

Serves `mig show` and `mig plan`. Reads the journal and never writes it: the reconciler works on a copy.
"""

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from eelgrid_agent.devices.port import DeviceError, NoPermission
from eelgrid_agent.enforce.mig.host import MigHost
from eelgrid_agent.enforce.mig.journal import MIG_JOURNAL, InstanceOrigin, MigRecord
from eelgrid_agent.enforce.mig.layout import InvalidLayout, MigLayout, read_part, resolve_layout
from eelgrid_agent.enforce.mig.layout_requests import LayoutRequest, MigSubject, to_gpu_layout
from eelgrid_agent.enforce.mig.mig_service import LayoutReconciler
from eelgrid_agent.enforce.mig.partitioner import (
    DescribedStep,
    MigStep,
    SetMigMode,
    TransitionRefused,
    describe_steps,
    format_layout,
)
from eelgrid_agent.state_files import MemoryState, StateDamaged, StateFile, StateFileError, StateUnreadable
from eelgrid_protos.catalogue.products import MigGeometry
from eelgrid_protos.messages import AccessLevel, Gpu, GpuInstance
from eelgrid_protos.values import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutPlan:
    """The way to one wish: steps, or the rule that forbids it."""

    wish: LayoutRequest
    target: str
    steps: tuple[DescribedStep, ...] = ()
    rule: str = ""
    detail: str = ""
    # What the driver asks of whoever takes the steps; there is none where there are no steps.
    needs: AccessLevel = AccessLevel.UNSPECIFIED

    @property
    def is_refused(self) -> bool:
        """Whether it cannot be had now."""
        return bool(self.detail)


@dataclass(frozen=True, slots=True, kw_only=True)
class MigInspection:
    """One inspection. `problems` holds per device what could not be read; `notes` are about the node."""

    site: MigHost
    executor: LayoutReconciler
    subjects: tuple[MigSubject, ...]
    problems: Mapping[str, str]
    notes: tuple[str, ...]
    driver: str
    access: AccessLevel

    def journaled_requests(self) -> tuple[LayoutRequest, ...]:
        """What was asked for before and is kept, or is under way: the layouts in the journal."""
        wishes = []
        for subject in self.subjects:
            record = self.executor.record(subject.gpu.uuid)
            target = record.target if record.intent is None else record.intent.wanted
            if target is not None and subject.geometry is not None:
                try:
                    layout = to_gpu_layout(target, subject.gpu.uuid, subject.geometry)
                except InvalidLayout:
                    # The driver may have changed its profiles; `show` lists what stands all the same.
                    continue
                wishes.append(LayoutRequest(subject=subject, layout=layout, because="the layout requested last"))
        return tuple(wishes)

    def with_adopted(self, uuids: Iterable[str]) -> "MigInspection":
        """The same look as if foreign instances of these devices were this agent's."""
        for uuid in uuids:
            self.executor.adopt_instances(uuid)
        subjects = tuple(replace(subject, foreign=self._foreign(subject)) for subject in self.subjects)
        return replace(self, subjects=subjects)

    def _foreign(self, subject: MigSubject) -> frozenset[int]:
        return self.executor.record(subject.gpu.uuid).foreign_instances(subject.gpu)

    def plan_request(self, wish: LayoutRequest) -> LayoutPlan:
        """The way there from here."""
        geometry = wish.subject.geometry
        assert geometry is not None  # a wish is of a GPU with MIG
        target = MigLayout(mig_enabled=wish.layout.mig_enabled)
        try:
            target = resolve_layout(wish.layout, geometry)
            steps = self.executor.plan_layout(wish.layout)
        except InvalidLayout as error:
            return _refused_plan(wish, format_layout(target, geometry), "geometry", str(error))
        except TransitionRefused as refused:
            return _refused_plan(wish, format_layout(target, geometry), refused.rule.value, refused.detail)
        except DeviceError as error:
            said = str(error).removeprefix(f"{wish.subject.gpu.uuid}: ")
            return _refused_plan(wish, format_layout(target, geometry), "device", said)
        spelled = describe_steps(steps, wish.subject.gpu, target, geometry)
        return LayoutPlan(wish=wish, target=format_layout(target, geometry), steps=spelled, needs=_needs(steps))

    def find_access_barrier(self, plan: LayoutPlan) -> str:
        """Why this user may not take the steps of a plan, or nothing; a driver that reports no rights is tried."""
        if self.access is AccessLevel.UNSPECIFIED or self.access >= plan.needs:
            return ""
        has = f"this user has {self.access.name.lower()} and the steps take {plan.needs.name.lower()}"
        remedy = "run as root" if plan.needs is AccessLevel.ROOT else "run as root or with the mig/config capability"
        return f"{has}; {remedy}"

    def to_document(self, plans: Sequence[LayoutPlan] = ()) -> dict[str, Any]:
        """All of it, for any output."""
        by_uuid = {plan.wish.subject.gpu.uuid: plan for plan in plans}
        return {
            "node": self.site.name,
            "simulated": self.site.simulated,
            "driver": self.driver,
            "permission": self.access.name.lower(),
            "state": str(self.site.directory),
            "notes": list(self.notes),
            "gpus": [self._gpu(subject, by_uuid.get(subject.gpu.uuid)) for subject in self.subjects],
        }

    def _gpu(self, subject: MigSubject, plan: LayoutPlan | None) -> dict[str, Any]:
        gpu = self.executor.stamp_gpu(subject.gpu)
        fields: dict[str, Any] = {
            "index": gpu.index,
            "uuid": gpu.uuid,
            "product": gpu.product,
            "pci_bus_id": gpu.pci_bus_id,
            "board": None if subject.board is None else str(subject.board),
            "mig": {"capable": gpu.mig_capable, "enabled": gpu.mig_enabled, "pending": gpu.mig_pending},
            "problem": self.problems.get(gpu.uuid, ""),
        }
        if subject.geometry is not None:
            record, users = self.executor.record(gpu.uuid), _users(self.site, gpu.uuid)
            fields["processes"] = users.get((None, None), [])
            fields["instances"] = [
                _instance(instance, subject, record, users) | {"leased": instance.id in record.leased_instances(gpu)}
                for instance in sorted(gpu.gpu_instances, key=lambda instance: instance.start)
            ]
            fields["free"] = _free(gpu, subject.geometry) if gpu.mig_enabled else None
            fields["kept"] = {
                "under_way": None if record.intent is None else record.intent.phase.value,
                "repairs": record.repairs,
                "given_up": record.gave_up,
            }
        if plan is not None:
            fields["wanted"] = {
                "layout": plan.target,
                "because": plan.wish.because,
                "steps": [asdict(step) for step in plan.steps],
                "refused": {"rule": plan.rule, "detail": plan.detail} if plan.is_refused else None,
            }
        return fields


_Users = dict[tuple[int | None, int | None], list[int]]


def _instance(instance: GpuInstance, subject: MigSubject, record: MigRecord, users: _Users) -> dict[str, Any]:
    profile = subject.geometry.profile_by_id(instance.profile_id) if subject.geometry else None
    slices = {ci.id: ci.compute_slices for ci in profile.compute_instances} if profile else {}
    return {
        "id": instance.id,
        "profile": instance.profile,
        "start": instance.start,
        "size": instance.size,
        "origin": record.known.get(read_part(instance).place, InstanceOrigin.FOREIGN).value,
        "in_use": instance.id in subject.busy,
        "compute_instances": [
            {
                "id": child.id,
                "slices": slices.get(child.profile_id),
                "uuid": child.uuid,
                "generation": child.generation,
                "processes": users.get((instance.id, child.id), []),
            }
            for child in instance.compute_instances
        ],
    }


def _needs(steps: Sequence[MigStep]) -> AccessLevel:
    if not steps:
        return AccessLevel.UNSPECIFIED
    return AccessLevel.ROOT if any(isinstance(step, SetMigMode) for step in steps) else AccessLevel.MIG_CONFIG


def _refused_plan(wish: LayoutRequest, target: str, rule: str, detail: str) -> LayoutPlan:
    return LayoutPlan(wish=wish, target=target, rule=rule, detail=detail)


def _users(site: MigHost, uuid: str) -> _Users:
    """Process ids by instance; nobody where the driver does not tell, which `busy` says already."""
    users: _Users = {}
    try:
        processes = site.device.processes(uuid)
    except DeviceError:
        return users
    for process in processes:
        users.setdefault((process.gpu_instance_id, process.compute_instance_id), []).append(process.pid)
    return users


def _free(gpu: Gpu, geometry: MigGeometry) -> dict[str, Any]:
    """Slices that no instance takes, and where each profile could still be made."""
    placed = [
        (profile, instance.start)
        for instance in gpu.gpu_instances
        if (profile := geometry.profile_by_id(instance.profile_id)) is not None
    ]
    taken = {slice_ for i in gpu.gpu_instances for slice_ in range(i.start, i.start + i.size)}
    room = {
        profile.name: [s for s in profile.starts if geometry.conflict([*placed, (profile, s)]) is None]
        for profile in sorted(geometry.profiles.values(), key=lambda profile: (-profile.compute_slices, profile.name))
    }
    return {
        "memory_slices": [number for number in range(geometry.memory_slices) if number not in taken],
        "compute_slices": geometry.compute_slices - sum(profile.compute_slices for profile, _ in placed),
        "room": {name: starts for name, starts in room.items() if starts},
    }


def inspect_host(site: MigHost) -> MigInspection:
    """Looks at every device; raises DriverUnavailable where there is no driver."""
    gpus = site.device.gpus()
    records, notes = read_records(site)
    leases = None
    try:
        leases = site.read_leases()
    except StateFileError as error:
        # A folder that may not be read was named already.
        notes = notes or (str(error),)
    known = {record.uuid: record for record in records}
    copies = [known.get(gpu.uuid, MigRecord(uuid=gpu.uuid)).with_observation(gpu, site.boot_id) for gpu in gpus]
    executor = LayoutReconciler(
        site.device,
        site.control,
        MemoryState(tuple(copies)),
        boot_id=lambda: site.boot_id,
        sleep=time.sleep,
        monotonic_s=time.monotonic,
        wall_ns=time.time_ns,
        leases=leases,
    )
    problems: dict[str, str] = {}
    subjects = tuple(_subject(site, executor, gpu, problems) for gpu in gpus)
    if _is_blind(site, subjects):
        notes = (*notes, "this user may not list the processes of MIG instances, so each counts as in use; run as root")
    return MigInspection(
        site=site,
        executor=executor,
        subjects=subjects,
        problems=problems,
        notes=notes,
        driver=site.device.driver_version(),
        access=site.device.access(),
    )


def _is_blind(site: MigHost, subjects: Iterable[MigSubject]) -> bool:
    for subject in subjects:
        if subject.gpu.mig_enabled and not subject.gpu.lost:
            try:
                site.device.processes(subject.gpu.uuid)
            except NoPermission:
                return True
            except DeviceError:
                continue
    return False


def read_records(site: MigHost) -> tuple[tuple[MigRecord, ...], tuple[str, ...]]:
    """Reads the journal, and notes about it; a journal that cannot be read is left as it is."""
    try:
        return StateFile(site.journal_path, MIG_JOURNAL).peek(), ()
    except StateUnreadable as error:
        return (), (f"{error}; until then the origin of the instances is unknown; run as root",)
    except StateDamaged as error:
        return (), (f"{error}; `mig apply` moves it aside and adopts the layouts that exist",)


def _subject(site: MigHost, executor: LayoutReconciler, gpu: Gpu, problems: dict[str, str]) -> MigSubject:
    geometry, busy, foreign = None, frozenset[int](), frozenset[int]()
    try:
        if gpu.mig_capable:
            geometry = site.control.mig_geometry(gpu.uuid)
            look = executor.observe_device(gpu.uuid)
            busy, foreign = look.busy, look.foreign
    except (DeviceError, TransitionRefused) as error:
        problems[gpu.uuid] = str(error)
    return MigSubject(gpu=gpu, geometry=geometry, board=site.board(gpu), busy=busy, foreign=foreign)
