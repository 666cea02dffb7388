"""The fleet file: what it gives, and what it says about a mistake."""

import json
from pathlib import Path

import pytest

from eelgrid_agent.enforce.rules import GuardLimits
from eelgrid_agent.simulation.node import SimulatedNode
from eelgrid_agent.simulation.spec import FleetFileError, GpuSpec, MigSlice, load_fleet

NODE = {"name": "node", "cpu_milli": 1000, "memory_bytes": 2**30}


def write(folder: Path, document: object, name: str = "fleet.json") -> Path:
    path = folder / name
    path.write_text(document if isinstance(document, str) else json.dumps(document), "utf-8")
    return path


def test_nodes_and_devices_are_multiplied(tmp_path: Path) -> None:
    row = {
        "name": "node-{index}",
        "count": 3,
        "cpu_milli": 96000,
        "memory_bytes": 412316860416,
        "pool": "a",
        "labels": {"rack": "7"},
        "topology": "zone-a/rack-7",
        "driver_version": "535.161.07",
        "gpus": [
            {"product": "openb-g2", "model": "G2", "count": 2},
            {"product": "a100-sxm4-40gb", "mig": ["3g@4", "1g.5gb@0"]},
            {"product": "b200", "mig": [], "sensor_gain": 0.954, "sensor_offset_w": -2},
        ],
    }
    nodes = load_fleet(write(tmp_path, {"nodes": [row, NODE]}))
    assert [node.node_name for node in nodes] == ["node-0", "node-1", "node-2", "node"]
    assert nodes[1].gpus == (
        GpuSpec(product="openb-g2", model="G2"),
        GpuSpec(product="openb-g2", model="G2"),
        GpuSpec(product="a100-sxm4-40gb", mig=(MigSlice(profile="3g", start=4), MigSlice(profile="1g.5gb", start=0))),
        GpuSpec(product="b200", mig=(), sensor_gain=0.954, sensor_offset_w=-2.0),
    )
    assert (nodes[0].cpu_milli, nodes[0].memory_bytes, nodes[0].pool) == (96000, 412316860416, "a")
    assert (nodes[0].labels, nodes[0].driver_version) == ({"rack": "7"}, "535.161.07")
    assert (nodes[3].gpus, nodes[3].pool, nodes[3].labels) == ((), "", {})
    assert (nodes[0].topology, nodes[3].topology) == (("zone-a", "rack-7"), ())
    assert len(SimulatedNode(nodes[0], monotonic_ns=lambda: 0, seed=0).gpus()) == 4


def test_a_node_in_a_hurry_waits_less_and_no_other_does(tmp_path: Path) -> None:
    hurried, usual = load_fleet(write(tmp_path, {"nodes": [{**NODE, "hurry": 60}, {**NODE, "name": "other"}]}))
    assert (hurried.hurry, usual.hurry) == (60.0, 1.0)
    limits = GuardLimits().speed_up(hurried.hurry)
    assert (limits.quarantine_s, limits.loss_window_s, limits.repair_window_s) == (5.0, 10.0, 10.0)
    assert limits.slew_w == GuardLimits().slew_w
    assert GuardLimits().speed_up(usual.hurry) == GuardLimits()


def test_toml_says_the_same(tmp_path: Path) -> None:
    text = """
    [[nodes]]
    name = "n-{index}"
    count = 2
    cpu_milli = 1000
    memory_bytes = 1024
    gpus = [{ product = "t4", count = 4 }]
    """
    assert [len(node.gpus) for node in load_fleet(write(tmp_path, text, "fleet.toml"))] == [4, 4]


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ("{", "is not JSON"),
        ("[]", "the file: is a list; write an object"),
        ({}, "nodes: is missing; add it"),
        ({"nodes": {}}, "nodes: is an object; write a list"),
        ({"nodes": [], "node": []}, "node: is not a field"),
        ({"nodes": [{}]}, r"nodes\[0\].name: is missing"),
        ({"nodes": [{**NODE, "cpu_milli": "8"}]}, r"nodes\[0\].cpu_milli: is text; write a whole number"),
        ({"nodes": [{**NODE, "cpu_milli": True}]}, r"cpu_milli: is true or false; write a whole number"),
        ({"nodes": [{**NODE, "cpu_milli": 1.5}]}, r"cpu_milli: is a float"),
        ({"nodes": [{**NODE, "memory_bytes": -1}]}, r"memory_bytes: -1 is not in \[0, "),
        ({"nodes": [{**NODE, "count": 0}]}, r"count: 0 is not in"),
        ({"nodes": [{**NODE, "count": 2}]}, r"nodes\[0\].name: 'node' appears twice; put {index}"),
        ({"nodes": [{**NODE, "name": ""}]}, r"nodes\[0\].name: '' is not a name"),
        ({"nodes": [{**NODE, "name": "a b"}]}, r"nodes\[0\].name: 'a b' is not a name"),
        ({"nodes": [{**NODE, "labels": {"a": 1}}]}, r"nodes\[0\].labels: contains something other than text"),
        ({"nodes": [{**NODE, "topology": "a//b"}]}, r"nodes\[0\].topology: '' is not a name"),
        ({"nodes": [{**NODE, "topology": "a/" * 8 + "b"}]}, r"nodes\[0\].topology: has 9 parts; give 8 at most"),
        ({"nodes": [{**NODE, "driver_version": "new"}]}, r"nodes\[0\].driver_version: 'new' does not start"),
        ({"nodes": [NODE, {**NODE, "name": "b", "gpu": []}]}, r"nodes\[1\].gpu: is not a field; correct the spelling"),
        ({"nodes": [{**NODE, "gpus": [{}]}]}, r"nodes\[0\].gpus\[0\].product: is missing"),
        (
            {"nodes": [{**NODE, "gpus": [{"product": "x"}]}]},
            r"nodes\[0\].gpus\[0\].product: is 'x', which is no known GPU",
        ),
        ({"nodes": [{**NODE, "gpus": [{"product": "t4", "mig": []}]}]}, r"gpus\[0\].mig: t4 has no MIG"),
        ({"nodes": [{**NODE, "gpus": [{"product": "a30", "mig": ["2g"]}]}]}, r"mig\[0\]: '2g' is not profile@start"),
        ({"nodes": [{**NODE, "gpus": [{"product": "a30", "mig": ["2g@1"]}]}]}, "cannot start at 1; it starts at 0, 2"),
        ({"nodes": [{**NODE, "gpus": [{"product": "t4", "count": 65}]}]}, r"count: 65 is not in \[1, 64\]"),
        ({"nodes": [{**NODE, "gpus": [{"product": "t4", "count": 64}, {"product": "t4"}]}]}, "64 at most"),
    ],
)
def test_a_mistake_is_named_with_its_place_and_remedy(tmp_path: Path, document: object, message: str) -> None:
    path = write(tmp_path, document)
    with pytest.raises(FleetFileError, match=message) as caught:
        load_fleet(path)
    assert str(caught.value).startswith(str(path))


def test_a_file_that_is_not_there_is_a_mistake_too(tmp_path: Path) -> None:
    with pytest.raises(FleetFileError, match="cannot be read"):
        load_fleet(tmp_path / "none.json")
    with pytest.raises(FleetFileError, match="cannot be read"):
        load_fleet(tmp_path)
    with pytest.raises(FleetFileError, match="is not TOML"):
        load_fleet(write(tmp_path, "{}", "fleet.toml"))
