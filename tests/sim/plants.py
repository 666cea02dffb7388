"""Faulty parts: each breaks one promise of the real ones, and an invariant has to notice.

Owns nothing that is true. A simulation that cannot fail proves nothing, so
sim_test.py puts these into a world and demands to be told.
"""

import random
from dataclasses import replace

from eelgrid_agent.devices.port import Missing, RawReadings
from eelgrid_agent.node.node import AgentNode
from eelgrid_controller.errors import LostEntries
from eelgrid_controller.state.events import NodeLost
from eelgrid_controller.state.journal import JournalEntry
from eelgrid_controller.state.telemetry import BatchReceipt, Telemetry
from eelgrid_protos.faults import Fault
from eelgrid_protos.messages import Acknowledgement, ConnectResponse, NodePlan, SampleBatch
from tests.sim.agent import Agent
from tests.sim.disk import Disk, MemoryJournal, Unreliable
from tests.sim.life import Life, _Command
from tests.sim.poison import ROGUE
from tests.sim.ticks import Looks
from tests.sim.world import Parts

__all__ = ["PLANTS", "DicingAgent"]


class EchoingAgent(Agent):
    """Puts the first plan that it ever got in force again."""

    first: ConnectResponse | None = None

    def hear(self, node: AgentNode, response: ConnectResponse) -> None:
        super().hear(node, response)
        if isinstance(response.message, NodePlan):
            self.first = self.first or response
            if response is not self.first:
                node.guard.plan = None
                super().hear(node, self.first)


class DeafAgent(Agent):
    """Passes every plan over."""

    def hear(self, node: AgentNode, response: ConnectResponse) -> None:
        if not isinstance(response.message, NodePlan):
            super().hear(node, response)


class ImaginativeAgent(Agent):
    """Takes a reading that is missing for a zero."""

    def looks(self, node: AgentNode) -> Looks:
        return tuple(
            (
                uuid,
                RawReadings(
                    energy_counter_j=raw.energy_counter_j,
                    values={key: 0.0 if isinstance(value, Missing) else value for key, value in raw.values.items()},
                ),
            )
            for uuid, raw in super().looks(node)
        )


class ForgettingAgent(Agent):
    """Begins to count energy anew now and then."""

    def looks(self, node: AgentNode) -> Looks:
        if node.ticks_total % 10 == 9:
            node._sampler._meters.clear()
        return super().looks(node)


class IdleAgent(Agent):
    """Reports no energy at all, which never falls either."""

    def looks(self, node: AgentNode) -> Looks:
        node._sampler._meters.clear()
        return super().looks(node)


class LeakyAgent(Agent):
    """Releases a batch too much with each acknowledgement."""

    def hear(self, node: AgentNode, response: ConnectResponse) -> None:
        super().hear(node, response)
        if isinstance(response.message, Acknowledgement) and node.spool._waiting:
            node.spool._waiting.popleft()


class DicingAgent(Agent):
    """Draws from elsewhere than the seed."""

    def looks(self, node: AgentNode) -> Looks:
        self.timeline.rng.seed(random.SystemRandom().getrandbits(64))
        return super().looks(node)


class _ForgetfulJournal(MemoryJournal):
    last_commit = 0

    def append(self, entries: list[JournalEntry]) -> int:
        self.last_commit = len(entries)
        return super().append(entries)

    def close(self) -> None:
        """The last commit never reached the disk."""
        count = len(self._entries) - self.last_commit
        self._marked = count
        del self._entries[count:]
        self._checkpoints = [entry for entry in self._checkpoints if entry[0] <= count]
        self.last_commit = 0


class ForgetfulDisk(Disk):
    """Says that the last commit was on disk when it was not."""

    def __init__(self, directory: object = None) -> None:
        super().__init__(None)
        self._memory = _ForgetfulJournal()


class HastyLife(Life):
    """Answers before the commit."""

    def _begun(self, batch: list[_Command]) -> None:
        for command in batch:
            if command.fault is None:
                command.answer(command.outcome.result, None)
            else:
                command.answer(None, command.fault)
            command.answer = _nobody


def _nobody(_: object, fault: Fault | None) -> None:
    pass


class SecretiveLife(Life):
    """Changes the state without the journal."""

    def _finish(self, batch: list[_Command], fault: Fault | None) -> None:
        for name in list(self.core.state.nodes)[:1]:
            if self.core.state.revision > 20:
                self.core.state.apply(NodeLost(time_ns=self._now_ns, node_name=name))
        super()._finish(batch, fault)


class GenerousLife(Life):
    """Moves placed work onto the devices of other work, behind everybody's back."""

    def _finish(self, batch: list[_Command], fault: Fault | None) -> None:
        workloads = self.core.state.workloads
        placed = [workload for workload in workloads.values() if workload.placements and workload.spec.replicas == 1]
        if len(placed) > 1:
            workloads[placed[0].workload_id] = replace(placed[0], placements=placed[1].placements)
        super()._finish(batch, fault)


class _CountsTwice(Telemetry):
    def receive_batch(self, node_name: str, batch: SampleBatch, *, now_s: float) -> BatchReceipt:
        feed = self._feeds[node_name]
        feed.sequence = min(feed.sequence, batch.sequence - 1)
        return super().receive_batch(node_name, batch, now_s=now_s)


class DoubleCountingLife(Life):
    """Counts a batch that is sent again as a new one."""

    telemetry_type = _CountsTwice


class _Ageless(Telemetry):
    def age_s(self, node_name: str, *, now_s: float, now_ns: int) -> float | None:
        return None if super().age_s(node_name, now_s=now_s, now_ns=now_ns) is None else 0.0


class AgelessLife(Life):
    """Takes old readings for fresh ones."""

    telemetry_type = _Ageless


class CredulousLife(Life):
    """Takes every agent for one that holds what the journal says."""

    def _begin(self, lost: LostEntries | None) -> None:
        self.command(
            lambda core, now_ns: core.record_controller_start(now_ns=now_ns, lost=lost, asks_agents=False), _nobody
        )


class QuietDisk(Disk):
    """Says nothing of entries that are gone."""

    def open(self, *, accepts_loss: bool = False) -> Unreliable:
        return super().open(accepts_loss=True)


class _Boastful(Telemetry):
    def tick_counts(self, node_name: str) -> tuple[int, int]:
        received, lost = super().tick_counts(node_name)
        return received, lost + (2**70 if node_name.startswith(ROGUE) else 0)


class SpeechlessLife(Life):
    """Lets a rogue's figures into the answers to others."""

    telemetry_type = _Boastful


# Name, parts, and the invariants of which one has to notice.
PLANTS = (
    ("an agent applies an old plan", Parts(agent=EchoingAgent), {4}),
    ("an agent applies no plan", Parts(agent=DeafAgent), {4}),
    ("an agent makes numbers of missing readings", Parts(agent=ImaginativeAgent), {6}),
    ("an agent lets energy fall", Parts(agent=ForgettingAgent), {6}),
    ("an agent counts no energy", Parts(agent=IdleAgent), {6}),
    ("an agent loses ticks", Parts(agent=LeakyAgent), {5}),
    ("a journal forgets the last commit", Parts(disk=ForgetfulDisk), {2, 3}),
    ("a controller answers before the commit", Parts(life=HastyLife), {2}),
    ("a controller changes state without an event", Parts(life=SecretiveLife), {3}),
    ("a controller gives one device to two", Parts(life=GenerousLife), {1}),
    ("a controller counts a batch twice", Parts(life=DoubleCountingLife), {5}),
    ("a controller takes stale readings for fresh", Parts(life=AgelessLife), {6}),
    ("a controller believes a journal that was rolled back", Parts(life=CredulousLife), {9}),
    ("a journal says nothing of what it lost", Parts(disk=QuietDisk), {9}),
    ("a controller cannot answer for what one node said", Parts(life=SpeechlessLife), {10}),
)
