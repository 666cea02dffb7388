"""Takeovers in any order of arrival, and a checker that reads pods, nodes and bindings alone.

Controllers are killed, frozen with writes under way and woken, and begin with journals that are
empty, older, or their own; agents connect when they like; lists, watches and answers come late.
The checker is that of `bench.kubernetes`, which knows no core and no gate.
"""

import json
import random

from bench.kubernetes.checker import gpus_of, judge

from eelgrid_controller.engines.kubernetes.pods import gate_events as told
from eelgrid_controller.state.cluster_state import ClusterState
from tests.gate_rig import Api, Side, settle
from tests.state_invariants import check_invariants

__all__ = ["Takeovers", "problems"]

GPUS = 4


def problems(api):
    """What is given twice at this moment."""
    found = judge(api.pods.values(), api.nodes.values())
    return [*found.twice, *found.beyond, *found.astray]


class Takeovers:
    """Two controllers, one API server, and one random thing after another."""

    def __init__(self, *, has_agents):
        self.api = Api()
        self.has_agents = has_agents
        for index in range(3):
            self.api.node(f"n{index}", gpus=GPUS)
        self.api.pod(node="n0")  # of others, there before anybody
        self.sides = [Side(self.api), Side(self.api)]
        self.frozen = set()
        self.dumps = [self.sides[0].core.state.dump()]
        self.epoch = 0
        self.at_s = 0.0
        self.elect(0)

    def elect(self, index):
        self.epoch += 1
        for side in self.sides:
            if side.epoch is not None:
                # A frozen one hears of nothing; its writes are under way, and its next look at the clock comes late.
                if side in self.frozen:
                    side.epoch = None
                else:
                    side.lead(None)
        self.sides[index].take_over(self.epoch)

    def step(self, seed):
        rng = random.Random(seed)
        self.at_s += rng.choice((0.0, 0.1, 1.0))
        acts = [
            (4, self.burst),
            (6, self.hear),
            (8, self.round),
            (8, self.send),
            (8, self.arrive),
            (4, self.schedule),
            (1, self.end),
            (1, self.delete),
            (2, self.tick),
            (2, self.succeed),
            (1, self.touch),
            (1, self.keep),
        ]
        if self.has_agents:
            acts += [(3, self.agent), (1, self.correct)]
        rng.choices([act for _, act in acts], [weight for weight, _ in acts])[0](rng)
        found = problems(self.api)
        assert not found, found

    def awake(self, rng):
        return rng.choice([side for side in self.sides if side not in self.frozen])

    def burst(self, rng):
        for _ in range(rng.randint(1, 4)):
            self.api.pod(gpus=rng.choice((1, 1, 1, 2)))

    def hear(self, rng):
        self.awake(rng).hear(rng.randint(1, 8))

    def round(self, rng):
        self.awake(rng).round(self.at_s)

    def tick(self, rng):
        side = self.awake(rng)
        side.events.append(told.GateTicked())
        side.round(self.at_s)

    def send(self, rng):
        side = self.awake(rng)
        for _ in range(min(len(side.under_way), rng.randint(1, 4))):
            side.send(rng.randrange(len(side.under_way)))

    def arrive(self, rng):
        for _ in range(min(len(self.api.in_flight), rng.randint(1, 4))):
            self.api.arrive(rng.randrange(len(self.api.in_flight)), is_answered=rng.random() < 0.8)

    def schedule(self, _):
        self.api.schedule()

    def end(self, rng):
        running = sorted(name for name, pod in self.api.pods.items() if pod["spec"].get("nodeName"))
        if running:
            self.api.end(rng.choice(running))

    def delete(self, rng):
        if self.api.pods:
            self.api.remove(rng.choice(sorted(self.api.pods)))

    def touch(self, rng):
        """Somebody else changes a pod."""
        if self.api.pods:
            self.api.put("pod", self.api.pods[rng.choice(sorted(self.api.pods))])

    def keep(self, rng):
        """A copy of a journal is left behind."""
        self.dumps.append(json.loads(json.dumps(rng.choice(self.sides).core.state.dump())))

    def succeed(self, rng):
        """The leader is ended in one of three ways, and another leads with one of three journals."""
        index = rng.randrange(2)
        old, new = self.sides[1 - index], index
        how, journal = rng.choice(("kill", "freeze", "stop")), rng.choice(("same", "empty", "older"))
        if journal != "same" or self.sides[new] in self.frozen:
            before = self.sides[new]
            state = before.core.state
            if journal != "same":
                state = ClusterState() if journal == "empty" else ClusterState.load(rng.choice(self.dumps))
            self.frozen.discard(before)
            self.api.watchers.remove(before)
            self.api.in_flight = [one for one in self.api.in_flight if one[0] is not before]
            self.sides[new] = Side(self.api, state=state)
        if how == "freeze":
            self.frozen.add(old)
        elif old in self.frozen:
            # It wakes: what it was about to send is on its way, whatever it hears then.
            self.frozen.discard(old)
            old.lead(None)
        elif how == "kill":
            # What it had sent may arrive yet, and answers nobody.
            sent = [one for one in self.api.in_flight if one[0] is old]
            old.begin()
            self.api.in_flight += sent
        self.elect(new)

    def agent(self, rng):
        """The agent of a node reaches a controller."""
        self.awake(rng).agent(rng.choice(sorted(self.api.nodes)), gpus=GPUS)

    def correct(self, rng):
        """A kubelet gave a pod another device, which was free, and its node says so."""
        side = self.awake(rng)
        for name, record in sorted(side.core.state.nodes.items()):
            if side.epoch is None or not record.inventory.agent_version or name not in side.met:
                continue
            planned = side.gate.others.planned
            free = [gpu.index for gpu in record.inventory.gpus if gpu.uuid not in record.gpu_milli]
            free = [index for index in free if planned.find_rival(name, (index,), "") is None]
            bound = {f"pod-{uid}": uid for uid in self.api.bound}
            ours = [key for key, one in record.assignments.items() if len(one.gpu_uuids) == 1 and key[0] in bound]
            if free and ours:
                side.corrected(name, rng.choice(ours), (rng.choice(free),))
                return

    def ended_well(self):
        """No more trouble: every pod that fits is bound, and nothing is twice."""
        for side in self.frozen:
            side.lead(None)
        self.frozen.clear()
        self.elect(0)
        while self.api.in_flight:
            self.api.arrive()
        at_s = settle(self.api, self.sides, self.at_s + 1.0, rounds=70)
        if self.has_agents:
            for name in self.api.nodes:
                self.sides[0].agent(name, gpus=GPUS)
        settle(self.api, self.sides, at_s, rounds=60)
        pods = self.api.pods.values()
        found = problems(self.api)
        assert not found, found
        stuck = [
            pod["metadata"]["name"]
            for pod in pods
            if not pod["spec"].get("schedulingGates") and not pod["spec"].get("nodeName")
        ]
        assert not stuck, f"pinned and never bound: {stuck}"
        for pod in pods:
            if pod["spec"].get("schedulingGates"):
                name = pod["metadata"]["name"]
                room = max(self.api.free(node) for node in self.api.nodes)
                assert room < gpus_of(pod), f"{name} waits for {gpus_of(pod)} with room for {room}"
        check_invariants(self.sides[0].core.state)
