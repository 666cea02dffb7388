"""MIG layouts kept over time: reconciled, resumed after a crash, repaired on drift.

`LayoutReconciler` starts every decision from an observation, so recovery needs no path of its own. A layout accepted
once stays until another is requested or it is released. A silent device is left alone. `MigService` wraps it for the
node: errors become events, and a node that may not change anything only observes. Methods other than draining events
and stamping may block on driver and disk.
"""

import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Protocol

from eelgrid_agent.devices.port import DeviceError, DevicePort, DeviceTimeout, MigControlPort, NoPermission
from eelgrid_agent.enforce.device_leases import DeviceLeases
from eelgrid_agent.enforce.mig.journal import MigJournal, MigRecord, MigRecordStore, TransitionIntent, TransitionPhase
from eelgrid_agent.enforce.mig.layout import InvalidLayout, MigLayout, read_layout, resolve_layout
from eelgrid_agent.enforce.mig.partitioner import MigStep, TransitionRefused
from eelgrid_agent.enforce.mig.runner import MigObservation, ModePending, TransitionLimits, TransitionRunner
from eelgrid_agent.enforce.rules import RefusalRule
from eelgrid_agent.state_files import StateFileError
from eelgrid_protos.catalogue.products import MigGeometry
from eelgrid_protos.messages import ApplyResult, ApplyStatus, Gpu, GpuLayout, NodeEvent, NodeEventKind

_EVENTS_MOST = 256
_DETAIL_MOST = 1000


class NodeService(Protocol):
    """The engine whose node has to be out of service while a layout changes. Both raise TransitionRefused."""

    def outage(self) -> AbstractContextManager[None]:
        """While the block runs the node is out of service; blocks may be nested."""

    def recovery(self) -> AbstractContextManager[None]:
        """Around the upkeep of layouts: what a crash left of an outage is ended."""


class AlwaysInService:
    """Work on the node does not mind a change of what it does not use."""

    def outage(self) -> AbstractContextManager[None]:
        """Nothing is to be taken out."""
        return nullcontext()

    def recovery(self) -> AbstractContextManager[None]:
        """Nothing is to be brought back."""
        return nullcontext()


class LayoutReconciler:
    """Keeps the layouts of one node's devices. Thread-safe: each device is served by one thread at a time.

    `boot_id` is called in every round: it differs after a boot and after a driver reload, and is never empty.
    `obstacle` says why this machine cannot change the mode of a part, or nothing. `service` is out while a layout changes.
    """

    def __init__(
        self,
        device: DevicePort,
        control: MigControlPort,
        journal: MigJournal,
        *,
        boot_id: Callable[[], str],
        sleep: Callable[[float], None],
        monotonic_s: Callable[[], float],
        wall_ns: Callable[[], int],
        obstacle: Callable[[MigGeometry], str] = lambda _: "",
        limits: TransitionLimits | None = None,
        leases: DeviceLeases | None = None,
        service: NodeService | None = None,
    ) -> None:
        self._device = device
        self._service = service or AlwaysInService()
        self._boot_id = boot_id
        self._monotonic_s = monotonic_s
        self._wall_ns = wall_ns
        self._limits = limits or TransitionLimits()
        self._ledger = MigRecordStore(journal)
        self._runner = TransitionRunner(
            device, control, self._ledger, sleep=sleep, obstacle=obstacle, limits=self._limits, leases=leases
        )
        self._events: deque[NodeEvent] = deque(maxlen=_EVENTS_MOST)
        self._serial: dict[str, threading.Lock] = {}
        self._told: dict[str, str] = {}
        self._unswept: dict[str, tuple[int, ...]] = {}
        self._steady_since: dict[str, float] = {}

    # What the caller does

    def recover(self) -> tuple[ApplyResult, ...]:
        """Adopts existing layouts, finishes or undoes interrupted transitions, and recreates what a reboot removed.

        Returns a result for each device that needed work. Raises StateFileError and DriverUnavailable: nothing can be
        enforced then.
        """
        self._ledger.all()
        return self.check_layouts()

    def check_layouts(self) -> tuple[ApplyResult, ...]:
        """Tends every device once; a result for each on which something was to be done. Raises DriverUnavailable."""
        results = [self._serve_request(gpu.uuid, partial(self._tend, gpu.uuid)) for gpu in self._device.gpus()]
        return tuple(result for result in results if result is not None)

    def apply_layout(self, layout: GpuLayout) -> ApplyResult:
        """Brings a device to a layout and keeps it there; the result reports what was read back."""
        result = self._serve_request(layout.gpu_uuid, lambda: self._apply(layout))
        assert result is not None, "whoever asks is answered"
        return result

    def plan_layout(self, layout: GpuLayout) -> tuple[MigStep, ...]:
        """Returns the steps that `apply` would take now.

        Raises InvalidLayout, TransitionRefused and what the port raises.
        """
        look = self._runner.observe_device(layout.gpu_uuid)
        return self._runner.plan_transition(layout.gpu_uuid, look, self._goal(layout, look.gpu))

    def observe_device(self, uuid: str) -> MigObservation:
        """Reads a device, and what of it must not be touched.

        Raises TransitionRefused(LOST) and what the port raises.
        """
        return self._runner.observe_device(uuid)

    def observe(self) -> None:
        """Adopts existing layouts and counts generations without changing a device.

        Raises StateFileError, DriverUnavailable.
        """
        for gpu in self._device.gpus():
            try:
                with self._alone(gpu.uuid):
                    self._observe_record(gpu.uuid)
            except (TransitionRefused, DeviceTimeout):
                # It answers nothing, or is being changed and so looked at: the next round sees it.
                continue

    def hold_devices(self, uuids: Collection[str]) -> None:
        """Leases these, as they exist now, and nothing else to work; raises as `observe` does.

        The UUIDs are of MIG devices, or of whole GPUs. A MIG device that is recreated under the same UUID is another
        one.
        """
        for gpu in self._device.gpus():
            with self._alone(gpu.uuid):
                try:
                    record, look = self._observe_record(gpu.uuid)
                except (TransitionRefused, DeviceTimeout):
                    # It answers nothing: what was listed last is what the work was given.
                    self._ledger.put(self._ledger.get(gpu.uuid).with_leases(gpu, uuids))
                else:
                    self._ledger.put(record.with_leases(look.gpu, uuids))

    def leased_devices(self) -> frozenset[str]:
        """What work has a right to, by UUID. Raises JournalError."""
        return frozenset(lease.uuid for record in self._ledger.all() for lease in record.leases)

    def adopt_instances(self, uuid: str) -> None:
        """Takes over the foreign instances of a device at an operator's request; raises as `look` does."""
        with self._alone(uuid):
            record, _ = self._observe_record(uuid)
            self._ledger.put(record.with_adoption())

    def release_device(self, uuid: str) -> None:
        """Stops enforcing a layout on a device and leaves the existing one. Raises StateFileError."""
        with self._alone(uuid):
            record = self._ledger.get(uuid)
            self._ledger.put(replace(record, target=None, intent=None, repairs=0, gave_up=False))

    def on_device_reset(self, uuid: str) -> None:
        """Records that the driver or the device restarted: earlier instances are gone even where equal ones exist."""
        with self._alone(uuid):
            record = self._ledger.get(uuid)
            # After a boot or a driver load it is looked at as new anyway.
            if record.boot_id == self._boot_id():
                self._ledger.put(replace(record, boot_id=""))

    def stamp_gpu(self, gpu: Gpu) -> Gpu:
        """A device that was listed, with the generation of each compute instance. Raises JournalError.

        What no look has seen since it began, or since the boot or the reset, has generation 0: nothing to lease yet.
        """
        record = self._ledger.get(gpu.uuid)
        return record.stamp_gpu(gpu) if record.boot_id == self._boot_id() else gpu

    def record(self, uuid: str) -> MigRecord:
        """Returns the record of a device. Raises StateFileError."""
        return self._ledger.get(uuid)

    def drain_events(self) -> tuple[NodeEvent, ...]:
        """Returns the events for the controller since the call before; the oldest are dropped beyond 256."""
        events = tuple(self._events)
        self._events.clear()
        return events

    # One device at a time

    @contextmanager
    def _alone(self, uuid: str) -> Iterator[None]:
        lock = self._serial.setdefault(uuid, threading.Lock())
        if not lock.acquire(timeout=self._limits.serial_wait_s):
            detail = f"another change of this GPU has been in progress for over {self._limits.serial_wait_s:g} s; retry"
            raise TransitionRefused(RefusalRule.SERIAL, detail)
        try:
            yield
        finally:
            lock.release()

    def _serve_request(self, uuid: str, serve: Callable[[], ApplyResult | None]) -> ApplyResult | None:
        """An answer in every case."""
        try:
            with self._alone(uuid):
                return serve()
        except InvalidLayout as bad:
            return _result(uuid, ApplyStatus.REFUSED, str(bad), RefusalRule.GEOMETRY)
        except TransitionRefused as refused:
            return _result(uuid, ApplyStatus.REFUSED, refused.detail, refused.rule)
        except NoPermission as error:
            return _result(uuid, ApplyStatus.REFUSED, str(error), RefusalRule.NO_PERMISSION)
        except StateFileError as error:
            return _result(uuid, ApplyStatus.FAILED, str(error), RefusalRule.JOURNAL)
        except DeviceError as error:
            return _result(uuid, ApplyStatus.FAILED, str(error), RefusalRule.DEVICE)

    def _observe_record(self, uuid: str) -> tuple[MigRecord, MigObservation]:
        gpu = self._runner.observe_device(uuid).gpu
        record = self._ledger.put(self._ledger.get(uuid).with_observation(gpu, self._boot_id()))
        return record, self._runner.observe_device(uuid)

    def _goal(self, layout: GpuLayout, gpu: Gpu) -> MigLayout:
        if not gpu.mig_capable and not layout.mig_enabled:
            return MigLayout(mig_enabled=False)
        return resolve_layout(layout, self._runner.get_geometry(gpu.uuid))

    def _apply(self, layout: GpuLayout) -> ApplyResult:
        uuid = layout.gpu_uuid
        record, look = self._observe_record(uuid)
        goal = self._goal(layout, look.gpu)
        record = replace(record, repairs=0, gave_up=False)
        if record.has_layout(look.gpu, goal):
            self._ledger.put(record.end_transition(look.gpu, goal))
            return _result(uuid, ApplyStatus.APPLIED, f"exists already: {_spell(look.gpu)}")
        # Refused before anything is written or changed.
        self._runner.plan_transition(uuid, look, goal)
        return self._begin_transition(record, look, goal)

    def _begin_transition(self, record: MigRecord, look: MigObservation, goal: MigLayout) -> ApplyResult:
        with self._service.outage():
            self._told.pop(record.uuid, None)
            record = self._ledger.put(record.begin_transition(record.own_layout(look.gpu), goal))
            return self._forward(record)

    def _forward(self, record: MigRecord) -> ApplyResult:
        uuid, intent = record.uuid, _intent(record)
        try:
            gpu = self._runner.run_transition(uuid, intent.wanted)
        except ModePending:
            self._ledger.put(self._ledger.get(uuid).with_phase(TransitionPhase.PENDING))
            mode = "on" if intent.wanted.mig_enabled else "off"
            detail = f"MIG mode {mode} waits for a reset of the GPU or a reboot; the layout follows by itself then"
            return _result(uuid, ApplyStatus.REFUSED, detail, RefusalRule.PENDING)
        except TransitionRefused as refused:
            if refused.rule is RefusalRule.LOST:
                raise
            return self._roll_back(self._ledger.get(uuid).with_phase(TransitionPhase.UNDO), refused)
        self._ledger.put(self._ledger.get(uuid).end_transition(gpu, intent.wanted))
        self._announce(NodeEventKind.LAYOUT_CHANGED, uuid, f"read back: {_spell(gpu)}")
        return _result(uuid, ApplyStatus.APPLIED, f"read back: {_spell(gpu)}")

    def _roll_back(self, record: MigRecord, cause: TransitionRefused) -> ApplyResult:
        uuid = record.uuid
        self._ledger.put(record)
        try:
            gpu = self._runner.run_transition(uuid, self._back(record))
        except (TransitionRefused, ModePending) as error:
            if isinstance(error, TransitionRefused) and error.rule is RefusalRule.LOST:
                raise
            self._ledger.put(self._ledger.get(uuid).with_phase(TransitionPhase.STUCK))
            self._sweep(self._ledger.get(uuid), self._runner.observe_device(uuid))
            stands = _spell(self._runner.observe_device(uuid).gpu)
            detail = (
                f"{cause.detail}; it could not be undone ({error}); "
                f"the layout is {stands}, and the transition is retried"
            )
            return _result(uuid, ApplyStatus.FAILED, detail, cause.rule)
        record = self._ledger.get(uuid)
        self._ledger.put(record.end_transition(gpu, record.target))
        return _result(uuid, ApplyStatus.REFUSED, f"{cause.detail}; undone: {_spell(gpu)}", cause.rule)

    def _back(self, record: MigRecord) -> MigLayout:
        """What an undoing goes back to; a mode that only a reset would bring back is left as it is."""
        before, gpu = _intent(record).before, self._runner.observe_device(record.uuid).gpu
        if before.mig_enabled == gpu.mig_enabled or not self._runner.get_geometry(record.uuid).reset_to_change_mode:
            return before
        return MigLayout(mig_enabled=gpu.mig_enabled)

    # What is done without being asked

    def _tend(self, uuid: str) -> ApplyResult | None:
        anew = self._ledger.get(uuid).boot_id != self._boot_id()
        try:
            record, look = self._observe_record(uuid)
        except (TransitionRefused, DeviceTimeout) as silent:
            if isinstance(silent, DeviceTimeout) or silent.rule is RefusalRule.LOST:
                return None
            raise
        if record.intent is not None:
            return self._resume(record, look)
        if record.target is None or record.has_layout(look.gpu, record.target):
            self._steady(record)
            return self._sweep(record, look)
        if record.gave_up:
            return None
        return self._repair(record, look, record.target, anew=anew)

    def _resume(self, record: MigRecord, look: MigObservation) -> ApplyResult | None:
        """Goes on with a transition that a crash, a reset or a silent device cut off."""
        intent = _intent(record)
        if intent.phase is TransitionPhase.PENDING and look.gpu.mig_pending:
            return None
        with self._service.outage():
            return self._continue(record, look, intent)

    def _continue(self, record: MigRecord, look: MigObservation, intent: TransitionIntent) -> ApplyResult:
        if intent.phase is TransitionPhase.UNDO:
            return self._roll_back(
                record, TransitionRefused(RefusalRule.DEVICE, "the change was cut off while it was undone")
            )
        if intent.tries >= self._limits.tries_most:
            return self._give_up(
                record.end_transition(look.gpu, record.target), f"a layout was tried {intent.tries} times"
            )
        return self._forward(self._ledger.put(record.with_phase(TransitionPhase.FORWARD)))

    def _repair(self, record: MigRecord, look: MigObservation, target: MigLayout, *, anew: bool) -> ApplyResult | None:
        uuid, drift = record.uuid, f"found {_spell(look.gpu)} instead of the requested layout"
        gives_up = not anew and record.repairs >= self._limits.repairs_most
        with ExitStack() as stack:
            try:
                self._runner.plan_transition(uuid, look, target)
                if not gives_up:
                    stack.enter_context(self._service.outage())
            except TransitionRefused as refused:
                return self._report_drift_once(uuid, f"{drift}; not repaired: {refused.detail}", refused.rule)
            if gives_up:
                return self._give_up(record, f"{drift}, after {record.repairs} repairs")
            if not anew:
                self._announce(NodeEventKind.SETTING_DRIFT, uuid, drift)
                self._steady_since.pop(uuid, None)
                record = replace(record, repairs=record.repairs + 1)
            result = self._begin_transition(record, look, target)
        if result.status is ApplyStatus.APPLIED:
            why = "after a reboot or reset" if anew else "after another program changed it"
            self._announce(NodeEventKind.SETTING_RESTORED, uuid, f"MIG layout restored {why}: {result.detail}")
        return result

    def _steady(self, record: MigRecord) -> None:
        """Repairs are forgiven once the layout stood long enough."""
        since = self._steady_since.setdefault(record.uuid, self._monotonic_s())
        self._told.pop(record.uuid, None)
        if record.repairs and self._monotonic_s() - since >= self._limits.steady_s:
            self._ledger.put(replace(record, repairs=0))

    def _sweep(self, record: MigRecord, look: MigObservation) -> ApplyResult | None:
        """Removes what this agent made and never finished; told once where it cannot be."""
        orphans = record.find_orphans(look.gpu)
        if not orphans or self._unswept.get(record.uuid) == orphans:
            return None
        try:
            self._runner.remove_orphans(record.uuid)
        except TransitionRefused as refused:
            self._unswept[record.uuid] = orphans
            return _result(record.uuid, ApplyStatus.REFUSED, f"orphans stay: {refused.detail}", refused.rule)
        return None

    def _give_up(self, record: MigRecord, why: str) -> ApplyResult:
        record = self._ledger.put(replace(record, gave_up=True))
        self._sweep(record, self._runner.observe_device(record.uuid))
        detail = f"{why}: given up until a layout is requested again; find the program that changes this GPU"
        self._announce(NodeEventKind.ENFORCEMENT_SUSPENDED, record.uuid, detail)
        return _result(record.uuid, ApplyStatus.FAILED, detail, RefusalRule.DRIFT)

    def _report_drift_once(self, uuid: str, detail: str, rule: RefusalRule) -> ApplyResult | None:
        if self._told.get(uuid) == detail:
            return None
        self._told[uuid] = detail
        self._announce(NodeEventKind.SETTING_DRIFT, uuid, detail)
        return _result(uuid, ApplyStatus.REFUSED, detail, rule)

    def _announce(self, kind: NodeEventKind, uuid: str, detail: str) -> None:
        event = NodeEvent(kind=kind, time_ns=max(0, self._wall_ns()), gpu_uuid=uuid, detail=detail[:_DETAIL_MOST])
        self._events.append(event)


def _intent(record: MigRecord) -> TransitionIntent:
    assert record.intent is not None, "a transition is under way"
    return record.intent


def _result(uuid: str, status: ApplyStatus, detail: str, rule: RefusalRule | None = None) -> ApplyResult:
    return ApplyResult(
        subject=uuid, status=status, detail=detail[:_DETAIL_MOST], rule="" if rule is None else rule.value
    )


def _spell(gpu: Gpu) -> str:
    """A layout for a person."""
    if not read_layout(gpu).mig_enabled:
        return "MIG off"
    instances = sorted(gpu.gpu_instances, key=lambda instance: instance.start)
    return ", ".join(f"{instance.profile}@{instance.start}" for instance in instances) or "MIG on, no instance"


class MigService:
    """The layouts of one node. `boot_id` is called in every round and identifies the boot and driver load.

    `open_nodes` creates what containers need to open the instances of a device, and returns what it could not create.
    `service` is out while a layout changes.
    """

    def __init__(
        self,
        device: DevicePort,
        control: MigControlPort,
        journal: MigJournal,
        *,
        boot_id: Callable[[], str],
        sleep: Callable[[float], None],
        monotonic_s: Callable[[], float],
        wall_ns: Callable[[], int],
        obstacle: Callable[[MigGeometry], str] = lambda _: "",
        open_nodes: Callable[[Gpu], str] | None = None,
        limits: TransitionLimits | None = None,
        leases: DeviceLeases | None = None,
        service: NodeService | None = None,
    ) -> None:
        # Whether an engine's node goes out of service for a change.
        self.has_service = service is not None
        self._service = service or AlwaysInService()
        self.executor = LayoutReconciler(
            device,
            control,
            journal,
            boot_id=boot_id,
            sleep=sleep,
            monotonic_s=monotonic_s,
            wall_ns=wall_ns,
            obstacle=obstacle,
            limits=limits,
            leases=leases,
            service=self._service,
        )
        self._device = device
        self._open_nodes = open_nodes
        self._wall_ns = wall_ns
        self._told = ""
        self._own_events: list[NodeEvent] = []
        self._resets: set[str] = set()
        # Whether what stands was looked at since the start.
        self.is_recovered = False
        # None until either was told: what the journal holds is the assignments' then, but for what claims say is theirs.
        self._assigned: frozenset[str] | None = None
        self._claimed: frozenset[str] = frozenset()

    def recover(self) -> tuple[ApplyResult, ...]:
        """Runs once at start.

        Adopts existing layouts, finishes or undoes interrupted transitions, recreates what a boot removed.
        """
        results = self._run_upkeep(self.executor.recover)
        self.is_recovered = True
        return results

    def check_layouts(self) -> tuple[ApplyResult, ...]:
        """Runs at intervals: continues interrupted transitions and repairs drift, a bounded number of times.

        Returns results.
        """
        return self._run_upkeep(self.executor.check_layouts)

    def observe(self) -> None:
        """In place of `recover` and `check` where nothing may be changed."""
        self._done(self.executor.observe)
        self.is_recovered = True

    def apply_layout(self, layout: GpuLayout) -> ApplyResult:
        """Brings one device to a layout and keeps it there from now on."""
        result = self.executor.apply_layout(layout)
        self._open((result,))
        return result

    def hold_devices(self, uuids: Collection[str]) -> bool:
        """The MIG devices and whole GPUs of all assignments in force, each time that they are applied.

        They are not changed from now on, over a restart too, until other ones are given. False where that could not
        be written down: nothing protects them then but their processes, and the assignments are to be applied again.
        """
        self._assigned = frozenset(uuids)
        return self._done(lambda: self.executor.hold_devices(frozenset(uuids) | self._claimed))

    def lease_devices(self, uuids: Collection[str]) -> bool:
        """What resource claims hold, beside the assignments: as `hold`, and neither of the two ends the other."""
        return self._done(partial(self._lease, frozenset(uuids)))

    def _lease(self, uuids: frozenset[str]) -> None:
        if self._assigned is None:
            self._assigned = self.executor.leased_devices() - uuids
        self._claimed = uuids
        self.executor.hold_devices(self._assigned | uuids)

    def release_device(self, uuid: str) -> bool:
        """Stops enforcing a layout on a device and leaves the existing one; False where that could not be recorded."""
        return self._done(lambda: self.executor.release_device(uuid))

    def on_device_reset(self, uuid: str) -> bool:
        """Records that earlier instances are gone: a lost device returned, or its counter fell.

        Not for a device that merely hung: instances of other programs would be taken for what a boot left. Returns
        False where that could not be recorded, and `check` tries again.
        """
        self._resets.add(uuid)
        return self._pass_on_resets()

    def stamp_gpus(self, gpus: Iterable[Gpu]) -> tuple[Gpu, ...]:
        """Devices as they were listed, with generations for the inventory; without where the journal cannot be read."""
        listed = tuple(gpus)
        try:
            return tuple(map(self.executor.stamp_gpu, listed))
        except StateFileError:
            return listed

    def drain_events(self) -> tuple[NodeEvent, ...]:
        """Returns the events for the controller since the call before."""
        own, self._own_events = self._own_events, []
        return (*own, *self.executor.drain_events())

    def _run_upkeep(self, tend: Callable[[], tuple[ApplyResult, ...]]) -> tuple[ApplyResult, ...]:
        results: list[ApplyResult] = []

        def tend_in_service() -> None:
            with self._service.recovery():
                results.extend(tend())

        # Repairs of a device whose reset is not known would be counted as somebody's doing.
        if not self._pass_on_resets():
            return ()
        if self._done(tend_in_service):
            problem = next((result.detail for result in results if result.rule == RefusalRule.JOURNAL), "")
            if problem:
                self._report_suspension(problem)
            else:
                self._told = ""
        self._open(results)
        return tuple(results)

    def _open(self, results: Iterable[ApplyResult]) -> None:
        """A device node for each instance of what was changed; one that cannot be made is told and undoes nothing."""
        changed = {result.subject for result in results if result.status is ApplyStatus.APPLIED}
        open_nodes = self._open_nodes
        if open_nodes is None or not changed:
            return
        try:
            gpus = [gpu for gpu in self._device.gpus() if gpu.uuid in changed]
        except DeviceError:
            # The driver went since; whatever comes back is looked at anew.
            return
        for gpu in gpus:
            problem = open_nodes(gpu)
            if problem:
                self._announce(NodeEventKind.HEALTH, problem, gpu.uuid)

    def _pass_on_resets(self) -> bool:
        for uuid in sorted(self._resets):
            if not self._done(partial(self.executor.on_device_reset, uuid)):
                return False
            self._resets.discard(uuid)
        return True

    def _done(self, act: Callable[[], None]) -> bool:
        """Whether it was done; a journal that fails is told once, a driver that is away shows in the quick looks."""
        try:
            act()
        except StateFileError as error:
            self._report_suspension(str(error))
            return False
        except TransitionRefused as refused:
            if refused.rule is RefusalRule.ENGINE:
                self._report_suspension(refused.detail)
            return False
        except DeviceError:
            return False
        return True

    def _report_suspension(self, detail: str) -> None:
        if detail == self._told:
            return
        self._told = detail
        self._announce(NodeEventKind.ENFORCEMENT_SUSPENDED, detail)

    def _announce(self, kind: NodeEventKind, detail: str, uuid: str = "") -> None:
        event = NodeEvent(
            kind=kind, time_ns=max(0, self._wall_ns()), gpu_uuid=uuid, detail=f"MIG: {detail}"[:_DETAIL_MOST]
        )
        self._own_events.append(event)
