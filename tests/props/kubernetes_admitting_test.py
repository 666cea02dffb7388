"""Policy and webhook, both as the chart has them, decide alike on every pod."""

import functools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests import admission_rig as rig
from tests.deploy_rig import needs_helm, objects_of

pytestmark = needs_helm
GATE, TAINT = "eelgrid.io/placement", "eelgrid.io/managed"


@functools.cache
def policy():
    return objects_of("default", "1.36.0")


@functools.cache
def webhook():
    return objects_of("default", "1.30.0")


WAYS = {
    "policy": lambda pod: rig.by_policy(policy(), pod),
    "webhook": lambda pod: rig.by_webhook(webhook(), pod),
    "server alone": lambda pod: rig.by_webhook(webhook(), pod, has_conditions=False),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", rig.GATED)
def test_a_pod_that_opted_in_gets_the_gate_once(way, name):
    made = WAYS[way](rig.GATED[name])["spec"]
    assert [gate["name"] for gate in made["schedulingGates"]].count(GATE) == 1
    assert [one.get("key") for one in made["tolerations"]].count(TAINT) == 1
    again = WAYS[way]({**rig.GATED[name], "spec": made})["spec"]
    assert again == made, "a pod may be asked about twice"


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", rig.UNTOUCHED)
def test_every_other_pod_is_left_alone(way, name):
    assert WAYS[way](rig.UNTOUCHED[name]) == rig.UNTOUCHED[name]


def sometimes(strategy, key):
    return st.one_of(st.just({}), strategy.map(lambda value: {key: value}))


def several(*parts):
    return st.tuples(*parts).map(lambda found: {key: value for part in found for key, value in part.items()})


AMOUNTS = st.dictionaries(
    st.sampled_from(["cpu", "nvidia.com/gpu", "nvidia.com/gpu.shared", "nvidia.com/mig-3g.40gb", "amd.com/gpu", "a/b"]),
    st.just("1"),
    max_size=2,
)
CONTAINERS = st.lists(
    sometimes(several(sometimes(AMOUNTS, "limits"), sometimes(AMOUNTS, "requests")), "resources"), max_size=2
)
OWNERS = st.lists(
    st.sampled_from(["DaemonSet", "Node", "ReplicaSet", "Job"]).map(lambda kind: {"kind": kind}), max_size=2
)
METADATA = several(
    sometimes(st.sampled_from([{}, {TAINT: "true"}, {TAINT: "false"}, {TAINT: "yes"}, {"a": "b"}]), "labels"),
    sometimes(OWNERS, "ownerReferences"),
    sometimes(
        st.sampled_from([{}, {"kubernetes.io/config.mirror": "x"}, {"kubernetes.io/config.source": "api"}, {"a": "b"}]),
        "annotations",
    ),
    st.sampled_from([rig.TRIAL, rig.OPTED_IN, "kube-system", "eelgrid"]).map(lambda name: {"namespace": name}),
)
SPEC = several(
    CONTAINERS.map(lambda found: {"containers": [{"name": "c"}, *found]}),
    sometimes(CONTAINERS, "initContainers"),
    sometimes(st.sampled_from(["", "n1"]), "nodeName"),
    sometimes(st.sampled_from([[], [{"name": "g"}]]), "resourceClaims"),
    sometimes(
        st.lists(st.sampled_from([{"name": GATE}, {"name": "a/b"}]), max_size=2, unique_by=str), "schedulingGates"
    ),
    sometimes(
        st.lists(
            st.sampled_from([{"key": TAINT, "operator": "Exists"}, {"operator": "Exists"}, {"key": "a"}]), max_size=2
        ),
        "tolerations",
    ),
)


@settings(max_examples=400, deadline=None)
@given(metadata=METADATA, spec=SPEC)
def test_all_ways_make_the_same_of_any_pod(metadata, spec):
    pod = {"metadata": metadata, "spec": spec}
    by_policy = WAYS["policy"](pod)
    assert _plain(WAYS["webhook"](pod)) == _plain(by_policy)
    assert _plain(WAYS["server alone"](pod)) == _plain(by_policy)


def _plain(pod):
    """Empty lists are none to an API server."""
    return {**pod, "spec": {key: value for key, value in pod["spec"].items() if value != []}}
