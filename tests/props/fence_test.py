"""Fenced nodes in random weather: links that break, agents that are stopped or killed, reboots, leaders that restart, clocks.

The core and the agents' contact are the real ones; launchers, agents and links are played by the clock. No workload ever
runs on two nodes at once, and each runs again in the end.
"""

import json
import random
import tempfile
from collections import deque
from dataclasses import replace
from pathlib import Path

import pytest
from tests.builders.cluster import build_node, build_request
from tests.state_invariants import check_invariants

from eelgrid_agent.engine.contact import LeaderContact, read_contact
from eelgrid_controller.core.core import Core
from eelgrid_controller.state.cluster_state import ClusterState
from eelgrid_protos import catalogue
from eelgrid_protos.messages import AttemptState, AttemptStatus, Mobility, NodeState, ProcessSpec

NS = 10**9
FENCE_S, GRACE_S = 40.0, 8.0
SEND_S, AWAY_S, RESTART_GRACE_S = 5.0, 6.0, 20.0
PRODUCTS = catalogue.load_catalogue()
PROCESS = ProcessSpec(argv=("train",), working_directory="/", grace_s=GRACE_S)


class Launcher:
    """One attempt on a node: when it looks at the contact next, and when it is gone once it must stop."""

    def __init__(self, node, key, attempt):
        self.node, self.key, self.attempt = node, key, attempt
        self.look_s = self.gone_s = None
        self.is_silent, self.is_alive = False, True

    def run(self, now_s, chance):
        """The process as of now, on the node's clock; it uses as much of its grace as it likes."""
        if self.gone_s is not None and now_s >= self.gone_s:
            self.is_alive = False
        if not self.is_alive or self.gone_s is not None or (self.look_s is not None and now_s < self.look_s):
            return
        is_first = self.look_s is None
        contact_s, fence_s = read_contact(self.node.contact.path)
        self.look_s = now_s + min(5.0, (fence_s or 5.0) / 4.0)
        if fence_s and now_s - contact_s >= fence_s:
            self.is_silent = True
            # One that was ordered too late does not even start.
            self.gone_s = now_s if is_first else now_s + chance.uniform(0.0, GRACE_S)
            self.is_alive = not is_first

    def stop(self, now_s, chance):
        """The agent asks it to stop."""
        if self.gone_s is None:
            self.gone_s = now_s + chance.uniform(0.0, GRACE_S)


class Node:
    """A node with its agent, the launchers that outlive it, and its link; messages wait in queues with their due times."""

    def __init__(self, name, folder, chance):
        self.name, self.folder, self.chance = name, folder, chance
        self.rate, self.begin_s, self.now_s = chance.uniform(0.97, 1.03), chance.uniform(0.0, 1e6), 0.0
        self.launchers = []
        self.is_up = self.is_agent = True
        self.frozen_until_s = 0.0
        self.start_agent(0.0)

    def boottime_s(self):
        return self.begin_s + self.now_s * self.rate

    def start_agent(self, at_s):
        self.contact = LeaderContact(self.folder / f"{self.name}.json", FENCE_S, self.boottime_s)
        self.is_agent, self.stream, self.sequence, self.sent_s, self.try_s = True, None, 0, 0.0, at_s
        self.inbox = deque()

    def reboot(self, at_s):
        """All that ran is gone, the clock of the boot begins anew, and the file of the contact is still there."""
        for launcher in self.launchers:
            launcher.is_alive, launcher.is_silent = False, True
        self.kill_agent()
        self.now_s, self.begin_s = at_s, -at_s * self.rate
        self.start_agent(at_s)

    def kill_agent(self):
        self.is_agent, self.stream = False, None
        self.inbox.clear()


class Stream:
    """A connection, as both ends have it: either may find it broken before the other."""

    def __init__(self):
        self.is_open_there = True
        self.breaks_at_s = None


class World:
    def __init__(self, seed, folder):
        self.chance = random.Random(seed)
        self.now_s, self.jump_s = 0.0, 0.0
        self.core = Core(ClusterState(), PRODUCTS)
        self.nodes = {name: Node(name, folder, self.chance) for name in ("a", "b", "c")}
        self.is_leading_from_s = 0.0
        self.lost_at_s = {}
        self.streams = {}
        self.keys = ("x", "y")
        for key in self.keys:
            self.core.submit(
                build_request(key, gpus=1, process=PROCESS, mobility=Mobility.FIXED), now_ns=self.wall_ns()
            )

    def wall_ns(self):
        return int((1e9 + self.now_s + self.jump_s) * NS)

    # The controller

    def inventory(self, name):
        return replace(build_node(name, gpus=1, runs_processes=True, agent_version="1"), fence_after_s=FENCE_S)

    def restart_leader(self):
        state = ClusterState.load(json.loads(json.dumps(self.core.state.dump())))
        self.core = Core(state, PRODUCTS)
        self.is_leading_from_s = self.now_s + self.chance.uniform(1.0, 15.0)
        for stream in self.streams.values():
            stream.is_open_there = False
        self.streams.clear()
        away_s = self.is_leading_from_s + RESTART_GRACE_S
        self.lost_at_s = {name: away_s for name, record in state.nodes.items() if record.state is NodeState.READY}

    @property
    def is_leading(self):
        return self.now_s >= self.is_leading_from_s

    def lead(self):
        if not self.is_leading:
            return
        for name, stream in list(self.streams.items()):
            if stream.breaks_at_s is not None and self.now_s >= stream.breaks_at_s:
                stream.is_open_there = False
                del self.streams[name]
                self.lost_at_s[name] = self.now_s + AWAY_S
        for name, at_s in list(self.lost_at_s.items()):
            if self.now_s >= at_s:
                del self.lost_at_s[name]
                self.core.mark_node_lost(name, now_ns=self.wall_ns())
        while self.core.is_drain_due(self.wall_ns()):
            self.core.continue_drains(now_ns=self.wall_ns())
        while self.core.has_backlog:
            self.core.retry_waiting(now_ns=self.wall_ns())

    def plan(self, name):
        plan = self.core.node_plan(name)
        return [(item.workload_id, item.attempt, item.stop) for item in plan.assignments]

    # The agents

    def send(self, node, stream, what):
        """A message to the agent comes after a while, in order, and at all only if the stream holds until then."""
        due_s = max(self.now_s + self.chance.choice((0.0, 0.0, 1.0, 3.0)), *(at for at, *_ in node.inbox), 0.0)
        node.inbox.append((due_s, stream, what))
        if self.chance.random() < 0.01:
            # Just before it hears that.
            self.freeze(node)

    def live(self, node):
        node.now_s = self.now_s
        for launcher in node.launchers:
            launcher.run(node.boottime_s(), self.chance)
        if not node.is_agent or self.now_s < node.frozen_until_s:
            return
        self.read(node)
        if node.stream is None and node.is_up and self.is_leading and self.now_s >= node.try_s:
            self.open(node)
        elif node.stream is not None and self.now_s - node.sent_s >= SEND_S:
            self.report(node)

    def open(self, node):
        node.stream, node.sent_s = Stream(), self.now_s
        old = self.streams.pop(node.name, None)
        if old is not None:
            old.is_open_there = False
        self.streams[node.name] = node.stream
        self.lost_at_s.pop(node.name, None)
        node.contact.note_opening()
        self.core.register_node(self.inventory(node.name), now_ns=self.wall_ns())
        self.send(node, node.stream, ("welcome", None))
        self.tell(node)

    def tell(self, node):
        """What the agent says of its attempts, and the plan and acknowledgement that it is answered with."""
        ended = [one for one in node.launchers if not one.is_alive]
        statuses = [self.status(one) for one in node.launchers]
        if statuses:
            self.core.record_attempts(node.name, statuses, now_ns=self.wall_ns())
        plan = self.plan(node.name)
        named = {(key, attempt) for key, attempt, _ in plan}
        node.launchers = [one for one in node.launchers if one not in ended or (one.key, one.attempt) in named]
        self.send(node, node.stream, ("plan", plan))

    def status(self, one):
        is_over = not one.is_alive
        return AttemptStatus(
            workload_id=one.key,
            replica=0,
            attempt=one.attempt,
            state=AttemptState.ENDED if is_over else AttemptState.RUNNING,
            signal=15 if is_over else 0,
            reason="stopped" if is_over else "",
            node_fault="no controller was heard" if is_over and one.is_silent else "",
            started_ns=1,
        )

    def report(self, node):
        node.sequence, node.sent_s = node.sequence + 1, self.now_s
        node.contact.note_sent(node.sequence)
        if node.is_up and node.stream.is_open_there and self.is_leading and self.streams.get(node.name) is node.stream:
            self.tell(node)
            self.send(node, node.stream, ("acknowledgement", node.sequence))
        elif self.chance.random() < 0.3:
            # It finds that nobody answers, and connects anew a while later.
            node.stream, node.try_s = None, self.now_s + self.chance.uniform(0.0, 5.0)

    def read(self, node):
        while node.inbox and node.inbox[0][0] <= self.now_s:
            _, stream, (kind, what) = node.inbox.popleft()
            if stream is not node.stream:
                continue
            if kind == "welcome":
                node.contact.note_welcome()
            elif kind == "acknowledgement":
                node.contact.note_acknowledged(what)
            else:
                self.carry_out(node, what)

    def carry_out(self, node, plan):
        wanted = {(key, attempt): stop for key, attempt, stop in plan}
        for launcher in node.launchers:
            if wanted.get((launcher.key, launcher.attempt), True):
                launcher.stop(node.boottime_s(), self.chance)
        known = {(one.key, one.attempt) for one in node.launchers}
        for (key, attempt), stop in wanted.items():
            if not stop and (key, attempt) not in known:
                launcher = Launcher(node, key, attempt)
                launcher.run(node.boottime_s(), self.chance)
                node.launchers.append(launcher)

    # The weather

    def befall(self):
        chance, node = self.chance, self.chance.choice(list(self.nodes.values()))
        match chance.randrange(12):
            case 0 | 1:
                node.is_up = False
                if (stream := self.streams.get(node.name)) is not None:
                    # At once, or after pings that nobody answers.
                    stream.breaks_at_s = self.now_s + chance.choice((0.0, 40.0))
            case 2 | 3 | 4:
                node.is_up = True
            case 5:
                node.kill_agent()
            case 6 | 7:
                if not node.is_agent:
                    node.start_agent(self.now_s)
            case 8:
                self.freeze(node)
            case 9:
                self.restart_leader()
            case 10:
                self.jump_s += chance.choice((-3600.0, -60.0, 60.0, 3600.0))
            case _:
                if (stream := self.streams.get(node.name)) is not None:
                    stream.breaks_at_s = self.now_s
                node.reboot(self.now_s)

    def freeze(self, node):
        """The agent is stopped; whoever talks to it finds out at once, or by pings, and what comes meanwhile waits."""
        node.frozen_until_s = self.now_s + self.chance.choice((5.0, 30.0, 38.0, 120.0))
        if (stream := self.streams.get(node.name)) is not None:
            stream.breaks_at_s = self.now_s + self.chance.choice((0.0, 40.0))

    def running(self, key):
        return [one for node in self.nodes.values() for one in node.launchers if one.key == key and one.is_alive]

    def step(self):
        self.now_s += 0.5
        for stream in self.streams.values():
            if stream.breaks_at_s is not None and self.now_s < stream.breaks_at_s - 40.0:
                stream.breaks_at_s = None
        self.lead()
        for node in self.nodes.values():
            self.live(node)
        for key in self.keys:
            found = self.running(key)
            assert len(found) <= 1, f"{key} runs on {[one.node.name for one in found]} at {self.now_s:g} s"


def play(seed, steps=1500):
    """Weather for a while, then none; returns how often work began again."""
    with tempfile.TemporaryDirectory() as folder:
        world = World(seed, Path(folder))
        for _ in range(steps):
            if world.chance.random() < 0.03:
                world.befall()
            world.step()
        for node in world.nodes.values():
            node.is_up, node.frozen_until_s = True, 0.0
            if not node.is_agent:
                node.start_agent(world.now_s)
        for _ in range(600):
            world.step()
            if all(len(world.running(key)) == 1 for key in world.keys):
                break
        ended = [key for key in world.keys if world.core.workload(key).phase.is_ended]
        assert all(ended or world.running(key) for key in world.keys), "nothing runs again"
        check_invariants(world.core.state)
        return sum(world.core.workload(key).attempt for key in world.keys)


@pytest.mark.parametrize("first", range(0, 40, 10))
def test_no_workload_runs_on_two_nodes_at_once(first):
    assert sum(play(seed) for seed in range(first, first + 10)) > 20
