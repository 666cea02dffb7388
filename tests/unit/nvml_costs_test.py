"""The bench that records a real GPU: it reads and never changes, and its sums are right."""

import json

import pynvml
import pytest
from bench.nvml_costs import Meter, Refused, energies, main, metered
from tests.device_rig import make_node

from eelgrid_agent.simulation.nvml_library import installed_library


def test_a_record_of_the_simulated_library_is_whole(tmp_path, capsys):
    assert main(["--simulate", "a100-sxm4-80gb", "--out", str(tmp_path), "--rounds", "3", "--seconds", "0.4"]) == 0
    assert "read_slow" in capsys.readouterr().out
    record = json.loads((tmp_path / "nvml_costs.json").read_text())
    assert record["simulated"] is True
    assert len(record["products"]) == 8
    calls = {row["call"]: row for row in record["calls"]}
    assert calls["nvmlDeviceGetTotalEnergyConsumption"]["count"] >= 3 * 2 * 8
    assert all(row["count"] and row["median_us"] <= row["max_us"] for row in record["calls"])
    idle, loaded = record["phases"]
    assert (idle["phase"], loaded["phase"]) == ("idle", "loaded")
    assert loaded["mean_w"] > 2.0 * idle["mean_w"]
    assert "GPU-" not in json.dumps(record), "it names no device"


def test_what_could_change_a_device_is_refused_before_the_library_sees_it():
    with installed_library(make_node([1])), metered(Meter()):
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        before = pynvml.nvmlDeviceGetPowerManagementLimit(handle)
        for change in (
            lambda: pynvml.nvmlDeviceSetPowerManagementLimit(handle, before - 1000),
            lambda: pynvml.nvmlDeviceSetMigMode(handle, 1),
            lambda: pynvml.nvmlDeviceResetGpuLockedClocks(handle),
            lambda: pynvml.nvmlDeviceCreateGpuInstance(handle, 19),
            lambda: pynvml.nvmlDeviceClearEccErrorCounts(handle, 0),
        ):
            with pytest.raises(Refused, match="only reads"):
                change()
        assert pynvml.nvmlDeviceGetPowerManagementLimit(handle) == before
        pynvml.nvmlShutdown()
    assert pynvml.nvmlDeviceSetMigMode.__name__ == "nvmlDeviceSetMigMode", "the binding is as it was"


def test_joules_by_the_counter_and_by_integration():
    rows = [{"t_s": float(t), "counter_j": 100.0 * t, "power_w": 90.0} for t in range(11)]
    rows[4] = {"t_s": 4.0, "counter_j": None, "power_w": 90.0}
    found = energies(rows)
    assert found == {"counter_j": 1000.0, "integrated_j": 900.0, "ratio": 0.9, "mean_w": 100.0}
    assert energies(rows[:1])["ratio"] is None


def test_errors_are_counted_by_code():
    meter = Meter()
    with pytest.raises(pynvml.NVMLError):
        meter.timed("x", lambda: (_ for _ in ()).throw(pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)))
    (row,) = meter.rows()
    assert row["errors"] == {str(pynvml.NVML_ERROR_NOT_SUPPORTED): 1}
