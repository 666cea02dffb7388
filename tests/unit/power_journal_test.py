"""The settings journal on a real disk, and how boots and driver loads are told apart."""

import json

import pytest

from eelgrid_agent.enforce.guard.events import DeviceRecord, DriverOrigin
from eelgrid_agent.enforce.power import (
    POWER_JOURNAL,
    read_driver_origin,
)
from eelgrid_agent.state_files import StateDamaged, StateFile, StateUnreadable, StateUnwritable

ORIGIN = DriverOrigin(boot_id="b-1", driver_start="42")
RECORDS = (
    DeviceRecord(gpu_uuid="GPU-0", origin=ORIGIN, found_w=700.0, limits_w=(350.5, 400.0), clocks=(600, 1400)),
    DeviceRecord(gpu_uuid="GPU-1", origin=ORIGIN, found_profile=2, profiles=(5,)),
    DeviceRecord(gpu_uuid="GPU-2", origin=DriverOrigin()),
)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "settings.json"


def test_what_was_stored_is_loaded_by_another_process(path):
    assert StateFile(path, POWER_JOURNAL).load() == ()
    for records in (RECORDS, RECORDS[:1], ()):
        StateFile(path, POWER_JOURNAL).store(records)
        assert StateFile(path, POWER_JOURNAL).load() == records
    assert [entry.name for entry in path.parent.iterdir()] == ["settings.json"]


def test_a_write_that_was_cut_short_leaves_the_journal_before(path):
    StateFile(path, POWER_JOURNAL).store(RECORDS)
    path.with_name("settings.json.new").write_text('{"schema": 1, "devi')
    assert StateFile(path, POWER_JOURNAL).load() == RECORDS
    StateFile(path, POWER_JOURNAL).store(())
    assert StateFile(path, POWER_JOURNAL).load() == ()


def _changed(**fields):
    device = {
        "gpu_uuid": "GPU-0",
        "boot_id": "b",
        "driver_start": "1",
        "found_w": 700.0,
        "found_profile": None,
        "limits_w": [1.0],
        "clocks": None,
        "profiles": [],
    }
    return json.dumps({"schema": 1, "devices": [{**device, **fields}]}).encode()


CORRUPT = {
    "empty": b"",
    "cut short": _changed()[:-20],
    "no text": b"\xff\xfe\x00",
    "a list": b"[]",
    "another schema": b'{"schema": 2, "devices": []}',
    "no devices": b'{"schema": 1}',
    "devices of another kind": b'{"schema": 1, "devices": [3]}',
    "no number": _changed(found_w="700"),
    "not finite": _changed(found_w=float("nan")),
    "negative": _changed(limits_w=[-5.0]),
    "a bool": _changed(profiles=[True]),
    "one clock": _changed(clocks=[600]),
    "no name": _changed(gpu_uuid=None),
    "twice": json.dumps({"schema": 1, "devices": json.loads(_changed())["devices"] * 2}).encode(),
    "too long": b" " * 300_000,
    "nested too deep": b"[" * 100_000,
}


@pytest.mark.parametrize("raw", CORRUPT.values(), ids=CORRUPT.keys())
def test_what_is_no_journal_is_kept_aside_and_nothing_is_guessed(path, raw):
    path.write_bytes(raw)
    with pytest.raises(StateDamaged, match=r"kept as .*settings\.json\.corrupt-1.*put their limits back by hand"):
        StateFile(path, POWER_JOURNAL).load()
    assert path.with_name("settings.json.corrupt-1").read_bytes() == raw
    assert StateFile(path, POWER_JOURNAL).load() == ()


def test_only_so_many_are_kept_aside(path):
    for _ in range(9):
        path.write_bytes(b"no journal")
        with pytest.raises(StateDamaged):
            StateFile(path, POWER_JOURNAL).load()
    path.write_bytes(b"no journal")
    with pytest.raises(StateUnwritable, match="9 damaged ones are kept beside it already"):
        StateFile(path, POWER_JOURNAL).load()
    assert path.read_bytes() == b"no journal"


def test_a_disk_that_takes_nothing_is_reported_with_the_remedy(path):
    path.with_name("settings.json.new").mkdir()
    with pytest.raises(StateUnwritable, match=r"settings\.json: Is a directory; make room"):
        StateFile(path, POWER_JOURNAL).store(RECORDS)
    path.mkdir()
    with pytest.raises(StateUnreadable, match="make it readable"):
        StateFile(path, POWER_JOURNAL).load()


def test_a_boot_and_a_driver_load_are_told_apart(tmp_path):
    boot, driver = tmp_path / "boot_id", tmp_path / "nvidia"
    assert read_driver_origin(boot_id=boot, driver=driver) == DriverOrigin()
    boot.write_text("one\n")
    driver.mkdir()
    first = read_driver_origin(boot_id=boot, driver=driver)
    assert first == read_driver_origin(boot_id=boot, driver=driver)
    assert first.boot_id == "one"
    # The kernel makes the directory anew; the old one stays here so that its number is not used again.
    driver.rename(tmp_path / "before")
    driver.mkdir()
    second = read_driver_origin(boot_id=boot, driver=driver)
    assert (second.boot_id, second.driver_start != first.driver_start) == ("one", True)
