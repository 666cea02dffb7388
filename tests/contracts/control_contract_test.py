"""The control port: a simulated node's own way, and the NVML adapter over the simulated library; power, clocks, rights.

Each way stands over its own node, made alike, and must give the same answers.
"""

from collections.abc import Callable, Iterator

import pytest
from tests.control_rig import A100, B200, G1, G3, H100, P100, WAYS, Rig, open_rig

from eelgrid_agent.devices.port import (
    DeviceInUse,
    DeviceTimeout,
    DriverUnavailable,
    GpuLostError,
    InsufficientResources,
    NoPermission,
    NotSupported,
    OutOfRange,
    UnknownGpu,
    UnknownInstance,
)
from eelgrid_agent.simulation.mig import DriverRefusal
from eelgrid_agent.simulation.operations import OperationKind
from eelgrid_agent.simulation.spec import GpuLoad
from eelgrid_protos.messages import AccessLevel

XID_FELL_OFF = 79


@pytest.fixture(params=WAYS)
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    with open_rig(request.param) as rig:
        yield rig


def test_limits_are_reported_and_set_and_an_out_of_band_cap_shows(rig: Rig) -> None:
    uuid = rig.uuid(H100)
    before = rig.control.power_settings(uuid)
    assert (before.min_w, before.default_w, before.max_w) == (200.0, 700.0, 700.0)
    assert (before.requested_w, before.enforced_w, before.sm_clock_mhz) == (700.0, 700.0, 345)
    assert before.sm_clocks_mhz == tuple(range(345, 1981, 15))
    rig.control.set_power_limit(uuid, 512.3456)
    assert rig.control.power_settings(uuid).requested_w == 512.346
    rig.node.faults.cap_power(uuid, 400.0)
    capped = rig.control.power_settings(uuid)
    assert (capped.requested_w, capped.enforced_w) == (512.346, 400.0)
    rig.node.faults.cap_power(uuid, None)
    assert rig.control.power_settings(uuid).enforced_w == 512.346
    for refused in (199.0, 701.0, 0.0, -5.0, 1e12, float("nan"), float("inf")):
        with pytest.raises(OutOfRange):
            rig.control.set_power_limit(uuid, refused)
    assert rig.control.power_settings(uuid).requested_w == 512.346
    unknown = rig.control.power_settings(rig.uuid(P100))
    assert (unknown.min_w is None) == (unknown.max_w is None)


def test_a_cap_and_a_lock_hold_the_device_and_go_again(rig: Rig) -> None:
    uuid, device = rig.uuid(H100), rig.node.devices[H100]
    rig.node.set_load(uuid, GpuLoad(utilization_ratio=1.0))
    free_mw, free_mhz = device.power_mw, device.sm_clock_mhz
    rig.control.set_power_limit(uuid, 400.0)
    assert device.power_mw == 400_000 < free_mw
    assert device.sm_clock_mhz < free_mhz
    rig.control.set_power_limit(uuid, 700.0)
    rig.control.lock_sm_clocks(uuid, 990, 997)
    assert rig.control.power_settings(uuid).sm_clock_mhz == 990
    assert device.power_mw < free_mw
    rig.control.unlock_sm_clocks(uuid)
    assert (device.power_mw, device.sm_clock_mhz) == (free_mw, free_mhz)
    for low, high in ((1200, 990), (0, 990), (-1, 990), (100, 990), (990, 5000), (990, 2**40)):
        with pytest.raises(OutOfRange):
            rig.control.lock_sm_clocks(uuid, low, high)
    with pytest.raises(NotSupported):
        rig.control.lock_sm_clocks(rig.uuid(P100), 1000, 1100)


def test_power_profiles_are_there_from_blackwell_and_branch_570_on(rig: Rig) -> None:
    uuid = rig.uuid(B200)
    assert rig.control.power_settings(rig.uuid(H100)).power_profiles == ()
    with pytest.raises(NotSupported):
        rig.control.set_power_profile(rig.uuid(H100), 1)
    if rig.branch < 570:
        assert rig.control.power_settings(uuid).power_profiles == ()
        with pytest.raises(NotSupported):
            rig.control.set_power_profile(uuid, 1)
        return
    assert rig.control.power_settings(uuid).power_profiles == tuple(range(15))
    rig.control.set_power_profile(uuid, 6)
    assert rig.control.power_settings(uuid).power_profile == 6
    rig.control.set_power_profile(uuid, 1)
    assert rig.node.devices[B200].profiles == {1}
    with pytest.raises(OutOfRange):
        rig.control.set_power_profile(uuid, 99)
    assert rig.control.power_settings(uuid).power_profile == 1
    rig.control.set_power_profile(uuid, None)
    assert rig.control.power_settings(uuid).power_profile is None


def test_rights_decide_what_may_be_done(rig: Rig) -> None:
    h100, b200 = rig.uuid(H100), rig.uuid(B200)
    rig.node.faults.set_rights(AccessLevel.MIG_CONFIG)
    number = rig.control.create_gpu_instance(b200, G3, 4)
    rig.control.destroy_gpu_instance(b200, number)
    before = rig.control.power_settings(h100)
    assert rig.control.power_settings(b200).power_profiles == ()
    for refused in (
        lambda: rig.control.set_mig_mode(h100, enabled=True),
        lambda: rig.control.set_power_limit(h100, 300.0),
        lambda: rig.control.lock_sm_clocks(h100, 600, 900),
        lambda: rig.control.unlock_sm_clocks(h100),
    ):
        with pytest.raises(NoPermission, match=r"rights|root"):
            refused()
    rig.node.faults.set_rights(AccessLevel.MIG_MONITOR)
    for refused in (
        lambda: rig.control.create_gpu_instance(b200, G3, 4),
        lambda: rig.control.destroy_gpu_instance(rig.uuid(A100), 8),
        lambda: rig.control.create_compute_instance(rig.uuid(A100), 8, 0),
        lambda: rig.control.destroy_compute_instance(rig.uuid(A100), 2, 0),
    ):
        with pytest.raises(NoPermission):
            refused()
    assert rig.control.power_settings(h100) == before
    rig.node.faults.set_rights(AccessLevel.ROOT)
    rig.control.set_power_limit(h100, 300.0)


def test_a_device_that_does_not_answer_says_so_and_comes_back(rig: Rig) -> None:
    uuid = rig.uuid(B200)
    acts: list[Callable[[], object]] = [
        lambda: rig.control.power_settings(uuid),
        lambda: rig.control.set_power_limit(uuid, 500.0),
        lambda: rig.control.mig_geometry(uuid),
        lambda: rig.control.set_mig_mode(uuid, enabled=False),
        lambda: rig.control.create_gpu_instance(uuid, G3, 4),
        lambda: rig.control.destroy_gpu_instance(uuid, 2),
    ]
    rig.node.faults.lose_gpu(uuid)
    for act in acts:
        with pytest.raises(GpuLostError):
            act()
    rig.node.faults.restore_gpu(uuid)
    rig.node.faults.hang_gpu(uuid)
    for act in acts:
        with pytest.raises(DeviceTimeout):
            act()
    rig.node.faults.restore_gpu(uuid)
    rig.node.faults.unload_driver()
    for act in acts:
        with pytest.raises(DriverUnavailable):
            act()
    rig.node.faults.load_driver()
    rig.control.set_power_limit(uuid, 500.0)
    for strange in ("GPU-0000", ""):
        with pytest.raises(UnknownGpu):
            rig.control.power_settings(strange)


def test_faults_on_demand_strike_once_and_are_seen(rig: Rig) -> None:
    uuid = rig.uuid(B200)
    rig.node.faults.refuse_instance_once(uuid)
    with pytest.raises(InsufficientResources):
        rig.control.create_gpu_instance(uuid, G3, 4)
    number = rig.control.create_gpu_instance(uuid, G3, 4)
    rig.node.faults.fail_compute_once(uuid)
    with pytest.raises(InsufficientResources):
        rig.control.create_compute_instance(uuid, number, 2)
    assert rig.spans(B200) == [(2, G3, 4)]
    rig.node.faults.refuse_next(uuid, OperationKind.DESTROY_INSTANCE, DriverRefusal.IN_USE, times=2)
    for _ in range(2):
        with pytest.raises(DeviceInUse):
            rig.control.destroy_gpu_instance(uuid, number)
    rig.control.destroy_gpu_instance(uuid, number)
    foreign = rig.node.faults.create_foreign_instance(uuid, G1, 6)
    with pytest.raises(InsufficientResources):
        rig.control.create_gpu_instance(uuid, G1, 6)
    rig.node.faults.destroy_foreign_instance(uuid, foreign)
    with pytest.raises(UnknownInstance):
        rig.control.create_compute_instance(uuid, foreign, 0)
    rig.node.announcements.clear()
    rig.node.faults.announce_xid(uuid, XID_FELL_OFF)
    kind, whose, code, gi = rig.node.announcements.popleft()
    assert (kind.value, whose, code, gi) == ("xid", uuid, XID_FELL_OFF, None)


def test_slow_calls_take_their_time(rig: Rig) -> None:
    calls: list[str] = []
    rig.node.faults.slow_calls(calls.append)
    rig.control.set_power_limit(rig.uuid(H100), 300.0)
    # By the names that a driver's calls have, or by the port's where there is no driver in between.
    assert set(calls) & {"set_power_limit", "nvmlDeviceSetPowerManagementLimit"}
    rig.node.faults.slow_calls(None)
    calls.clear()
    rig.control.set_power_limit(rig.uuid(H100), 400.0)
    assert not calls
