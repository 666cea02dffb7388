"""The control port's MIG half, both ways: modes, instances, who holds them, and what each kind of end leaves."""

from collections.abc import Iterator

import pytest
from tests.control_rig import A30, A100, B200, DEVICES, G1, G2, G3, G4, H100, T4, WAYS, Rig, open_rig

from eelgrid_agent.devices.nvml.control import NvmlControl
from eelgrid_agent.devices.port import (
    DeviceInUse,
    InsufficientResources,
    ModeChange,
    NotSupported,
    OutOfRange,
    UnknownInstance,
)
from eelgrid_agent.simulation.part_traits import adapt_geometry
from eelgrid_protos.catalogue.loader import load_catalogue
from eelgrid_protos.messages import AccessLevel


@pytest.fixture(params=WAYS)
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    with open_rig(request.param) as rig:
        yield rig


def test_a_geometry_is_the_catalogues_where_the_driver_says_no_other(rig: Rig) -> None:
    catalogue = load_catalogue()
    for index in (A100, A30, H100, B200):
        expected = adapt_geometry(catalogue.products[DEVICES[index].product].mig, rig.branch)
        assert rig.control.mig_geometry(rig.uuid(index)) == expected
        # Profiles with twice the memory came with branch 525.
        assert ("1g.2x" in expected.profiles) == (rig.branch >= 525 and index != A30)
    with pytest.raises(NotSupported):
        rig.control.mig_geometry(rig.uuid(T4))
    rig.node.faults.set_rights(AccessLevel.READ_ONLY)
    assert rig.control.mig_geometry(rig.uuid(A100)) == adapt_geometry(
        catalogue.products["a100-sxm4-40gb"].mig, rig.branch
    )


def test_an_instance_lives_and_dies_and_comes_back_under_its_uuid(rig: Rig) -> None:
    uuid = rig.uuid(B200)
    assert rig.control.create_gpu_instance(uuid, G3, 4) == 2
    with pytest.raises(InsufficientResources):
        rig.control.create_gpu_instance(uuid, G3, 4)
    with pytest.raises(InsufficientResources):
        rig.control.create_gpu_instance(uuid, G2, 4)
    with pytest.raises(OutOfRange):
        rig.control.create_gpu_instance(uuid, G3, 3)
    with pytest.raises(NotSupported):
        rig.control.create_gpu_instance(uuid, 77, 0)
    assert rig.control.create_gpu_instance(uuid, G2, 0) == 3
    assert rig.control.create_compute_instance(uuid, 2, 2) == 0
    with pytest.raises(InsufficientResources):
        rig.control.create_compute_instance(uuid, 2, 2)
    first = rig.gpu(B200).gpu_instances[0]
    assert [(child.id, child.profile_id) for child in first.compute_instances] == [(0, 2)]
    with pytest.raises(DeviceInUse):
        rig.control.destroy_gpu_instance(uuid, 2)
    rig.control.destroy_compute_instance(uuid, 2, 0)
    rig.control.destroy_gpu_instance(uuid, 2)
    for gone in (
        lambda: rig.control.destroy_gpu_instance(uuid, 2),
        lambda: rig.control.destroy_compute_instance(uuid, 2, 0),
        lambda: rig.control.destroy_compute_instance(uuid, 3, 0),
        lambda: rig.control.create_compute_instance(uuid, 2, 2),
    ):
        with pytest.raises(UnknownInstance):
            gone()
    assert rig.control.create_gpu_instance(uuid, G3, 4) == 2
    rig.control.create_compute_instance(uuid, 2, 2)
    assert rig.gpu(B200).gpu_instances[0] == first


def test_the_halves_of_seven_mix_from_branch_510_on(rig: Rig) -> None:
    rig.control.create_gpu_instance(rig.uuid(B200), G3, 4)
    if rig.branch < 510:
        with pytest.raises(InsufficientResources):
            rig.control.create_gpu_instance(rig.uuid(B200), G4, 0)
    else:
        assert rig.control.create_gpu_instance(rig.uuid(B200), G4, 0) == 1


def test_a_process_keeps_its_instance(rig: Rig) -> None:
    uuid = rig.uuid(A100)
    rig.node.faults.start_process(uuid, 4711, 2, 1)
    with pytest.raises(DeviceInUse):
        rig.control.destroy_compute_instance(uuid, 2, 1)
    rig.control.destroy_compute_instance(uuid, 2, 0)
    with pytest.raises(DeviceInUse):
        rig.control.destroy_gpu_instance(uuid, 2)
    rig.node.faults.end_process(uuid, 4711)
    rig.control.destroy_compute_instance(uuid, 2, 1)
    rig.control.destroy_gpu_instance(uuid, 2)
    assert rig.spans(A100) == [(8, G1, 1)]


def test_a_part_that_needs_no_reset_changes_its_mode_at_once(rig: Rig) -> None:
    uuid = rig.uuid(H100)
    with pytest.raises(NotSupported):
        rig.control.create_gpu_instance(uuid, G3, 4)
    rig.node.faults.add_foreign_client(uuid)
    with pytest.raises(DeviceInUse):
        rig.control.set_mig_mode(uuid, enabled=True)
    assert (rig.gpu(H100).mig_enabled, rig.gpu(H100).mig_pending) == (False, False)
    rig.node.faults.remove_foreign_client(uuid)
    assert rig.control.set_mig_mode(uuid, enabled=True) is ModeChange.DONE
    assert rig.control.set_mig_mode(uuid, enabled=True) is ModeChange.DONE
    rig.control.create_gpu_instance(uuid, G3, 4)
    with pytest.raises(DeviceInUse):
        rig.control.set_mig_mode(uuid, enabled=False)
    rig.control.destroy_gpu_instance(uuid, 2)
    assert rig.control.set_mig_mode(uuid, enabled=False) is ModeChange.DONE
    with pytest.raises(NotSupported):
        rig.control.set_mig_mode(rig.uuid(T4), enabled=True)


def test_a_part_that_needs_a_reset_waits_for_it(rig: Rig) -> None:
    uuid = rig.uuid(A30)
    assert rig.control.set_mig_mode(uuid, enabled=True) is ModeChange.PENDING
    assert (rig.gpu(A30).mig_enabled, rig.gpu(A30).mig_pending) == (False, True)
    with pytest.raises(NotSupported):
        rig.control.create_gpu_instance(uuid, 5, 0)
    assert rig.control.set_mig_mode(uuid, enabled=False) is ModeChange.DONE
    assert not rig.gpu(A30).mig_pending
    assert rig.control.set_mig_mode(uuid, enabled=True) is ModeChange.PENDING
    rig.node.faults.reset_gpu(uuid)
    assert (rig.gpu(A30).mig_enabled, rig.gpu(A30).mig_pending) == (True, False)
    assert rig.control.create_gpu_instance(uuid, 5, 2) == 2


def test_a_mode_change_that_clients_block_is_taken_back(rig: Rig) -> None:
    uuid = rig.uuid(A30)
    rig.node.faults.add_foreign_client(uuid, "dcgm")
    with pytest.raises(DeviceInUse, match="stop"):
        rig.control.set_mig_mode(uuid, enabled=True)
    assert (rig.gpu(A30).mig_enabled, rig.gpu(A30).mig_pending) == (False, False)


def test_the_own_session_does_not_block_a_mode_change_that_resets(rig: Rig) -> None:
    uuid = rig.uuid(A30)
    rig.node.faults.allow_mode_reset(uuid, works=True)
    # A session that has used the device is a client of it; the adapter has to let it go first.
    rig.control.power_settings(uuid)
    assert rig.control.set_mig_mode(uuid, enabled=True) is ModeChange.DONE
    assert (rig.gpu(A30).mig_enabled, rig.gpu(A30).mig_pending) == (True, False)
    assert rig.control.create_gpu_instance(uuid, 5, 0) == 1


def test_what_stays_after_each_end(rig: Rig) -> None:
    rig.control.set_power_limit(rig.uuid(H100), 300.0)
    rig.control.set_mig_mode(rig.uuid(H100), enabled=True)
    rig.control.create_gpu_instance(rig.uuid(H100), G3, 4)
    rig.node.faults.reset_gpu(rig.uuid(H100))
    assert (rig.gpu(H100).mig_enabled, rig.spans(H100)) == (True, [])
    rig.node.faults.reload_driver()
    modes = [rig.gpu(index).mig_enabled for index in (A100, H100, B200)]
    assert modes == [True, False, False]
    assert rig.spans(A100) == []
    assert rig.control.power_settings(rig.uuid(H100)).requested_w == 700.0
    rig.control.create_gpu_instance(rig.uuid(A100), G4, 0)
    rig.node.faults.reboot_node()
    assert (rig.gpu(A100).mig_enabled, rig.spans(A100)) == (True, [])


def test_listing_follows_what_was_changed(rig: Rig) -> None:
    rig.control.destroy_gpu_instance(rig.uuid(A100), 8)
    rig.control.create_gpu_instance(rig.uuid(A100), G2, 2)
    rig.control.create_compute_instance(rig.uuid(A100), 4, 0)
    listed = rig.control._session.gpus() if isinstance(rig.control, NvmlControl) else rig.node.gpus()
    assert listed[A100].gpu_instances == rig.gpu(A100).gpu_instances
    assert [(held.id, len(held.compute_instances)) for held in listed[A100].gpu_instances] == [(2, 2), (4, 1)]
