"""The 26 known ways in which enforcement fails on real nodes: docs/reference/agent.md names a test of each, which is there.

Those that are neither of a layout's change nor of one module alone are here,
through the real NVML binding over simulated devices.
"""

import ast
import re
from pathlib import Path

import pytest
from tests.device_rig import open_rig

from eelgrid_agent.devices.host import SimulatedHost
from eelgrid_agent.devices.nvml.control import NvmlControl
from eelgrid_agent.devices.port import Missing, NoPermission
from eelgrid_agent.devices.sampler import NodeSample, Sampler, build_batch
from eelgrid_agent.enforce.mig.mig_service import LayoutReconciler
from eelgrid_agent.enforce.rules import RefusalRule
from eelgrid_agent.node.inventory import NodeIdentity, build_inventory, survey_devices
from eelgrid_agent.simulation.spec import GpuSpec, MigSlice
from eelgrid_agent.state_files import MemoryState
from eelgrid_protos.messages import AbsenceReason, AccessLevel, ApplyStatus, GpuLayout, Reading, WantedInstance

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/reference/agent.md").read_text("utf-8")
PROOF = re.compile(r"`(tests/[a-z_/]+_test\.py)::(test_\w+)`")
SLICED = GpuSpec(product="a100-sxm4-40gb", mig=(MigSlice(profile="3g", start=4), MigSlice(profile="1g.5gb", start=0)))
MODES = [line.split(" | ") for line in PAGE.split("## Failure modes")[1].splitlines() if re.match(r"\| \d", line)]


def names_in(path):
    """Names of the test functions in a file, without importing it."""
    tree = ast.parse((ROOT / path).read_text("utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def test_every_mode_is_on_the_page_once():
    assert [int(row[0].strip("| ")) for row in MODES] == list(range(1, 27))
    assert all(len(row) == 4 and all(cell.strip("| ") for cell in row) for row in MODES)


@pytest.mark.parametrize("row", MODES, ids=lambda row: row[0].strip("| "))
def test_the_proof_of_a_mode_is_a_test_that_exists(row):
    proofs = PROOF.findall(row[3])
    assert proofs
    assert row[3].count("`") == 2 * len(proofs), "every proof is spelled path::test"
    for path, name in proofs:
        assert name in names_in(path), f"{path} has no {name}"
        numbers = [int(number) for number in re.findall(r"_f(\d\d)(?=_)", f"_{name}")]
        assert not numbers or int(row[0].strip("| ")) in numbers


@pytest.mark.parametrize("rule", list(RefusalRule), ids=str)
def test_every_rule_is_explained_on_the_page(rule):
    assert f"`{rule.value}`" in PAGE


@pytest.mark.parametrize("level", [level for level in AccessLevel if level])
def test_f19_the_level_found_is_published_and_the_rest_goes_on(level):
    with open_rig("nvml", SLICED) as rig:
        uuid = rig.uuid(0)
        rig.node.faults.set_rights(level)
        found = survey_devices(rig.device)
        host = SimulatedHost(cpu_milli=1, memory_bytes=1, load=lambda: (0, 0), monotonic_ns=lambda: 0)
        inventory = build_inventory(
            NodeIdentity(node_name="n", agent_version="0"), host, found, generation=1, lost=frozenset()
        )
        # In MIG mode the driver itself tells whether instances may be configured; it cannot tell less from least.
        known = {AccessLevel.READ_ONLY: {AccessLevel.READ_ONLY, AccessLevel.MIG_MONITOR}}.get(level, {level})
        assert inventory.access in known
        assert [len(gpu.gpu_instances) for gpu in inventory.gpus] == [2]
        assert isinstance(rig.device.read(uuid).values[Reading.POWER_W], float)
        control = NvmlControl(rig.device)
        if level < AccessLevel.ROOT:
            with pytest.raises(NoPermission):
                control.set_power_limit(uuid, 300.0)
        # Who may not list processes must take every instance for used.
        rule = {AccessLevel.READ_ONLY: "busy", AccessLevel.MIG_MONITOR: "no-permission"}.get(level, "")
        result = executor_on(rig).apply_layout(layout(uuid, ("3g.20gb", 4), ("1g.5gb", 0), ("1g.5gb", 1)))
        status = ApplyStatus.REFUSED if rule else ApplyStatus.APPLIED
        assert (result.status, result.rule) == (status, rule)


def test_f20_what_is_unavailable_under_mig_is_sent_as_absent():
    with open_rig("nvml", SLICED) as rig:
        rig.load(0, 0.9)
        raw = rig.read(0)
        assert raw.values[Reading.UTILIZATION_RATIO] == Missing(AbsenceReason.NOT_SUPPORTED)
        seen = Sampler(sample_interval_s=1.0).observe(
            NodeSample(wall_ns=1, monotonic_ns=1, generation=1, gpus=((rig.uuid(0), raw),), host={})
        )
        batch = build_batch([seen.tick], sequence=1, dropped_ticks=0)
        (column,) = [column for column in batch.gpu_columns if column.reading is Reading.UTILIZATION_RATIO]
        assert [(absence.reason, absence.cells) for absence in column.absences] == [(AbsenceReason.NOT_SUPPORTED, (0,))]


def test_f21_devices_that_are_counted_again_keep_their_readings_and_layouts():
    with open_rig("nvml", SLICED, GpuSpec(product="t4"), GpuSpec(product="h100-sxm5-80gb", mig=())) as rig:
        sliced = rig.uuid(0)
        executor = executor_on(rig)
        wanted = layout(sliced, ("3g.20gb", 4), ("1g.5gb", 0), ("1g.5gb", 1))
        assert executor.apply_layout(wanted).status is ApplyStatus.APPLIED
        before = {gpu.uuid: gpu for gpu in rig.device.gpus()}
        power = {uuid: rig.device.read(uuid).values[Reading.POWER_W] for uuid in before}
        rig.node.faults.renumber_gpus()
        rig.device.close()
        after = {gpu.uuid: gpu for gpu in rig.device.gpus()}
        assert [gpu.index for gpu in after.values()] == [0, 1, 2]
        assert after[sliced].index == 2 != before[sliced].index
        assert {uuid: gpu.pci_bus_id for uuid, gpu in after.items()} == {
            uuid: gpu.pci_bus_id for uuid, gpu in before.items()
        }
        assert after[sliced].gpu_instances == before[sliced].gpu_instances
        assert {uuid: rig.device.read(uuid).values[Reading.POWER_W] for uuid in after} == power
        assert executor.check_layouts() == ()
        assert executor.apply_layout(wanted).detail.startswith("exists already")


def layout(uuid, *places):
    instances = tuple(WantedInstance(profile=profile, start=start) for profile, start in places)
    return GpuLayout(gpu_uuid=uuid, mig_enabled=True, instances=instances)


def executor_on(rig):
    made = LayoutReconciler(
        rig.device,
        NvmlControl(rig.device),
        MemoryState(()),
        boot_id=lambda: "boot-1",
        sleep=lambda _: None,
        monotonic_s=lambda: 0.0,
        wall_ns=lambda: 0,
    )
    made.recover()
    return made
