"""Claims made ready on simulated GPUs: instances made and taken away, nothing given twice, nothing lost over a restart."""

import json

import pytest
import yaml
from tests.dra_rig import NODE, asked, claim, dra_node

from eelgrid_agent.kubelet.claim_preparation import CdiFolder, ClaimUnpreparable
from eelgrid_protos.messages import GpuLayout


@pytest.fixture
def node(tmp_path):
    with dra_node(tmp_path) as node:
        yield node


def test_a_claim_gets_an_instance_that_did_not_stand_and_leaves_none(node):
    (given,) = node.ready("a", "gpu-0-1g-4")
    assert node.standing(0) == [("1g.10gb", 4)]
    assert (given.requests, given.pool, given.device) == (("r0",), NODE, "gpu-0-1g-4")
    assert given.cdi_ids == (f"nvidia.com/gpu={node.uuid(0, 4)}",)
    (other,) = node.ready("b", "gpu-0-3g-0")
    assert node.standing(0) == [("1g.10gb", 4), ("3g.40gb", 0)]
    assert other.cdi_ids != given.cdi_ids
    node.undo("a")
    assert node.standing(0) == [("3g.40gb", 0)]
    node.undo("b")
    assert node.standing(0) == []


def test_to_ask_twice_is_to_ask_once_even_without_an_api_server(node):
    first = node.ready("a", "gpu-0-1g-4", "gpu-0-1g-5")
    changes = node.changes
    assert node.readying.prepare_claim(asked("a"), None) == first
    assert node.changes == changes
    node.undo("a")
    node.undo("a")
    assert node.standing(0) == []


def test_what_stood_before_is_given_and_stays(node):
    (given,) = node.ready("a", "gpu-1-3g-4")
    assert given.cdi_ids == (f"nvidia.com/gpu={node.uuid(1, 4)}",)
    assert node.changes == 0
    node.undo("a")
    assert node.standing(1) == [("1g.5gb", 0), ("3g.20gb", 4)]


def test_what_nobody_claims_gives_way_and_what_is_claimed_does_not(node):
    node.ready("a", "gpu-1-1g-0")
    node.ready("b", "gpu-1-2g-4")
    assert node.standing(1) == [("1g.5gb", 0), ("2g.10gb", 4)]
    with pytest.raises(ClaimUnpreparable, match="gpu-1-1g-0 is held by claim team/a"):
        node.ready("c", "gpu-1-4g-0")
    assert node.standing(1) == [("1g.5gb", 0), ("2g.10gb", 4)]


def test_a_whole_gpu_is_given_where_no_slice_of_it_is_and_back_again(node):
    gpu = node.gpus()[0]
    node.ready("slice", "gpu-0-1g-0")
    with pytest.raises(ClaimUnpreparable, match="gpu-0-1g-0 is held"):
        node.ready("whole", "gpu-0")
    node.undo("slice")
    (given,) = node.ready("whole", "gpu-0")
    assert given.cdi_ids == (f"nvidia.com/gpu={gpu.uuid}",)
    assert not node.gpus()[0].mig_enabled
    with pytest.raises(ClaimUnpreparable, match="gpu-0 is held by claim team/whole"):
        node.ready("slice", "gpu-0-1g-0")
    node.undo("whole")
    node.ready("slice", "gpu-0-1g-0")


def test_a_mode_that_takes_a_reset_is_refused_with_the_reason(node):
    with pytest.raises(ClaimUnpreparable, match=r"gpu-1 could not be created \(pending\): .*reset"):
        node.ready("a", "gpu-1")


def test_an_agent_that_starts_again_knows_what_it_gave(node):
    first = node.ready("a", "gpu-0-1g-4")
    node.start()
    assert node.readying.prepare_claim(asked("a"), None) == first
    with pytest.raises(ClaimUnpreparable, match="is held by claim team/a"):
        node.ready("b", "gpu-0-2g-4")
    # No plan of the controller takes it, though no process is in it yet.
    result = node.layouts.apply_layout(GpuLayout(gpu_uuid=node.gpus()[0].uuid, mig_enabled=True))
    assert result.rule == "busy"
    node.undo("a")
    assert node.standing(0) == []


def test_what_the_controller_assigned_and_what_claims_hold_end_each_by_itself(node):
    node.ready("a", "gpu-0-1g-4")
    theirs = node.uuid(1, 4)
    assert node.layouts.hold_devices({theirs})
    assert node.layouts.executor.leased_devices() == {theirs, node.uuid(0, 4)}
    node.start()
    assert node.layouts.executor.leased_devices() == {theirs, node.uuid(0, 4)}
    node.undo("a")
    assert node.layouts.executor.leased_devices() == {theirs}
    assert node.layouts.hold_devices(())
    assert node.layouts.executor.leased_devices() == set()


def test_a_slice_that_an_assignment_holds_is_left_and_taken_away_later(node):
    node.ready("a", "gpu-0-1g-4")
    node.layouts.hold_devices({node.uuid(0, 4)})
    node.undo("a")
    assert node.standing(0) == [("1g.10gb", 4)]
    assert json.loads((node.folder / "claims.json").read_text())["left"] == ["gpu-0-1g-4"]
    with pytest.raises(ClaimUnpreparable, match="busy"):
        node.ready("b", "gpu-0-2g-4")
    node.undo("b")
    node.start()
    assert node.standing(0) == [("1g.10gb", 4)]
    node.layouts.hold_devices(())
    node.readying.collect_leftovers()
    assert node.standing(0) == []
    assert json.loads((node.folder / "claims.json").read_text())["left"] == []


def test_a_slice_that_is_left_and_claimed_again_is_still_ours_to_remove(node):
    node.ready("a", "gpu-0-1g-4")
    node.layouts.hold_devices({node.uuid(0, 4)})
    node.undo("a")
    node.ready("b", "gpu-0-1g-4")
    node.layouts.hold_devices(())
    node.readying.collect_leftovers()
    assert node.standing(0) == [("1g.10gb", 4)]
    node.undo("b")
    assert node.standing(0) == []


def test_who_may_change_nothing_gives_what_stands(node):
    node.cannot_change = "--observe-only"
    node.start()
    node.ready("a", "gpu-1-3g-4")
    with pytest.raises(
        ClaimUnpreparable, match=r"gpu-0-1g-4 does not exist, and this agent changes no devices \(--observe-only\)"
    ):
        node.ready("b", "gpu-0-1g-4")
    node.undo("a")
    assert node.standing(1) == [("1g.5gb", 0), ("3g.20gb", 4)]


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (claim("other", "gpu-0-1g-4"), "recreated"),
        (claim("a"), "is not allocated"),
        (claim("a", "gpu-0", node="gpu-8"), "is of pool gpu-8"),
        (claim("a", "gpu-9-1g-0"), "no device gpu-9-1g-0"),
        (claim("a", "gpu-0-9g-0"), "has no device gpu-0-9g-0"),
        (claim("a", "nonsense"), "no device nonsense"),
        (claim("a", "gpu-0-3g-0", "gpu-0-1g-0"), "geometry"),
        (None, "not known here"),
    ],
)
def test_what_cannot_be_given_is_refused_with_the_reason(node, found, said):
    with pytest.raises(ClaimUnpreparable, match=said):
        node.readying.prepare_claim(asked("a"), found)


def test_devices_of_other_drivers_are_not_ours(node):
    found = claim("a", "gpu-0-1g-4")
    results = found["status"]["allocation"]["devices"]["results"]
    results.append({"request": "nic", "driver": "net.example", "pool": NODE, "device": "nic-0"})
    assert [one.device for one in node.readying.prepare_claim(asked("a"), found)] == ["gpu-0-1g-4"]
    results[0]["driver"] = "gpu.nvidia.com"
    with pytest.raises(ClaimUnpreparable, match="names other drivers"):
        node.readying.prepare_claim(asked("b"), {**found, "metadata": {"uid": "b"}})


def test_a_pod_ends_though_the_driver_is_away_and_its_slice_goes_when_it_is_back(node):
    node.ready("a", "gpu-0-1g-4")
    lease, node.devices.lease_gpus = node.devices.lease_gpus, lambda _: False
    node.undo("a")
    assert node.readying.prepared_claims() == {}
    with pytest.raises(ClaimUnpreparable, match="could not be leased"):
        node.ready("b", "gpu-0-1g-5")
    node.undo("b")
    assert node.standing(0) == [("1g.10gb", 4), ("1g.10gb", 5)]
    node.devices.lease_gpus = lease
    node.readying.collect_leftovers()
    assert node.standing(0) == []
    assert node.layouts.executor.leased_devices() == set()


def test_what_cannot_be_written_down_is_not_done(node):
    (node.folder / "claims.json").mkdir()
    node.start()
    with pytest.raises(ClaimUnpreparable, match=r"nothing is changed while the journal is unavailable: .*claims\.json"):
        node.ready("a", "gpu-0-1g-4")
    with pytest.raises(ClaimUnpreparable, match="nothing is changed while the journal is unavailable"):
        node.undo("a")
    assert node.standing(0) == []


def test_a_journal_that_is_none_is_put_aside_and_nothing_that_stands_is_removed(node):
    node.ready("a", "gpu-0-1g-4")
    (node.folder / "claims.json").write_text("{")
    node.start()
    assert (node.folder / "claims.json.corrupt-1").exists()
    node.undo("a")
    assert node.standing(0) == [("1g.10gb", 4)]


def test_our_specification_names_what_no_other_does(node, tmp_path):
    cdi, theirs = tmp_path / "cdi", tmp_path / "theirs"
    theirs.mkdir()
    node.cdi = CdiFolder(cdi, [theirs])
    node.start()
    node.ready("a", "gpu-0-1g-4", "gpu-2")
    found = json.loads((cdi / "eelgrid-gpu.json").read_text())
    named = {one["name"]: one["containerEdits"] for one in found["devices"]}
    mine, whole = node.uuid(0, 4), node.gpus()[2].uuid
    assert found["kind"] == "nvidia.com/gpu"
    assert named[mine] == {"env": [f"NVIDIA_VISIBLE_DEVICES={mine}"]}
    assert named.keys() == {mine, whole}
    spec = {"cdiVersion": "0.5.0", "kind": "nvidia.com/gpu", "devices": [{"name": whole, "containerEdits": {}}]}
    (theirs / "nvidia.yaml").write_text(yaml.safe_dump(spec))
    (theirs / "broken.json").write_text("{")
    node.start()
    assert [one["name"] for one in json.loads((cdi / "eelgrid-gpu.json").read_text())["devices"]] == [mine]
    node.undo("a")
    assert not (cdi / "eelgrid-gpu.json").exists()
