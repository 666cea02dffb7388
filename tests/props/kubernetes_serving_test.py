"""Whatever happens to a service in whatever order: in the end its places are where its pods are, and as many as said."""

import contextlib
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.builders.kubernetes import count_gpus
from tests.gate_rig import TwoControllers, check
from tests.serving_rig import ServedApi, ServingSide, inference_service, play, ready
from tests.state_invariants import check_invariants

from eelgrid_protos.faults import FailedPrecondition

STEPS = st.lists(st.integers(0, 2**32 - 1), min_size=10, max_size=80)
LEAST, MOST = 1, 6


class Story(TwoControllers):
    """A service, two controllers, and one random thing after another."""

    def __init__(self, mode):
        self.api = ServedApi(replicas=2, surge=1)
        for index in range(4):
            self.api.node(f"n{index}")
        self.found = inference_service(mode=mode, replicas={"least": LEAST, "most": MOST})
        self.sides = [ServingSide(self.api), ServingSide(self.api)]
        for side in self.sides:
            side.serve(self.found, wanted=2, surge=1)
        self.epoch = 0
        self.at_s = 0.0
        self.elect(0)

    def elect(self, index):
        self.epoch += 1
        for side in self.sides:
            side.lead(None)
        chosen = self.sides[index]
        # What was agreed stands in the object's status, which whoever leads reads.
        chosen.scaling.agreed = next((one.remembered for one in self.sides if hasattr(one, "remembered")), None)
        chosen.lead(self.epoch)

    @property
    def leading(self):
        return next(side for side in self.sides if side.epoch is not None)

    def step(self, seed):
        rng = random.Random(seed)
        self.at_s += rng.choice((0.0, 0.1, 2.0, 40.0))
        acts = [
            (8, self.hear), (8, self.round), (6, self.write), (4, self.schedule), (6, self.control), (6, self.look),
            (4, self.steer), (1, self.scale), (1, self.roll), (1, self.delete), (1, self.cordon), (1, self.kill),
            (1, self.change_leader), (4, self.tick), (1, self.thief), (3, self.readied), (1, self.touch),
        ]  # fmt: skip
        rng.choices([act for _, act in acts], [weight for weight, _ in acts])[0](rng)

    def control(self, _):
        self.api.control()

    def look(self, _):
        self.leading.look(self.found, self.at_s)

    def steer(self, rng):
        if self.leading.workload is not None and not self.leading.scaling.advice:
            self.leading.steer(rng.randint(LEAST, MOST))

    def scale(self, rng):
        self.api.scale(rng.randint(1, MOST + 2))

    def roll(self, rng):
        self.api.roll(gpus=rng.choice((1, 1, 2)))

    def kill(self, rng):
        side = rng.choice(self.sides)
        side.begin()
        side.serve(self.found, wanted=self.api.replicas, surge=1)

    def thief(self, rng):
        node = rng.choice(sorted(self.api.nodes))
        if self.api.free(node) > 4:
            self.api.pod(gpus=rng.randint(1, 2), node=node)

    def readied(self, _):
        for name in [name for name, pod in self.api.pods.items() if pod["spec"].get("nodeName")]:
            ready(self.api, name)


def ended_well(story):
    api = story.api
    for name in api.nodes:
        api.node(name)
    story.elect(0)
    play(api, story.sides[:1], story.found, story.at_s + 1.0, rounds=400)
    check(api)
    side = story.leading
    check_invariants(side.core.state)
    pods = api.pods_of()
    assert [pod["metadata"]["name"] for pod in pods if not pod["spec"].get("nodeName")] == []
    assert len(pods) == api.replicas
    assert len(api.pods_of(api.revision)) == api.replicas, "a rollover that does not end"
    places = sorted(one.node_name for one in side.workload.placements)
    assert places == sorted(pod["spec"]["nodeName"] for pod in pods)
    held = sum(record.others.gpu_count for record in side.core.state.nodes.values())
    assert held == sum(count_gpus(pod) for pod in api.pods.values() if pod not in pods), "counted twice, or not at all"
    if story.found["spec"]["mode"] == "Enforce":
        assert LEAST <= api.replicas <= MOST


@pytest.mark.parametrize("mode", ["Enforce", "Recommend"])
@settings(max_examples=12, deadline=None)
@given(seeds=STEPS)
def test_in_the_end_places_are_where_pods_are(mode, seeds):
    story = Story(mode)
    for seed in seeds:
        with contextlib.suppress(FailedPrecondition):  # the steering is refused while nothing runs
            story.step(seed)
    ended_well(story)
