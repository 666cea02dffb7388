"""Whatever happens in whatever order: no pod elsewhere than planned, none placed by two, gangs whole, nobody forgotten."""

import random
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.builders.kubernetes import count_gpus
from tests.gate_rig import SETTINGS, Api, Side, TwoControllers, check, settle

STEPS = st.lists(st.integers(0, 2**32 - 1), min_size=10, max_size=80)


class Story(TwoControllers):
    """A cluster with two controllers, and one random thing after another."""

    def __init__(self, *, has_thieves, settings=SETTINGS):
        self.api = Api()
        for index in range(4):
            self.api.node(f"n{index}")
        self.sides = [Side(self.api, settings), Side(self.api, settings)]
        self.epoch = 0
        self.at_s = 0.0
        self.has_thieves = has_thieves
        self.gangs = 0
        self.elect(0)

    def elect(self, index):
        self.epoch += 1
        for side in self.sides:
            side.lead(None)
        self.sides[index].lead(self.epoch)

    def step(self, seed):
        rng = random.Random(seed)
        self.at_s += rng.choice((0.0, 0.1, 2.0))
        acts = [
            (6, self.hear),
            (6, self.round),
            (6, self.write),
            (3, self.pod),
            (1, self.gang),
            (4, self.schedule),
            (1, self.delete),
            (1, self.end),
            (1, self.cordon),
            (1, self.kill),
            (1, self.change_leader),
            (2, self.tick),
            (1, self.touch),
            (3, self.devices),
        ]
        if self.has_thieves:
            acts.append((1, self.thief))
        rng.choices([act for _, act in acts], [weight for weight, _ in acts])[0](rng)

    def pod(self, rng):
        self.api.pod(gpus=rng.choice((1, 1, 2, 4, 8)), owner=f"rs{self.api.made}")

    def gang(self, rng):
        self.gangs += 1
        gpus, owner = rng.choice((1, 4)), f"job{self.gangs}"
        for _ in range(3):
            self.api.pod(gpus=gpus, group=owner, size=3, owner=owner)

    def end(self, rng):
        running = [name for name, pod in self.api.pods.items() if pod["spec"].get("nodeName")]
        if running:
            self.api.end(rng.choice(sorted(running)))

    def kill(self, rng):
        side = rng.choice(self.sides)
        side.begin()

    def devices(self, rng):
        """The agents of two nodes are their device plugins, and say what pods hold; now and then."""
        rng.choice(self.sides).hear_devices(rng.choice((["n0"], ["n1"], ["n0", "n1"])))

    def thief(self, rng):
        node = rng.choice(sorted(self.api.nodes))
        free = self.api.free(node)
        if free > 0:
            self.api.pod(gpus=rng.randint(1, free), node=node)


def room_for(api, gpus):
    nodes = [name for name, node in api.nodes.items() if not node["spec"].get("unschedulable")]
    return any(api.free(name) - kept_for_gangs(api, name) >= gpus for name in nodes)


def kept_for_gangs(api, node):
    """GPUs whose pods are done while others of their gangs are not: for those that the owners make next."""
    alive = {group_of(pod) for pod in api.pods.values() if pod["status"].get("phase") != "Succeeded"} - {""}
    done = [pod for pod in api.pods.values() if pod["status"].get("phase") == "Succeeded" and group_of(pod) in alive]
    return sum(count_gpus(pod) for pod in done if pod["spec"].get("nodeName") == node)


def group_of(pod):
    return pod["metadata"]["annotations"].get("eelgrid.io/group", "")


def ended_well(story):
    api = story.api
    for name in api.nodes:
        api.node(name)
    story.elect(0)
    settle(
        api, story.sides, story.at_s + 1.0, rounds=150, steered=["n0"]
    )  # n1 says no more, and is waited for no longer
    check(api)
    unbound = [pod for pod in api.pods.values() if not pod["spec"].get("nodeName")]
    waiting = [pod for pod in unbound if pod["spec"].get("schedulingGates") or pod["spec"].get("schedulerName")]
    stuck = [pod["metadata"]["name"] for pod in unbound if pod not in waiting]
    assert not stuck, f"pinned and never bound: {stuck}"
    for pod in waiting:
        asked = int(pod["spec"]["containers"][0]["resources"]["requests"]["nvidia.com/gpu"])
        assert group_of(pod) or not room_for(api, asked), f"{pod['metadata']['name']} waits for {asked} with room"
    bound = {}
    for pod in api.pods.values():
        group = group_of(pod)
        # A leader without a journal cannot tell the rest of a run, of which some are done, from the begin of the next.
        if group and pod["status"].get("phase") != "Succeeded":
            bound.setdefault(group, set()).add(bool(pod["spec"].get("nodeName")))
    torn = [group for group, found in bound.items() if len(found) > 1]
    assert not torn, f"gangs in parts: {torn}"


@settings(max_examples=60, deadline=None)
@given(STEPS)
def test_whatever_happens_pods_come_where_they_were_planned(seeds):
    story = Story(has_thieves=False)
    for seed in seeds:
        story.step(seed)
    ended_well(story)


class Bound(Story):
    """A cluster in which half of the pods and gangs name our scheduler, and the others are gated."""

    def __init__(self):
        super().__init__(has_thieves=False, settings=replace(SETTINGS, binds=True))

    def pod(self, rng):
        self.api.pod(gpus=rng.choice((1, 1, 2, 4, 8)), owner=f"rs{self.api.made}", own=rng.random() < 0.5)

    def gang(self, rng):
        self.gangs += 1
        gpus, owner, own = rng.choice((1, 4)), f"job{self.gangs}", rng.random() < 0.5
        for _ in range(3):
            self.api.pod(gpus=gpus, group=owner, size=3, owner=owner, own=own)


@settings(max_examples=60, deadline=None)
@given(STEPS)
def test_whatever_happens_pods_are_bound_where_they_were_planned(seeds):
    story = Bound()
    for seed in seeds:
        story.step(seed)
    ended_well(story)


def test_a_gang_whose_first_is_done_before_its_last_is_let_go_goes_on():
    story = Story(has_thieves=False)
    for seed in (0, 0, 1, 0, 269, 3797, 138153, 2770, 2214652, 1192):
        story.step(seed)
    pods = story.api.pods.values()
    assert sorted(pod["status"].get("phase") for pod in pods) == ["Pending", "Pending", "Succeeded"]
    ended_well(story)
    assert all(pod["spec"].get("nodeName") for pod in pods)


def test_the_place_of_a_gangs_member_that_is_done_is_kept_for_the_next_that_its_owner_makes():
    story = Story(has_thieves=False)
    api = story.api
    for name in ("n1", "n2", "n3"):
        api.node(name, cordoned=True)
    first, second = (api.pod(gpus=4, group="job", size=2, owner="job") for _ in range(2))
    at_s = settle(api, story.sides, 0.0, rounds=3)
    api.end(first)
    lone = api.pod(gpus=4)
    at_s = settle(api, story.sides, at_s, rounds=5)
    assert not api.pods[lone]["spec"].get("nodeName")
    third = api.pod(gpus=4, group="job", size=2, owner="job")
    at_s = settle(api, story.sides, at_s, rounds=5)
    assert api.pods[third]["spec"]["nodeName"] == "n0"
    for name in (second, third):
        api.end(name)
    settle(api, story.sides, at_s, rounds=5)
    assert api.pods[lone]["spec"]["nodeName"] == "n0"


ZONE, HOST = "topology.kubernetes.io/zone", "kubernetes.io/hostname"
_WEB = {"matchLabels": {"app": "web"}}


class Related(Story):
    """A cluster of two zones, in which half of the pods have rules about each other."""

    def __init__(self):
        super().__init__(has_thieves=False)
        for index, name in enumerate(sorted(self.api.nodes)):
            self.api.node(name, zone=f"z{index % 2}")

    def pod(self, rng):
        far = {"topologyKey": HOST, "labelSelector": _WEB}
        near = {"topologyKey": ZONE, "labelSelector": {"matchLabels": {"app": "near"}}}
        required = "requiredDuringSchedulingIgnoredDuringExecution"
        spread = [{"topologyKey": ZONE, "maxSkew": 1, "labelSelector": {"matchLabels": {"app": "even"}}}]
        rules = rng.choice(
            (
                {},
                {"app": "web", "affinity": {"podAntiAffinity": {required: [far]}}},
                {"app": "near", "affinity": {"podAffinity": {required: [near]}}},
                {"app": "even", "spread": spread},
                {"app": "even", "spread": [{**spread[0], "nodeAffinityPolicy": "Ignore"}]},
            )
        )
        self.api.pod(gpus=rng.choice((1, 2, 4)), owner=f"rs{self.api.made}", **rules)


def broken(api):
    """Pods that stand although a rule between them says otherwise."""
    standing = [
        pod for pod in api.pods.values() if pod["spec"].get("nodeName") and pod["status"]["phase"] != "Succeeded"
    ]
    webs = [pod["spec"]["nodeName"] for pod in standing if pod["metadata"].get("labels", {}).get("app") == "web"]
    return len(webs) - len(set(webs))


@settings(max_examples=80, deadline=None)
@given(STEPS)
def test_whatever_happens_pods_with_rules_about_each_other_come_where_these_allow(seeds):
    story = Related()
    for seed in seeds:
        story.step(seed)
        assert not broken(story.api)
    api = story.api
    for name in api.nodes:
        api.node(name)
    story.elect(0)
    settle(api, story.sides, story.at_s + 1.0, rounds=150, steered=["n0"])
    check(api)
    assert not broken(api)
    free = [pod for pod in api.pods.values() if not pod["spec"].get("nodeName")]
    stuck = [pod["metadata"]["name"] for pod in free if not pod["spec"].get("schedulingGates")]
    assert not stuck, f"pinned and never bound: {stuck}"
    for pod in free:
        asked = int(pod["spec"]["containers"][0]["resources"]["requests"]["nvidia.com/gpu"])
        room = {name: api.free(name) - kept_for_gangs(api, name) for name in api.nodes}
        fitting = [name for name in room if room[name] >= asked and not api.why_not(pod, name)]
        assert group_of(pod) or not fitting, f"{pod['metadata']['name']} waits with room on {fitting}"


@settings(max_examples=60, deadline=None)
@given(STEPS)
def test_whoever_takes_a_place_it_is_given_up_and_another_is_found(seeds):
    story = Story(has_thieves=True)
    for seed in seeds:
        story.step(seed)
    ended_well(story)
