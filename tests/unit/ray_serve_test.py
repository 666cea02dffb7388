"""Deployments of Serve: which number each is given by one look, and why one is left alone."""

import json
from dataclasses import replace

import pytest

from eelgrid.ray import build_serve_spec
from eelgrid_controller.engines.ray.answers import RayHolding, RayNode, RayUnreadable
from eelgrid_controller.engines.ray.serve import (
    DeploymentKey,
    LeaveServeDeployment,
    MetricPages,
    ScaleServeDeployment,
    ServeDeployment,
    claim_replicas,
    count_running,
    decide_scaling,
    list_replica_moves,
    parse_applications,
)
from eelgrid_protos.messages import Placement, Workload, WorkloadPhase

KEY = DeploymentKey("web", "Echo")
DEPLOYED = ServeDeployment(KEY, target_replicas=1, running=1, is_scaled_by_serve=False, is_open=True)
NAMES = {"id-n0": "n0", "id-n1": "n1"}


def build_workload(*nodes, key="w", submitted_ns=1, phase=WorkloadPhase.PLACED):
    places = tuple(Placement(replica=at, node_name=name, gpu_uuids=("u",)) for at, name in enumerate(nodes))
    spec = build_serve_spec("web", "Echo", gpus=1, replicas=max(1, len(nodes)))
    return Workload(workload_id=key, spec=spec, phase=phase, submitted_ns=submitted_ns, placements=places)


def build_replica(node_id, number, name="SERVE_REPLICA::web#Echo#"):
    return RayHolding(node_id=node_id, holder=f"a{number}", actor_name=f"{name}{number}", gpus=1.0, cpus=1.0)


def decide(deployment, *workloads):
    deployments = {} if deployment is None else {KEY: deployment}
    return decide_scaling(deployments, {one.workload_id: one for one in workloads})


def test_a_deployment_is_given_as_many_replicas_as_the_core_has_places():
    assert decide(DEPLOYED, build_workload("n0", "n0", "n1")) == [ScaleServeDeployment("w", KEY, 3)]
    assert decide(replace(DEPLOYED, target_replicas=3), build_workload("n0", "n0", "n1")) == []
    assert decide(DEPLOYED, build_workload(phase=WorkloadPhase.PENDING)) == []


@pytest.mark.parametrize(
    ("deployment", "words"),
    [
        (None, "deploy it, or cancel"),
        (replace(DEPLOYED, is_scaled_by_serve=True, is_open=False), "take autoscaling_config out"),
        (replace(DEPLOYED, is_open=False), "set external_scaler_enabled: true"),
    ],
)
def test_a_deployment_that_may_not_be_scaled_is_left_with_the_reason_and_the_remedy(deployment, words):
    (found,) = decide(deployment, build_workload("n0", "n1"))
    assert isinstance(found, LeaveServeDeployment)
    assert words in found.reason


def test_of_two_workloads_for_one_deployment_the_older_scales_it():
    found = decide(DEPLOYED, build_workload("n0", "n1"), build_workload("n0", key="a", submitted_ns=2))
    assert found[0] == ScaleServeDeployment("w", KEY, 2)
    assert "stands for web/Echo already" in found[1].reason


def test_replicas_are_the_workloads_that_stands_for_their_deployment():
    mine, other = build_replica("id-n0", 1), build_replica("id-n0", 2, "SERVE_REPLICA::web#Other#")
    workloads = {"w": build_workload("n0")}
    assert claim_replicas([mine, other, replace(mine, holder="x", actor_name="Echo")], workloads) == {"a1": "w"}


def test_places_follow_replicas_once_all_are_there():
    replicas = [replace(build_replica("id-n1", number), workload_id="w") for number in range(2)]
    ((workload, adoption),) = list_replica_moves(replicas, NAMES, {"w": build_workload("n0", "n1")})
    assert (workload.workload_id, adoption.released, adoption.first) == ("w", (0,), 2)
    assert [one.node_name for one in adoption.standing] == ["n1"]
    assert list_replica_moves(replicas[:1], NAMES, {"w": build_workload("n0", "n1")}) == []
    assert list_replica_moves(replicas, NAMES, {"w": build_workload("n1", "n1")}) == []


def test_metrics_are_one_page_for_each_node_with_replicas_or_a_router():
    nodes = [
        RayNode(node_id=f"id-{name}", name=name, address=f"10.0.0.{at}", metrics_port=80)
        for at, name in enumerate(("head", "n0", "n1"))
    ]
    pages, routers = MetricPages(), frozenset({"id-head"})
    found = pages.list_pages(nodes, routers, {"w": build_workload("n0", "n0")})
    assert found == {"w": {0: "http://10.0.0.0:80/metrics", 1: "http://10.0.0.1:80/metrics"}}
    # A page keeps its number, whoever comes and goes.
    found = pages.list_pages(nodes[1:], routers, {"w": build_workload("n1", "n0")})
    assert found == {"w": {1: "http://10.0.0.1:80/metrics", 2: "http://10.0.0.2:80/metrics"}}
    nowhere = [RayNode(node_id="i", name="n0")]
    assert pages.list_pages(nowhere, routers, {"w": build_workload("n0")}) == {"w": {}}
    assert pages.list_pages(nodes, routers, {"w": build_workload(phase=WorkloadPhase.PENDING)}) == {"w": {}}


def test_replicas_serve_when_serve_runs_them_whatever_is_placed():
    workload = build_workload("n0", "n0", "n1")
    assert count_running(workload, {KEY: replace(DEPLOYED, target_replicas=3)}) == 1
    assert count_running(workload, {}) == 0


def test_applications_are_read_and_what_is_none_is_refused():
    config = {"external_scaler_enabled": True}
    one = {
        "target_num_replicas": 2,
        "deployment_config": {"autoscaling_config": None},
        "replicas": [{"state": "RUNNING"}],
    }
    application = {"deployed_app_config": config, "deployments": {"Echo": one, "Broken": {"target_num_replicas": "?"}}}
    text = json.dumps({"applications": {"web": application, "odd": None}, "proxies": {"id-n0": {}}}).encode()
    found = parse_applications(text)
    assert found.deployments == {KEY: replace(DEPLOYED, target_replicas=2)}
    assert found.routers == {"id-n0"}
    assert not parse_applications(b'{"applications": {}, "proxies": null}').routers
    with pytest.raises(RayUnreadable, match="no applications"):
        parse_applications(b"[]")
