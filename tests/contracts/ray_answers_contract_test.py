"""Ray's answers as Ray 2.60 writes them, recorded from a real cluster: who holds what, and what is refused or left out."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from eelgrid_controller.engines.ray.answers import ELEMENTS_MOST, GpuSlot, RayAnswers, RayUnreadable, parse_look

FOLDER = Path(__file__).parent / "ray_answers"


def read(name):
    return (FOLDER / f"{name}.json").read_bytes()


def recorded():
    """What a look has read: a group of two bundles with an actor in the first, half a GPU, a task, and a group that waits."""
    ids = {node["labels"]["eelgrid.io/node"]: node["node_id"] for node in listed("nodes")}
    details = {ids[name]: read(f"node-{name}") for name in ("head", "n0", "n1")}
    lists = {name: read(name) for name in ("nodes", "actors", "tasks", "groups", "jobs")}
    return RayAnswers(**lists, details=details)


def listed(name):
    return json.loads(read(name))["data"]["result"]["result"]


def change(name, **fields):
    """A recorded list whose first element has other fields."""
    answer = json.loads(read(name))
    answer["data"]["result"]["result"][0].update(fields)
    return json.dumps(answer).encode()


def holdings(look):
    names = {node.node_id: node.name for node in look.nodes}
    return sorted((names[one.node_id], one.workload_id, one.cpus, one.gpus, one.slots) for one in look.holdings)


def test_nodes_have_their_labels_names_and_resources():
    look = parse_look(recorded())
    assert [node.name for node in look.nodes] == ["head", "n0", "n1"]
    node = look.nodes[1]
    assert (node.cpus, node.gpus, node.gpu_model, node.labels["rack"], node.resources) == (
        8.0, 4, "A100", "r0", frozenset({"mig_1g_10gb"}),
    )  # fmt: skip
    assert node.metrics_port > 0
    assert not node.closed
    assert not look.unreadable


def test_a_raylet_that_is_a_job_of_ours_is_no_node_and_what_is_held_there_is_left_out():
    answer = json.loads(read("nodes"))
    for node in answer["data"]["result"]["result"]:
        if node["labels"]["eelgrid.io/node"] == "n0":
            node["labels"]["eelgrid.io/capacity"] = "ray"
    look = parse_look(replace(recorded(), nodes=json.dumps(answer).encode()))
    assert [node.name for node in look.nodes] == ["head", "n1"]
    assert [name for name, *_ in holdings(look)] == ["n1"]


def test_holders_say_what_they_hold_and_a_group_holds_for_all_within():
    look = parse_look(recorded())
    assert holdings(look) == [
        ("n0", "", 1.0, 1.0, (GpuSlot(0, 1.0),)),
        ("n0", "w-1", 0.0, 0.5, (GpuSlot(1, 0.5),)),
        ("n1", "w-2", 2.0, 3.0, (GpuSlot(0, 1.0), GpuSlot(1, 1.0))),
    ]
    assert look.expected == frozenset({"w-3"})
    assert {one.job_id for one in look.holdings} == {job.job_id for job in look.jobs if job.status == "RUNNING"}


def test_without_statistics_amounts_are_known_and_gpus_are_not():
    look = parse_look(replace(recorded(), details={}))
    assert [(gpus, slots) for _, _, _, gpus, slots in holdings(look)] == [(1.0, ()), (0.5, ()), (3.0, ())]


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"actors": b"{}"}, "no list of actors"),
        ({"tasks": b"<html>"}, "no JSON"),
        ({"jobs": b"{}"}, "no list of jobs"),
        (
            {"nodes": json.dumps({"data": {"result": {"result": [], "total": ELEMENTS_MOST + 1}}}).encode()},
            "at the most",
        ),
        ({"groups": b'{"data": {"result": {"result": [], "partial_failure_warning": "a node"}}}'}, "is not whole"),
    ],
)
def test_a_list_that_is_none_or_not_whole_is_refused(changed, words):
    with pytest.raises(RayUnreadable, match=words):
        parse_look(replace(recorded(), **changed))


@pytest.mark.parametrize(
    ("name", "fields", "words"),
    [
        ("actors", {"required_resources": {"GPU": "many"}}, "an amount is expected"),
        ("actors", {"node_id": None}, "node_id is missing"),
        ("nodes", {"labels": ["a"]}, "names and values are expected"),
        ("groups", {"bundles": ["x"]}, "is no object"),
    ],
)
def test_one_element_that_cannot_be_read_is_left_out_and_named(name, fields, words):
    look = parse_look(replace(recorded(), **{name: change(name, **fields)}))
    assert len(look.unreadable) == 1
    assert words in look.unreadable[0]


def test_nodes_of_one_name_or_none_are_told_apart():
    answer = json.loads(read("nodes"))
    for node in answer["data"]["result"]["result"]:
        node["labels"], node["node_name"] = {}, "10.0.0.1"
    names = [node.name for node in parse_look(replace(recorded(), nodes=json.dumps(answer).encode())).nodes]
    assert names[0] == "10.0.0.1"
    assert len(set(names)) == 3
    assert all(name.startswith("ray-") for name in names[1:])
