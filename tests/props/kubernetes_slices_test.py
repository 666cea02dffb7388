"""Whatever happens in whatever order: no slice is promised twice, no node overfilled, nobody forgotten where there is room."""

import random
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.builders.kubernetes import build_node_model, build_pod_model

from eelgrid_controller.engines.kubernetes.model.pod_group import PodKey
from eelgrid_controller.engines.kubernetes.pods.gate_events import UngatePod, WriteFailure
from eelgrid_controller.engines.kubernetes.pods.intent import parse_slice_intent, requested_slices
from eelgrid_controller.engines.kubernetes.reconcilers.mig_slices import (
    OfferedMigSlice,
    SliceOffer,
    SlicePod,
    SlicePodScheduler,
    select_fullest,
)

SMALL = "nvidia.com/mig-1g.10gb"
CPU_MILLI = 12_000  # of a node; each pod asks for 4 cores
SLICES = {
    name: [OfferedMigSlice(f"{name}-{gpu}-{start}", gpu, start, 1) for gpu in range(2) for start in range(2)]
    for name in ("n1", "n2")
}
STEPS = st.lists(st.integers(0, 2**32 - 1), min_size=5, max_size=60)


class Story:
    """Two nodes, one of whose plugins follows the plan; pods, writes and words that come late, twice or never."""

    def __init__(self):
        self.machine = SlicePodScheduler(unbound_s=30.0, flight_s=5.0)
        self.nodes = {
            name: build_node_model(name, allocatable={SMALL: str(len(some))}) for name, some in SLICES.items()
        }
        self.real = {}  # uid -> what the API server has
        self.known = {}  # uid -> what the controller has heard
        self.holds = {}  # uid -> slices, by the kubelet
        self.words = {name: frozenset() for name in SLICES}  # as told last
        self.under_way = []
        self.at_s = 0.0
        self.made = 0

    def step(self, seed):
        rng = random.Random(seed)
        self.at_s += rng.choice((0.0, 0.5, 3.0))
        acts = [
            self.look,
            self.look,
            self.add,
            self.add,
            self.write,
            self.write,
            self.hear,
            self.bind,
            self.say,
            self.end,
        ]
        rng.choice(acts)(rng)
        self.check()

    def add(self, rng):
        self.made += 1
        found = build_pod_model(gpus=0, requests={SMALL: str(rng.choice((1, 1, 2)))}, name=f"p{self.made}")
        self.real[found.uid] = replace(found, resource_version="1")

    def hear(self, _):
        self.known = {
            uid: SlicePod(
                one, "" if one.gates else one.labels.get("to", ""), parse_slice_intent(one, {}) if one.gates else None
            )
            for uid, one in self.real.items()
        }

    def offers(self):
        for name, some in SLICES.items():
            on = [one.pod for one in self.known.values() if one.target_node == name]
            taken = sum(count for one in on for _, count in requested_slices(one))
            used = {}
            for one in some:
                if one.uuid in self.words[name]:
                    used[one.gpu_index] = used.get(one.gpu_index, 0) + one.size
            free = {SMALL: tuple(one for one in some if one.uuid not in self.words[name])}
            cpu_milli = CPU_MILLI - sum(one.requested.cpu_milli for one in on)
            yield SliceOffer(name, cpu_milli, 2**60, {SMALL: len(some) - taken}, free, used)

    def look(self, _):
        told = self.machine.schedule_pods(self.known, self.nodes, self.offers(), 1, self.at_s)
        self.under_way += [one for one in told if isinstance(one, UngatePod)]

    def write(self, rng):
        if not self.under_way:
            return
        one = self.under_way.pop(rng.randrange(len(self.under_way)))
        found = self.real.get(one.uid)
        is_done = found is not None and found.resource_version == one.version and rng.random() < 0.7
        if is_done:
            version = str(int(one.version) + 1)
            self.real[one.uid] = replace(found, gates=(), labels={"to": one.node_name}, resource_version=version)
        if not is_done or rng.random() < 0.3:
            self.machine.on_failure(one.uid, WriteFailure.BUSY, self.at_s)

    def bind(self, _):
        for uid, one in list(self.real.items()):
            name = one.labels.get("to", "")
            if not name or one.node_name:
                continue
            self.real[uid] = replace(one, node_name=name, resource_version="9")
            held = frozenset().union(*(self.holds.values()))
            free = [some for some in SLICES[name] if some.uuid not in held]
            used = {}
            for some in SLICES[name]:
                if some.uuid in held:
                    used[some.gpu_index] = used.get(some.gpu_index, 0) + some.size
            ((_, count),) = requested_slices(one)
            chosen = select_fullest(free, used, count)
            assert len(chosen) == count, "the kubelet has none left"
            self.holds[uid] = frozenset(some.uuid for some in chosen)

    def say(self, rng, names=None):
        for name in names or [rng.choice(sorted(SLICES))]:
            there = {self.real[uid].name: some for uid, some in self.holds.items() if self.real[uid].node_name == name}
            self.words[name] = frozenset().union(*there.values())
            self.machine.on_devices_reported(
                name, {PodKey("ml", key): tuple(some) for key, some in there.items()}, steers=name == "n1"
            )

    def end(self, rng):
        if self.real:
            uid = rng.choice(sorted(self.real))
            del self.real[uid]
            self.holds.pop(uid, None)

    def check(self):
        for name, some in SLICES.items():
            on = [one for one in self.real.values() if name in (one.node_name, one.labels.get("to"))]
            assert sum(count for one in on for _, count in requested_slices(one)) <= len(some), (
                "a slice is promised twice"
            )
            assert sum(one.requested.cpu_milli for one in on) <= CPU_MILLI, "more CPU than there is"


@settings(max_examples=80, deadline=None)
@given(STEPS)
def test_slices_are_promised_once_and_nobody_is_forgotten(seeds):
    story, rng = Story(), random.Random(0)
    for seed in seeds:
        story.step(seed)
    while story.under_way:
        story.write(rng)
    for _ in range(60):
        story.at_s += 1.0
        story.hear(rng)
        story.say(rng, ["n1", "n2"])
        story.look(rng)
        for one in story.under_way:
            found = story.real[one.uid]
            assert found.resource_version == one.version
            story.real[one.uid] = replace(found, gates=(), labels={"to": one.node_name}, resource_version="2")
        story.under_way = []
        story.bind(rng)
        story.check()
    for one in story.real.values():
        if one.gates:
            ((_, count),) = requested_slices(one)
            for name, some in SLICES.items():
                on = [it for it in story.real.values() if it.node_name == name]
                free = len(some) - sum(number for it in on for _, number in requested_slices(it))
                room = CPU_MILLI - sum(it.requested.cpu_milli for it in on)
                assert free < count or room < one.requested.cpu_milli, (
                    f"{one.name} waits for {count} with room on {name}"
                )
