"""One simulated machine with an agent on it: the real node under a transcribed wheel and uplink.

Owns the machine (clock, devices, boots), the agent's process and its stream.
The process is `eelgrid_agent.node.node.AgentNode` with the real sampler, spool, guard and
engine; what is here decides only when it looks and when it connects, as
`eelgrid_agent.node.loop.SimulatedNodesLoop` and `eelgrid_agent.node.uplink.Uplink` do. With the process
dies the work that it simulates.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace

from eelgrid_agent.devices.port import ReadingValue
from eelgrid_agent.devices.sampler import read_extended_readings
from eelgrid_agent.energy.windows import EnergyOutbox, OutboxState
from eelgrid_agent.node.inventory import NodeIdentity, read_each_gpu, survey_devices
from eelgrid_agent.node.leader_terms import LeaderTerms, TermTooOld
from eelgrid_agent.node.loop import SLOW_S, SURVEY_S
from eelgrid_agent.node.node import AgentNode, ForeignSequence
from eelgrid_agent.node.uplink import UplinkLimits, bound_backoff
from eelgrid_agent.node.workload_engine import SimulatedEngine
from eelgrid_agent.simulation.node import SimulatedNode
from eelgrid_agent.simulation.spec import GpuLoad, NodeSpec
from eelgrid_protos.codec import decode_message, encode_message
from eelgrid_protos.errors import ContractError
from eelgrid_protos.messages import (
    Assignment,
    ConnectRequest,
    ConnectResponse,
    Hello,
    LeaderTerm,
    Reading,
    ResumeRequest,
    SampleBatch,
    Welcome,
)
from tests.sim.broken import demand
from tests.sim.clock import Clock, seconds
from tests.sim.ledger import Ledger
from tests.sim.network import AGENT, KEEPALIVE_NS, Network
from tests.sim.ticks import SERIAL, Looks, Process
from tests.sim.timeline import Timeline

__all__ = ["Agent"]

_LIMITS = UplinkLimits()


class _NumberingHost:
    """The host port; its memory reading is the serial of the look, by which the observer knows a tick."""

    def __init__(self, spec: NodeSpec) -> None:
        self.cpu_milli = spec.cpu_milli
        self.memory_bytes = spec.memory_bytes
        self.boot_id = "boot-0"
        self.serial = 0

    def read_slow(self) -> Mapping[Reading, ReadingValue]:
        """Nothing dear on this host."""
        return {}

    def read(self) -> Mapping[Reading, ReadingValue]:
        """One look."""
        self.serial += 1
        return {Reading.HOST_CPU_UTILIZATION_RATIO: (self.serial % 64) / 64.0, SERIAL: float(self.serial)}


class _Stream:
    """One stream of one process; see `eelgrid_agent.node.uplink._Session`."""

    def __init__(self, agent: "Agent", node: AgentNode, network: Network) -> None:
        self._agent = agent
        self._node = node
        self.is_welcomed = False
        self.is_over = False
        self.began_ns = agent.clock.monotonic_ns()
        self.term: LeaderTerm | None = None
        self._openings = 0
        self._connection = network.connect(node.name, self, agent.address)
        self._open(_LIMITS.welcome_s)

    def received(self, data: bytes) -> None:
        """The next message."""
        try:
            response = decode_message(ConnectResponse, data)
            if isinstance(response.message, ResumeRequest):
                self.is_welcomed = False
                self._node.on_disconnected()
                self._open(response.message.leader_within_s + _LIMITS.welcome_s)
            elif self.is_welcomed:
                self._agent.heard_from = self
                self._agent.hear(self._node, response)
            elif isinstance(response.message, Welcome):
                self._node.on_welcome(response.message)
                self.term = response.message.term
                self.is_welcomed = True
                self._agent.welcomed(self)
        except (ContractError, ForeignSequence, TermTooOld) as error:
            self.end(str(error))
        self.pump()

    def closed(self, reason: str) -> None:
        """The other end is gone."""
        self.end(reason)

    def end(self, reason: str) -> None:
        """The stream is over."""
        if not self.is_over:
            self.is_over = True
            self._connection.close(AGENT, reason)
            self._agent.stream_ended(self, reason)

    def abandon(self) -> None:
        """The machine lost its power: nobody is told, and the other end finds out by itself."""
        self.is_over = True
        connection = self._connection
        connection.abandon(AGENT)
        self._agent.timeline.after(KEEPALIVE_NS, lambda: connection.snap("keepalive timed out"))

    def pump(self) -> None:
        """Sends what the node has to say."""
        while self.is_welcomed and not self.is_over:
            message = self._node.next_message()
            if message is None:
                return
            if isinstance(message.message, SampleBatch):
                self._agent.ledger.ticks.pulled(self._node.name, message.message)
            self._send(message)

    def _open(self, within_s: float) -> None:
        message = self._node.build_hello()
        if self._agent.is_older:
            assert isinstance(message.message, Hello)
            message = replace(message, message=replace(message.message, accepts_resume_request=False))
        self._openings += 1
        opening = self._openings
        self._send(message)
        self._agent.later(seconds(within_s), lambda: self._welcome_overdue(opening))

    def _welcome_overdue(self, opening: int) -> None:
        if not self.is_welcomed and opening == self._openings:
            self.end("the controller did not answer Hello")

    def _send(self, message: ConnectRequest) -> None:
        self._connection.send(AGENT, encode_message(message))


class Agent:
    """See the module."""

    # Of the controller that it calls.
    address = ""
    # Of the version before, which knows no ResumeRequest.
    is_older = False
    heard_from: _Stream

    def __init__(
        self,
        timeline: Timeline,
        network: Network,
        ledger: Ledger,
        spec: NodeSpec,
        *,
        drift_ppm: int,
        seed: int,
        ticks_most: int,
    ) -> None:
        self.timeline = timeline
        self.ledger = ledger
        self.spec = spec
        self.clock = Clock(lambda: timeline.now_ns, drift_ppm=drift_ppm)
        self.node: AgentNode | None = None
        self.engine: SimulatedEngine
        self.device: SimulatedNode
        self.stream: _Stream | None = None
        self.stalled_until_ns = 0
        self._network = network
        self._seed = seed
        self._ticks_most = ticks_most
        self._host = _NumberingHost(spec)
        self._boots = 0
        self._life = 0
        self._failures = 0
        self._was_welcomed = False
        self._ticking = 0
        self._surveyed_ns = 0
        self._slowly_ns = 0
        self._taken_epoch = 0
        # The process that heard the last message.
        self._hearing: AgentNode | None = None
        self._rollbacks = 0
        # As on disk: the next process has it.
        self._terms = LeaderTerms()

    @property
    def name(self) -> str:
        """The node's name."""
        return self.spec.node_name

    @property
    def held(self) -> tuple[Assignment, ...]:
        """What it holds by its plan; nothing where no process runs."""
        return () if self.node is None or self.node.guard.plan is None else self.node.guard.plan.assignments

    # Machine and process

    def boot(self) -> None:
        """The machine comes up: clocks and counters begin anew, and the agent starts."""
        self._boots += 1
        self.clock.reboot()
        self._host.boot_id = self.ledger.boots[self.name] = f"boot-{self._boots}"
        lost = (
            set()
            if self._boots == 1
            else {gpu.identity.uuid for gpu in self.device.devices if gpu.health.value != "ok"}
        )
        self.device = SimulatedNode(self.spec, monotonic_ns=self.clock.monotonic_ns, seed=self._seed)
        for uuid in sorted(lost):
            self.device.faults.lose_gpu(uuid)
        self.start()

    def start(self) -> None:
        """The agent's process starts."""
        self._life += 1
        self._failures = 0
        self._was_welcomed = False
        self.device.close()
        first = survey_devices(self.device)
        self.engine = SimulatedEngine((gpu.identity for gpu in self.device.devices), self._set_load)
        identity = NodeIdentity(
            node_name=self.name,
            agent_version="0",
            pool=self.spec.pool,
            labels=self.spec.labels,
            simulated=True,
            # Of every second node, so that budgets are kept on some.
            sets_limits=self.name[-1] in "02468",
        )
        drawn: list[int] = []
        node = AgentNode(
            identity,
            host=self._host,
            engine=self.engine,
            clock=self.clock,
            draw_incarnation=lambda: self._draw_incarnation(drawn),
            ticks_most=self._ticks_most,
            first=first,
            send_phase=self.timeline.rng.random(),
            # Windows of energy count by a number of their own; a batch's is drawn once in a life.
            terms=self._terms,
            outbox=EnergyOutbox(OutboxState(incarnation=self._life), by_plan=True),
        )
        self.node = node
        self.ledger.ticks.began(Process(self.name, drawn[0], node.spool))
        node.retime = self._retime
        self._surveyed_ns = self._slowly_ns = self.clock.monotonic_ns()
        self._retime()
        self._connect()

    def stop(self, *, is_power_loss: bool) -> None:
        """The process dies at once, or the machine with it."""
        if self.node is None:
            return
        self.ledger.ticks.died(self.name)
        stream, self.stream, self.node = self.stream, None, None
        self._life += 1
        if stream is not None:
            if is_power_loss:
                stream.abandon()
            else:
                stream.end("the agent died")
        for gpu in self.device.devices:
            self.device.set_load(gpu.identity.uuid, GpuLoad())

    def later(self, delay_ns: int, action: Callable[[], None]) -> None:
        """Runs the action after a while on this machine's clock, unless the process has died by then."""
        life = self._life
        self.timeline.after(self.clock.true_delay_ns(delay_ns), lambda: action() if life == self._life else None)

    def _draw_incarnation(self, drawn: list[int]) -> int:
        demand(5, not drawn, f"{self.name}: the controller claims batches that were never sent")
        drawn.append(self.timeline.rng.getrandbits(63))
        return drawn[0]

    def _set_load(self, uuid: str, ratio: float, memory_bytes: int) -> None:
        self.device.set_load(uuid, GpuLoad(utilization_ratio=ratio, memory_bytes=memory_bytes))

    # Looking

    def looks(self, node: AgentNode) -> Looks:
        """What the devices say; a planted fault says otherwise."""
        return read_each_gpu(self.device, node.gpu_uuids)

    def _retime(self) -> None:
        self._ticking += 1
        if self.node is not None:
            interval_ns = seconds(self.node.cadence.sample_interval_s)
            self._tick_in(self.timeline.draw_ns(interval_ns))

    def _tick_in(self, delay_ns: int) -> None:
        ticking = self._ticking
        self.later(delay_ns, lambda: self._turn() if ticking == self._ticking else None)

    def _turn(self) -> None:
        node = self.node
        assert node is not None
        interval_ns = seconds(node.cadence.sample_interval_s)
        if self.timeline.now_ns < self.stalled_until_ns:
            self._tick_in(interval_ns)
            return
        now_ns = self.clock.monotonic_ns()
        truth = read_each_gpu(self.device, node.gpu_uuids)
        turned = node.record_tick(self.looks(node), monotonic_ns=now_ns)
        assert node.last_tick is not None
        self.ledger.ticks.took(self.device, truth, node.last_tick, self.timeline.now_ns)
        if turned or now_ns - self._surveyed_ns >= SURVEY_S * 1e9:
            self._surveyed_ns = now_ns
            node.update_inventory(survey_devices(self.device))
        if now_ns - self._slowly_ns >= SLOW_S * 1e9:
            self._slowly_ns = now_ns
            node.observe_slow(read_extended_readings(self.device, node.gpu_uuids))
        if node.is_stalled(now_ns=now_ns) and self.stream is not None:
            self.stream.end("no acknowledgement in time")
        self._tick_in(interval_ns)

    # Connecting

    def _connect(self) -> None:
        if self.node is not None:
            self.stream = _Stream(self, self.node, self._network)

    def welcomed(self, stream: _Stream) -> None:
        """The stream that sends from now on."""
        assert self.node is not None
        # As an event of its own: the node may wake from within a call that the stream made.
        self.node.wake = lambda: self.later(0, stream.pump)

    def hear(self, node: AgentNode, response: ConnectResponse) -> None:
        """One message of the controller; the plan in force never goes back."""
        before = node.guard.plan
        if self._rollbacks != self.ledger.rollbacks or (self._rollbacks and self._hearing is not node):
            # A controller that lost its journal goes on above what this process holds, not above those before it.
            self._rollbacks, self._taken_epoch = self.ledger.rollbacks, node.guard.epoch
        self._hearing = node
        node.on_message(response)
        if node.guard.plan is not before:
            self.ledger.plan_taken(self.name, self._taken_epoch, node.guard)
            self._taken_epoch = node.guard.epoch

    def stream_ended(self, stream: _Stream, reason: str) -> None:
        """Back-off with full jitter, then again."""
        if self.node is None or stream is not self.stream:
            return
        self.timeline.note(f"agent {self.name} stream ended reason={reason}")
        self.node.on_disconnected()
        if stream.is_welcomed and self.clock.monotonic_ns() - stream.began_ns >= _LIMITS.good_s * 1e9:
            self._failures = 0
        self._was_welcomed |= stream.is_welcomed
        bound_s = bound_backoff(_LIMITS, self._failures, 0.0 if self._was_welcomed else None)
        self._failures += 1
        self.later(seconds(bound_s * self.timeline.rng.random()), self._connect)
