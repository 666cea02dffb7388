"""Core of one node: turns device readings and controller messages into messages to the controller.

Combines the sampler, spool, event queue, guard, inventory, sample cadence and send schedule of the node. Does no I/O:
the clock is a port, the loop hands in readings, and the uplink fetches the next message. Single-threaded. Messages are
ordered: an inventory before the batches that refer to it; events and plan results immediately; batches at the send
interval.
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import NamedTuple, Protocol

from eelgrid_agent.devices.host import Host
from eelgrid_agent.devices.port import DeviceEvent
from eelgrid_agent.devices.sampler import (
    ExtendedColumns,
    ExtendedReadings,
    NodeSample,
    Sampler,
    SampleTick,
    build_batch,
    build_extended_columns,
)
from eelgrid_agent.energy.node_energy import NO_SOURCE_READINGS, NodeEnergy, SourceReadings
from eelgrid_agent.energy.windows import EnergyOutbox, OutboxState
from eelgrid_agent.enforce.guard.plan import Guard
from eelgrid_agent.engine.contact import LeaderContact
from eelgrid_agent.engine.port import AttemptKey, ProcessEngine, attempt_key, plan_actions
from eelgrid_agent.engine.readiness import GpuReadiness, GpuUse, needs_free_gpus
from eelgrid_agent.engine.slurm_jobs import HandedJob
from eelgrid_agent.node.attempt_reporter import AttemptReporter
from eelgrid_agent.node.inventory import (
    DeviceSurvey,
    GpuReadings,
    HealthMonitor,
    NodeIdentity,
    build_inventory,
    map_job_holds,
    mark_gpu_health,
)
from eelgrid_agent.node.leader_terms import LeaderTerms
from eelgrid_agent.node.spool import Acknowledged, EventQueue, LatestValue, Spool
from eelgrid_agent.node.workload_engine import WorkloadEngine
from eelgrid_protos.messages import (
    Acknowledgement,
    ApplyResult,
    ApplyStatus,
    Assignment,
    AttemptReport,
    Cadence,
    ConnectRequest,
    ConnectResponse,
    DeviceLease,
    EnergyAcknowledgement,
    Gpu,
    HeldAssignments,
    HeldDevices,
    Hello,
    InputChunk,
    InputResult,
    Inventory,
    LeaderTerm,
    LogChunk,
    LogRequest,
    NodeEvent,
    NodeEventKind,
    NodePlan,
    PlanApplied,
    Resume,
    SampleBatch,
    Welcome,
)


class AgentClock(Protocol):
    """Both clocks of the machine."""

    def monotonic_ns(self) -> int:
        """Never falls."""

    def wall_ns(self) -> int:
        """Since 1970; may step."""


# No acknowledgement for this long is a dead stream. A controller that is merely slow must not be left sooner:
# coming back costs it more than the batches that it owes, and the window holds back the rest.
STALL_INTERVALS = 6.0
STALL_S_LEAST = 30.0
# Where there are other controllers: a stopped process keeps its connections, and another one may lead by now.
CHOICE_STALL_INTERVALS = 2.0
CHOICE_STALL_S_LEAST = 8.0


class SendSchedule:
    """The send schedule of one node.

    `due` and `waits_since_ns` also change with messages that are sent and answered.
    """

    def __init__(self, *, phase: float) -> None:
        self._phase = phase
        self._next_ns = 0
        self.due = False
        self.waits_since_ns = 0

    def update_interval(self, before: Cadence, cadence: Cadence, now_ns: int) -> None:
        """Starts another interval at this node's phase of it."""
        if cadence.send_interval_s != before.send_interval_s or self._next_ns == 0:
            self._next_ns = now_ns + int(self._phase * cadence.send_interval_s * 1e9)

    def on_tick(self, cadence: Cadence, now_ns: int) -> None:
        """A tick was taken; one that is a little early still counts as on time."""
        slack_ns = int(cadence.sample_interval_s * 0.25e9)
        if now_ns + slack_ns < self._next_ns:
            return
        self.due = True
        interval_ns = int(cadence.send_interval_s * 1e9)
        behind = (now_ns + slack_ns - self._next_ns) // interval_ns
        self._next_ns += (behind + 1) * interval_ns

    def is_stalled(self, cadence: Cadence, now_ns: int, *, is_choice: bool) -> bool:
        """Whether unacknowledged batches have waited too long."""
        intervals, least_s = STALL_INTERVALS, STALL_S_LEAST
        if is_choice:
            intervals, least_s = CHOICE_STALL_INTERVALS, CHOICE_STALL_S_LEAST
        bound_s = max(least_s, intervals * cadence.send_interval_s)
        return now_ns - self.waits_since_ns > bound_s * 1e9


# How often a slow look goes to the controller: it holds what seldom changes, costs it 3 ms a node, and is for this
# machine first. What befalls a device goes at once, as an event.
SLOW_SENT_S = 300.0


class ForeignSequence(Exception):
    """The controller claims batches that this incarnation never sent; another incarnation has to start."""


_TURNS = frozenset((NodeEventKind.GPU_LOST, NodeEventKind.GPU_RETURNED))
_FORGETS = frozenset((NodeEventKind.GPU_RETURNED, NodeEventKind.COUNTER_RESET))


class _PendingLogRequest(NamedTuple):
    """A request for output that waits for some, and until when."""

    request: LogRequest
    due_ns: int


class _ChargedAssignments(NamedTuple):
    """A plan's assignments, those of them that have not begun, and the others, to which energy is charged."""

    planned: tuple[Assignment, ...] = ()
    waiting: frozenset[AttemptKey] = frozenset()
    begun: tuple[Assignment, ...] = ()


class AgentNode:
    """See the module."""

    _slurm_jobs: tuple[HandedJob, ...] = ()
    # Of the controller that this node is connected to; `terms` has the highest that any node of the agent has met.
    _term: LeaderTerm | None = None
    # Whether there are other controllers to go to.
    has_choice = False

    def __init__(
        self,
        identity: NodeIdentity,
        *,
        host: Host,
        engine: WorkloadEngine,
        clock: AgentClock,
        draw_incarnation: Callable[[], int],
        ticks_most: int,
        first: DeviceSurvey,
        send_phase: float = 0.0,
        guard: Guard | None = None,
        energy: NodeEnergy | None = None,
        outbox: EnergyOutbox | None = None,
        processes: ProcessEngine | None = None,
        readiness: GpuReadiness | None = None,
        terms: LeaderTerms | None = None,
    ) -> None:
        self._contact, self.terms = LeaderContact() if processes is None else processes.contact, terms or LeaderTerms()
        identity = replace(identity, fence_after_s=self._contact.fence_after_s)
        self._identity, self._host, self._engine = identity, host, engine
        # None where the agent runs no processes.
        self._processes = processes
        # None where nobody asks the driver before a start.
        self._readiness = readiness
        self._possible: tuple[Assignment, ...] = ()
        self._reporter = AttemptReporter(dict if processes is None else processes.list_attempts)
        self._forgotten: tuple[AttemptKey, ...] = ()
        self._log_requests: list[_PendingLogRequest] = []
        self._chunks, self._streams, self._is_answer_due = deque[LogChunk | InputResult](), 0, False
        self._charged, self._clock = _ChargedAssignments(), clock
        self._draw_incarnation, self._incarnation = draw_incarnation, draw_incarnation()
        self._slow_sent_ns: int | None = None
        self._slow_due = False
        self._sampler = Sampler(sample_interval_s=Cadence().sample_interval_s)
        self._events = EventQueue()
        self._answers: deque[PlanApplied] = deque(maxlen=8)
        # Of the newest plan, if it is in force as it came and that is still to be told.
        self._plain_answer: PlanApplied | None = None
        self._inventory_due, self._reported_sequence = False, 0
        self._held = LatestValue[HeldDevices]()
        self._times = SendSchedule(phase=send_phase)
        # Whether the last controller takes a Resume, and the fingerprint of the inventory that it was made of.
        self._resumes = False
        self._digest: tuple[Inventory | None, str] = (None, "")
        self.cadence = Cadence()
        self.spool = Spool(window=self.cadence.window, ticks_most=ticks_most)
        self.guard = guard or Guard(identity.node_name)
        self.health = HealthMonitor()
        # None where nobody asks whose energy it was, as in a simulated fleet.
        self.energy = energy
        # By the plan where nobody looks whose processes those are.
        self.outbox = outbox or EnergyOutbox(OutboxState(incarnation=draw_incarnation()), by_plan=energy is None)
        self.slow = ExtendedReadings(monotonic_ns=0, wall_ns=0)
        self.quick: GpuReadings = ()
        self.problem = first.problem
        self.inventory = build_inventory(identity, host, first, generation=1, lost=frozenset())
        self.gpu_uuids = tuple(gpu.uuid for gpu in self.inventory.gpus)
        self.guard.update_inventory(self.inventory.gpus, self.inventory.access)
        self.outbox.update_inventory(self.inventory.gpus)
        # Somebody changed what a survey finds.
        self.survey_due = False
        self.connected, self.ticks_total, self.batches_total = False, 0, 0
        self.last_tick: SampleTick | None = None
        self.last_tick_ns = 0
        self._clear_listeners()
        if processes is not None:
            processes.on_change = self._on_attempts_changed
            processes.on_output = self.answer_log_requests

    def _clear_listeners(self) -> None:
        """Nobody listens: the uplink, the loop and whoever carries out the guard's orders put themselves here."""
        self.wake: Callable[[], None] = _nothing
        # What engines beside the controller hold, by GPU.
        self.list_leases: Callable[[], Mapping[str, tuple[DeviceLease, ...]]] = dict
        self.retime: Callable[[], None] = _nothing
        # Attempts wait for a look at their GPUs.
        self.starting: Callable[[], None] = _nothing
        self.ordered: Callable[[], None] = _nothing
        self.returned: Callable[[str], object] = _nothing
        # A device was lost, or came back: once each.
        self.turned: Callable[[NodeEvent], object] = _ignore_event
        self.stamp: Callable[[Iterable[Gpu]], tuple[Gpu, ...]] = tuple

    @property
    def name(self) -> str:
        """The node's name."""
        return self._identity.node_name

    @property
    def uncounted_s(self) -> float:
        """Device-seconds whose energy is in no total."""
        return self._sampler.uncounted_s

    def update_inventory(self, found: DeviceSurvey) -> bool:
        """Adopts a new survey; True when the inventory changed, which is then sent at once."""
        self.survey_due = False
        self.problem = found.problem
        found = replace(found, gpus=self.stamp(found.gpus))
        candidate = self._inventory(found, generation=self.inventory.generation)
        if candidate == self.inventory:
            # A device may have failed and come back between two looks, unseen.
            self._apply_again()
            return False
        self.inventory = self._inventory(found, generation=self.inventory.generation + 1)
        self.gpu_uuids = tuple(gpu.uuid for gpu in self.inventory.gpus)
        self.guard.update_inventory(self.inventory.gpus, self.inventory.access)
        self.outbox.update_inventory(self.inventory.gpus)
        self._hold_for_jobs()
        self._inventory_due = True
        self._apply_again()
        self.wake()
        return True

    def update_model_data(self, names: tuple[str, ...]) -> None:
        """Tells the controller which model data are on this node's disks, if they are others than before."""
        if names != self._identity.model_data:
            self._identity = replace(self._identity, model_data=names)
            generation = self.inventory.generation + 1
            self.inventory = replace(self.inventory, model_data=names, generation=generation)
            self._inventory_due = True
            self.wake()

    def _report_health(self) -> None:
        """What is lost is part of the inventory, so that a controller that missed the event still knows."""
        gpus = mark_gpu_health(self.inventory.gpus, self._sampler.lost_gpus, self._cordons(), self.list_leases())
        if gpus != self.inventory.gpus:
            self.inventory = replace(self.inventory, gpus=gpus)
            self._inventory_due = True

    def on_leases_changed(self) -> None:
        """Reports what engines beside the controller hold, at once: it places nothing there."""
        self._report_health()
        if self._inventory_due:
            self.wake()

    def _apply_again(self) -> None:
        """A device that came back, or started anew, has forgotten its work; the plan has not."""
        verdict = self.guard.revalidate_plan(gpu_uuids=frozenset(self.gpu_uuids))
        if verdict is None:
            return
        before = self.guard.applied
        answer = self.guard.complete_plan(verdict, self._apply_assignments(verdict.assignments))
        if answer != before:
            self._queue_answer(answer)
        self.ordered()

    def queue_events(self, events: Iterable[NodeEvent]) -> None:
        """Queues events from other parts of the agent."""
        for event in events:
            self._events.add(event)
            self.wake()

    def report_held_devices(self, held: HeldDevices) -> None:
        """Replaces what is reported as held by pods."""
        self._held.set_value(held)
        self.wake()

    def update_slurm_jobs(self, jobs: tuple[HandedJob, ...]) -> None:
        """Replaces the jobs that Slurm runs on this node; limits and clocks follow in the next cycle of enforcement."""
        self._slurm_jobs = jobs
        self._hold_for_jobs()
        self.flush_guard()
        self.ordered()

    def _hold_for_jobs(self) -> None:
        self.guard.update_job_holds(map_job_holds(self._slurm_jobs, self.inventory.gpus), wall_ns=self._clock.wall_ns())

    def flush_guard(self) -> None:
        """Queues the announcements and answers of the guard for the controller."""
        self.queue_events(self.guard.drain_events())
        answer = self.guard.pop_answer()
        if answer is not None:
            self._queue_answer(answer)

    def _queue_answer(self, answer: PlanApplied) -> None:
        """Queues what became of the plan in force; what is newer than it replaces an answer that is still kept back."""
        self._plain_answer = None
        self._answers.append(answer)
        self.wake()

    def record_tick(self, gpus: GpuReadings, *, monotonic_ns: int) -> bool:
        """Records a look; True when a device was lost or came back, so that a survey is due."""
        wall_ns = self._clock.wall_ns()
        observation = self._sampler.observe(
            NodeSample(
                wall_ns=wall_ns,
                monotonic_ns=monotonic_ns,
                generation=self.inventory.generation,
                gpus=gpus,
                host=self._host.read(),
            ),
            riding=self._riding(gpus),
        )
        if self.energy is not None:
            self.energy.on_tick(self.inventory.gpus, gpus, observation, monotonic_ns=monotonic_ns)
        self.outbox.update_clock(wall_ns=wall_ns, monotonic_ns=monotonic_ns)
        self.outbox.on_tick(observation.tick, gpus, self._charged_assignments())
        self.quick = gpus
        self.last_tick, self.last_tick_ns = observation.tick, monotonic_ns
        self.ticks_total += 1
        self.spool.add(observation.tick)
        for event in observation.events:
            self._events.add(event)
            self._on_device_event(event, monotonic_ns, wall_ns)
        expiry = self.guard.check_lease(now_ns=monotonic_ns, wall_ns=wall_ns)
        if expiry is not None:
            self._events.add(expiry)
            self.ordered()
        self.flush_guard()
        if self.connected:
            self._times.on_tick(self.cadence, monotonic_ns)
        if self._times.due or observation.events or expiry is not None or self.outbox.windows.is_waiting:
            self.wake()
        befell = {event.kind for event in observation.events}
        if befell & _TURNS:
            self._report_health()
        if befell & _FORGETS:
            self._apply_again()
        return bool(befell & _TURNS)

    def _on_device_event(self, event: NodeEvent, now_ns: int, wall_ns: int) -> None:
        if event.kind in _TURNS:
            lost = event.kind is NodeEventKind.GPU_LOST
            self.turned(event)
            self.guard.on_device_loss(event.gpu_uuid, lost=lost, now_ns=now_ns, wall_ns=wall_ns)
        if event.kind in _FORGETS:
            self.returned(event.gpu_uuid)

    def observe_slow(self, look: ExtendedReadings, found: SourceReadings = NO_SOURCE_READINGS) -> None:
        """Takes extended readings and the owners of their processes; events are sent at once, readings now and then."""
        now_ns, wall_ns = self._clock.monotonic_ns(), self._clock.wall_ns()
        self.slow = replace(look, monotonic_ns=now_ns, wall_ns=wall_ns, host=self._host.read_slow())
        told = (
            *self.health.on_device_events(look.events, wall_ns=wall_ns),
            *self.health.on_extended_readings(look.gpus, look.processes, wall_ns=wall_ns),
            *self._attribute(look, found),
        )
        for event in told:
            self._events.add(event)
        self._report_health()
        if self._slow_sent_ns is None or now_ns - self._slow_sent_ns >= SLOW_SENT_S * 1e9:
            self._slow_sent_ns, self._slow_due = now_ns, True
        if told or self._inventory_due:
            self.wake()

    def _attribute(self, look: ExtendedReadings, found: SourceReadings) -> tuple[NodeEvent, ...]:
        if self.energy is None:
            return ()
        uncounted_s = self._sampler.uncounted_by_gpu
        told = self.energy.observe(
            self.inventory.gpus, look, found, assignments=self._charged_assignments(), uncounted_s=uncounted_s
        )
        if self.energy.newest is not None:
            # By the clock of the last tick, which is the one that windows are shifted by.
            at_ns = self.outbox.wall_ns(monotonic_ns=self._clock.monotonic_ns())
            self.outbox.charge_attribution(
                self.energy.newest, at_ns=max(0, self._clock.wall_ns()) if at_ns is None else at_ns
            )
        return told

    def _assignments(self) -> tuple[Assignment, ...] | None:
        return None if self.guard.plan is None else self.guard.plan.assignments

    def _charged_assignments(self) -> tuple[Assignment, ...] | None:
        """The plan's assignments without processes that have not begun: what others draw on their GPUs is not theirs.

        The same tuple as long as they are the same.
        """
        planned = self._assignments()
        if planned is None or self._processes is None:
            return planned
        known = self._processes.list_attempts()
        waiting = frozenset(key for item in planned if item.process and (key := attempt_key(item)) not in known)
        if not waiting:
            return planned
        if self._charged.planned is not planned or self._charged.waiting != waiting:
            begun = tuple(item for item in planned if attempt_key(item) not in waiting)
            self._charged = _ChargedAssignments(planned, waiting, begun)
        return self._charged.begun

    def _riding(self, quick: GpuReadings) -> ExtendedColumns | None:
        if not self._slow_due:
            return None
        self._slow_due = False
        return build_extended_columns(self.slow, dict(quick), self.inventory)

    def is_stalled(self, *, now_ns: int) -> bool:
        """Whether batches are under way and none was acknowledged for too long."""
        is_waiting = self.connected and self.spool.in_flight > 0
        return is_waiting and self._times.is_stalled(self.cadence, now_ns, is_choice=self.has_choice)

    def build_hello(self) -> ConnectRequest:
        """Opens a connection with the newest inventory."""
        self._inventory_due = False
        self._contact.note_opening()
        return ConnectRequest(
            message=Hello(
                incarnation=self._incarnation,
                inventory=self.inventory,
                plan_epoch=self.guard.epoch,
                # Without commands, which the controller knows, and which may be long.
                held=HeldAssignments(
                    assignments=tuple(replace(item, process=None) for item in self._assignments() or ())
                ),
                term=self.terms.known,
                accepts_resume_request=True,
            )
        )

    def build_resume(self, digest: Callable[[Inventory], str]) -> ConnectRequest | None:
        """Opens a connection without the inventory, where the last controller takes that; None where Hello is due."""
        if not self._resumes:
            return None
        if self._digest[0] is not self.inventory:
            self._digest = self.inventory, digest(self.inventory)
        self._inventory_due = False
        self._contact.note_opening()
        return ConnectRequest(
            message=Resume(
                incarnation=self._incarnation,
                node_name=self.name,
                plan_epoch=self.guard.epoch,
                inventory_digest=self._digest[1],
                term=self.terms.known,
                accepts_resume_request=True,
            )
        )

    def on_refused(self) -> None:
        """Records that a connection ended before its Welcome: the next one starts with a full report."""
        self._resumes = False

    def on_welcome(self, message: Welcome) -> None:
        """Handles the Welcome: what the controller lacks is sent again; raises TermTooOld and ForeignSequence."""
        self.terms.accept(message.term)
        self._term = message.term
        if self.spool.resume(message.acknowledged_sequence) is Acknowledged.FUTURE:
            self._incarnation = self._draw_incarnation()
            self.spool.restart()
            self._reported_sequence = 0
            raise ForeignSequence(
                f"the controller claims batch {message.acknowledged_sequence}, which was never sent; starting over"
            )
        self._resumes = message.resumes
        self._events.acknowledge(message.acknowledged_sequence)
        self._events.resume()
        # Whoever was told of it may lead no more: the plan is in force again only once it is sent again.
        if self.guard.expiry is not None and self.guard.expiry not in self._events:
            self._events.add(self.guard.expiry)
        self.outbox.windows.resume()
        self._answers.clear()
        self._plain_answer = None
        if self.guard.applied is not None:
            self._answers.append(self.guard.applied)
        self.connected = True
        self._contact.note_welcome()
        is_asked = message.wants_ended_attempts
        self._reporter.begin(self._processes.list_ended() if is_asked and self._processes is not None else ())
        self._chunks.clear()
        self._log_requests.clear()
        self._streams += 1
        # A controller that comes after another takes a node's word only when something has followed its Welcome.
        self._is_answer_due = True
        self._held.mark_unsent()
        self._times.due = True
        now_ns = self._clock.monotonic_ns()
        self._times.waits_since_ns = now_ns
        self.guard.renew_lease(now_ns)
        self._set_cadence(message.cadence, now_ns)

    def on_disconnected(self) -> None:
        """The connection, or the controller behind it, is gone; everything unacknowledged waits."""
        self.connected = False

    def on_message(self, response: ConnectResponse) -> None:
        """Handles one message of the controller after its Welcome; kinds of newer versions are ignored.

        Raises TermTooOld, having done nothing, if another node of this agent has met a later leader.
        """
        message = response.message
        self.terms.check(self._term, plan_epoch=message.epoch if isinstance(message, NodePlan) else 0)
        now_ns = self._clock.monotonic_ns()
        match message:
            case Acknowledgement():
                self.guard.renew_lease(now_ns)
                self._contact.note_acknowledged(message.sequence)
                if self.spool.acknowledge(message.sequence) is Acknowledged.NEWER:
                    self._events.acknowledge(message.sequence)
                    self._times.waits_since_ns = now_ns
                if self._times.due or self.spool.is_urgent:
                    self.wake()
            case NodePlan():
                self._apply_plan(message, now_ns)
            case EnergyAcknowledgement():
                self.outbox.windows.acknowledge(message.incarnation, message.number)
                if message.refused:
                    self.outbox.record_refusal(message.refused, message.refused_reason)
            case Cadence():
                self.guard.renew_lease(now_ns)
                self._set_cadence(message, now_ns)
            case LogRequest():
                self._read_log(message)
            case InputChunk():
                self._write_input(message)
            case _:
                pass

    def next_message(self) -> ConnectRequest | None:
        """The message to send now, if any."""
        if self._inventory_due:
            self._inventory_due = False
            return ConnectRequest(message=self.inventory)
        event = self._events.next_event(covered_by=self.spool.upcoming_sequence)
        if event is not None:
            return ConnectRequest(message=event)
        if self._answers:
            return ConnectRequest(message=self._answers.popleft())
        if self._chunks:
            return ConnectRequest(message=self._chunks.popleft())
        other = self._next_report() or self._held.pop_unsent() or self.outbox.windows.next_window()
        if other is not None:
            return ConnectRequest(message=other)
        if not (self._times.due or self.spool.is_urgent):
            return None
        idle = self.spool.in_flight == 0
        batch = self.spool.next_batch()
        if batch is None:
            self._times.due = self._times.due and (self._is_answer_due or self.spool.waiting_ticks > 0)
            return None
        self._is_answer_due = False
        self._contact.note_sent(batch.sequence)
        if idle:
            self._times.waits_since_ns = self._clock.monotonic_ns()
        self._report_dropped(batch)
        self.batches_total += 1
        self._times.due = self._times.due and self.spool.waiting_ticks > 0
        return ConnectRequest(message=batch)

    def newest_batch(self) -> SampleBatch | None:
        """The newest tick, numbered by how many came before it."""
        tick = self.last_tick
        return None if tick is None else build_batch([tick], sequence=self.ticks_total, dropped_ticks=0)

    def _apply_plan(self, plan: NodePlan, now_ns: int) -> None:
        verdict = self.guard.offer_plan(plan, gpu_uuids=frozenset(self.gpu_uuids), now_ns=now_ns)
        answer = verdict.answer
        if answer is None:
            answer = self.guard.complete_plan(verdict, self._apply_assignments(verdict.assignments))
        # With processes plans come with each start and end: that all is as it should be is told a moment later, once for all.
        if self._processes is None or answer.status is not ApplyStatus.APPLIED or answer.results:
            self._queue_answer(answer)
        else:
            self._plain_answer = answer
        self.ordered()

    def _apply_assignments(self, possible: tuple[Assignment, ...]) -> tuple[ApplyResult, ...]:
        """Runs the plan in force; `possible` are its assignments whose devices are there."""
        self._possible = possible
        if self._processes is None:
            return self._engine.apply(possible)
        actions = plan_actions(self._assignments() or (), possible, self._processes.list_attempts())
        checked = [item for item in actions.start if self._readiness is not None and needs_free_gpus(item)]
        if self._readiness is not None:
            self._readiness.set_wanted(checked, self.guard.plan.gpu_settings if self.guard.plan else ())
        for item in actions.refuse:
            self._processes.refuse(item, "stopped before it started")
        for key in actions.stop:
            self._processes.stop(key)
        results = self._apply_running()
        self._processes.drop_waiting(actions.start)
        self._processes.start(*(item for item in actions.start if item not in checked))
        # Work on the files of what has ended can wait for the starts on its GPUs.
        self._forgotten = actions.forget
        if checked:
            self.starting()
        else:
            self._forget_ended(self._processes)
        return results

    def _forget_ended(self, processes: ProcessEngine) -> None:
        for key in self._forgotten:
            processes.forget(key)
        self._forgotten = ()

    def _apply_running(self) -> tuple[ApplyResult, ...]:
        """Tells the engine what it holds: all but processes that have not started, or have ended."""
        known = {} if self._processes is None else self._processes.list_attempts()
        return self._engine.apply(
            tuple(
                item
                for item in self._possible
                if item.process is None or not getattr(known.get(attempt_key(item)), "is_over", True)
            )
        )

    def list_gpus_to_check(self) -> tuple[str, ...]:
        """Returns the GPUs whose processes and memory are to be read before attempts start."""
        return () if self._readiness is None else self._readiness.list_due_gpus(self._clock.monotonic_ns())

    def on_gpu_use(self, uses: Mapping[str, GpuUse]) -> None:
        """Starts the attempts whose GPUs are free, and cordons those that others hold."""
        if (readiness := self._readiness) is None or self._processes is None:
            return
        before, now_ns = dict(readiness.cordons), self._clock.monotonic_ns()
        self._processes.start(*readiness.observe(uses, now_ns))
        self._forget_ended(self._processes)
        for item, reason in readiness.withdraw_overdue(now_ns, is_enforcing=self.guard.is_enforcing).values():
            self._processes.refuse(item, reason, gpu_held=True)
        if readiness.cordons != before:
            self._report_health()
            self.wake()

    def _on_attempts_changed(self) -> None:
        """Wakes the stream, which sends what changed, and readers of output that has ended."""
        self._apply_running()
        self.answer_log_requests()
        self.wake()

    def report_starts(self) -> None:
        """Lets the controller know which attempts have begun, unless it was told meanwhile, and that the plan is in force.

        Called at intervals.
        """
        if self._plain_answer is not None:
            self._queue_answer(self._plain_answer)
        if self._reporter.report_starts():
            self.wake()

    def _next_report(self) -> AttemptReport | None:
        """Returns the attempts that the controller was not told of on this stream, as they are now."""
        report = self._reporter.next_report(self._assignments() or (), self._clock.monotonic_ns())
        if self.list_suspected_gpus():
            self.starting()
        return report

    def list_suspected_gpus(self) -> tuple[str, ...]:
        """Returns the GPUs of processes that failed, about which the driver is to be asked before that is told."""
        return self._reporter.list_suspected_gpus(self._assignments() or ())

    def on_fault_look(self, quick: GpuReadings, events: tuple[DeviceEvent, ...]) -> None:
        """Takes what the driver said of such GPUs, and judges whether they ended what ran there."""
        if told := self.health.on_device_events(events, wall_ns=self._clock.wall_ns()):
            self.queue_events(told)
            self._report_health()
        if self._reporter.judge_ends(self._assignments() or (), quick, self.inventory.gpus, self.health):
            self.wake()

    def _read_log(self, request: LogRequest) -> None:
        due_ns = self._clock.monotonic_ns() + int(request.wait_s * 1e9)
        self._log_requests.append(_PendingLogRequest(request, due_ns))
        self.answer_log_requests()

    def _write_input(self, chunk: InputChunk) -> None:
        take = partial(self._on_input_taken, self._streams)
        if self._processes is None:
            take(InputResult(request_id=chunk.request_id, problem="no process runs here"))
        else:
            self._processes.write_input(chunk, take)

    def _on_input_taken(self, stream: int, result: InputResult) -> None:
        """Answers on the stream that asked: another has the same numbers."""
        if self.connected and stream == self._streams:
            self._chunks.append(result)
            self.wake()

    @property
    def runs_processes(self) -> bool:
        """Whether it runs jobs, so that `run_process_engine` has something to do."""
        return self._processes is not None

    def adopt_processes(self) -> None:
        """Finds the processes of the agent's previous run, before any plan is applied."""
        if self._processes is not None:
            self._processes.adopt()

    def answer_log_requests(self) -> bool:
        """Answers requests for output that is there, or for which none came in time; returns whether others wait."""
        if self._processes is None or not self.connected:
            self._log_requests.clear()
            return False
        now_ns, waiting = self._clock.monotonic_ns(), list[_PendingLogRequest]()
        for pending in self._log_requests:
            chunk = self._processes.read_output(pending.request)
            if chunk.text or chunk.data or chunk.is_end or now_ns >= pending.due_ns:
                self._chunks.append(chunk)
                self.wake()
            else:
                waiting.append(pending)
        self._log_requests = waiting
        return bool(waiting)

    def _set_cadence(self, cadence: Cadence, now_ns: int) -> None:
        self.spool.set_window(cadence.window)
        before, self.cadence = self.cadence, cadence
        self._times.update_interval(before, cadence, now_ns)
        if cadence.sample_interval_s != before.sample_interval_s:
            self._sampler.set_interval(cadence.sample_interval_s)
            self.retime()
        self.wake()

    def _report_dropped(self, batch: SampleBatch) -> None:
        if batch.dropped_ticks and batch.sequence > self._reported_sequence:
            detail = f"the spool was full: {batch.dropped_ticks} ticks were dropped before batch {batch.sequence}"
            kind = NodeEventKind.SAMPLES_DROPPED
            self._events.add(NodeEvent(kind=kind, time_ns=max(0, self._clock.wall_ns()), detail=detail))
            self._reported_sequence = batch.sequence

    def _inventory(self, found: DeviceSurvey, *, generation: int) -> Inventory:
        return build_inventory(
            self._identity,
            self._host,
            found,
            generation=generation,
            lost=self._sampler.lost_gpus,
            cordons=self._cordons(),
            leases=self.list_leases(),
        )

    def _cordons(self) -> Mapping[str, str]:
        """Devices that should take no new work, and why."""
        held = {} if self._readiness is None else self._readiness.cordons
        return {**held, **self.guard.quarantines(self._clock.monotonic_ns()), **self.health.cordons()}


def _ignore_event(_event: NodeEvent) -> None:
    """Nobody listens yet."""


def _nothing(*_told: str) -> None:
    """Nobody listens yet."""
