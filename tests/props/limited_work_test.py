"""The nodes with work under a limit are those that a look at all work finds, whatever happened in between."""

import contextlib
import json

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.builders.cluster import build_node, build_request

from eelgrid_controller.core.core import Core
from eelgrid_controller.server.metric_collectors import PowerLimitedNodes
from eelgrid_controller.state.cluster_state import ClusterState
from eelgrid_protos import catalogue
from eelgrid_protos.faults import InvalidArgument
from eelgrid_protos.messages import WorkloadPhase

KEYS = st.integers(0, 4)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), KEYS, st.integers(1, 3)),
        st.tuples(st.just("limit"), KEYS, st.sampled_from([None, 100.0, 150.0])),
        st.tuples(st.just("scale"), KEYS, st.integers(1, 4)),
        st.tuples(st.just("cancel"), KEYS, st.none()),
        st.tuples(st.just("lose"), st.integers(0, 2), st.none()),
        st.tuples(st.just("join"), st.integers(0, 2), st.none()),
        st.tuples(st.just("restart"), st.none(), st.none()),
        st.tuples(st.just("look"), st.none(), st.none()),
    ),
    max_size=40,
)


def walked(state):
    """By all that stands on each node."""
    return {
        name
        for name, record in state.nodes.items()
        if any(state.workloads[one.workload_id].power_limit_w is not None for one in record.assignments.values())
    }


class Cluster:
    """A core and what it says to whoever follows; a restart has another core with the same state."""

    def __init__(self):
        self.core = Core(ClusterState(ended_most=2), catalogue.load_catalogue())
        self.follower = PowerLimitedNodes()
        self.now_ns = 0
        for name in "abc":
            self.told(self.core.register_node(build_node(name, gpus=2, model="G2"), now_ns=self.tick()))

    def tick(self):
        self.now_ns += 1
        return self.now_ns

    def told(self, step):
        self.follower.on_commit(step.events)

    def do(self, what, which, value):
        core, key = self.core, f"w{which}"
        workload = core.state.workloads.get(key)
        runs = workload is not None and workload.phase is WorkloadPhase.PLACED
        match what:
            case "submit":
                if workload is None:
                    with contextlib.suppress(InvalidArgument):  # nodes that are lost leave too little
                        self.told(core.submit(build_request(key=key, gpus=1, replicas=value), now_ns=self.tick()))
            case "cancel":
                if workload is not None:
                    self.told(core.cancel(key, now_ns=self.tick()))
            case "limit":
                if runs:
                    self.told(core.set_limit(key, value, now_ns=self.tick()))
            case "scale":
                if runs:
                    self.told(core.scale(key, value, now_ns=self.tick()))
            case "lose":
                self.told(core.mark_node_lost("abc"[which], now_ns=self.tick()))
            case "join":
                self.told(core.register_node(build_node("abc"[which], gpus=2, model="G2"), now_ns=self.tick()))
            case "restart":
                plain = json.loads(json.dumps(core.state.dump()))
                self.core = Core(ClusterState.load(plain), catalogue.load_catalogue())
            case _:
                self.look()

    def look(self):
        assert self.follower.nodes(self.core) == walked(self.core.state)


@given(STEPS)
@settings(deadline=None, max_examples=60)
def test_it_is_what_a_look_at_all_work_finds(steps):
    cluster = Cluster()
    cluster.look()
    for step in steps:
        cluster.do(*step)
    cluster.look()


def test_a_limit_is_seen_and_goes_with_its_work():
    cluster = Cluster()
    for step in (("submit", 0, 1), ("limit", 0, 100.0)):
        cluster.do(*step)
    assert len(cluster.follower.nodes(cluster.core)) == 1
    cluster.do("cancel", 0, None)
    assert cluster.follower.nodes(cluster.core) == frozenset()
