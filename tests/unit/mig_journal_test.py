"""The MIG journal's file: whole or not there, and never guessed from."""

import pytest
from bench.fault_world import Crash
from hypothesis import given, settings
from hypothesis import strategies as st

from eelgrid_agent.enforce.mig.host import MachineResetInfo, find_reset_obstacle, read_machine
from eelgrid_agent.enforce.mig.journal import (
    MIG_JOURNAL,
    InstanceOrigin,
    MigLease,
    MigRecord,
    MigRecordStore,
    TransitionIntent,
    TransitionPhase,
)
from eelgrid_agent.enforce.mig.layout import InstancePart, MigLayout
from eelgrid_agent.state_files import StateDamaged, StateFile, StateUnreadable, StateUnwritable
from eelgrid_protos.catalogue.loader import load_catalogue

numbers = st.integers(0, 2**31)
parts = st.builds(
    InstancePart, profile_id=numbers, start=numbers, size=numbers, compute=st.lists(numbers, max_size=7).map(tuple)
)
layouts = st.builds(MigLayout, mig_enabled=st.booleans(), parts=st.lists(parts, max_size=7).map(tuple))
places = st.tuples(numbers, numbers)
records = st.builds(
    MigRecord,
    uuid=st.text(max_size=40),
    boot_id=st.text(max_size=40),
    target=st.none() | layouts,
    intent=st.none()
    | st.builds(
        TransitionIntent,
        phase=st.sampled_from(TransitionPhase),
        before=layouts,
        wanted=layouts,
        tries=st.integers(0, 9),
    ),
    known=st.dictionaries(places, st.sampled_from(InstanceOrigin), max_size=7),
    generations=st.dictionaries(places, numbers, max_size=7),
    leases=st.frozensets(st.builds(MigLease, uuid=st.text(max_size=40), generation=numbers), max_size=3),
    repairs=st.integers(0, 9),
    gave_up=st.booleans(),
)


@settings(deadline=None, max_examples=50)
@given(st.lists(records, max_size=2))
def test_what_is_written_is_read(kept):
    assert MIG_JOURNAL.from_bytes(MIG_JOURNAL.to_bytes(tuple(kept))) == tuple(kept)


@settings(deadline=None, max_examples=50)
@given(records, st.data())
def test_a_file_with_any_byte_cut_off_or_changed_is_read_right_or_refused(record, data):
    content = bytearray(MIG_JOURNAL.to_bytes((record,)))
    if data.draw(st.booleans()):
        del content[data.draw(st.integers(0, len(content) - 1)) :]
    else:
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    try:
        kept = MIG_JOURNAL.from_bytes(bytes(content))
    except ValueError:
        return
    assert kept == (record,)


def test_nothing_is_there_at_first_and_a_store_replaces_the_whole(tmp_path):
    journal = StateFile(tmp_path / "state" / "mig.json", MIG_JOURNAL)
    assert journal.load() == ()
    for uuid in ("GPU-1", "GPU-2"):
        journal.store((MigRecord(uuid=uuid),))
    assert journal.load() == (MigRecord(uuid="GPU-2"),)
    assert [path.name for path in (tmp_path / "state").iterdir()] == ["mig.json"]
    assert (tmp_path / "state" / "mig.json").stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b'{"schema": 2, "gpus": []}', b'{"schema": 1, "gpus": [{}]}', b"\xff"]
)
def test_a_corrupt_file_is_set_aside_told_and_not_guessed_from(tmp_path, content):
    path = tmp_path / "mig.json"
    path.write_bytes(content)
    ledger = MigRecordStore(StateFile(path, MIG_JOURNAL))
    for _ in range(2):
        with pytest.raises(StateDamaged, match=r"mig\.json\.corrupt.*restart the agent"):
            ledger.get("GPU-0")
    assert (tmp_path / "mig.json.corrupt-1").read_bytes() == content
    assert MigRecordStore(StateFile(path, MIG_JOURNAL)).get("GPU-0") == MigRecord(uuid="GPU-0")


def test_a_half_written_file_beside_the_journal_is_no_journal(tmp_path):
    """As a crash before the rename leaves it."""
    journal = StateFile(tmp_path / "mig.json", MIG_JOURNAL)
    journal.store((MigRecord(uuid="GPU-0"),))
    (tmp_path / "mig.json.new").write_bytes(b'{"sch')
    assert journal.load() == (MigRecord(uuid="GPU-0"),)
    journal.store((MigRecord(uuid="GPU-1"),))
    assert journal.load() == (MigRecord(uuid="GPU-1"),)


def test_a_disk_that_takes_nothing_is_an_error_with_a_remedy_and_nothing_is_believed(tmp_path):
    (tmp_path / "state").write_text("a file where the directory should be")
    journal = StateFile(tmp_path / "state" / "mig.json", MIG_JOURNAL)
    with pytest.raises(StateUnwritable, match="nothing is changed before"):
        journal.store(())
    with pytest.raises(StateUnreadable):
        journal.load()


def test_the_ledger_believes_nothing_that_was_not_stored():
    class Dying:
        def load(self):
            return ()

        def store(self, records):
            raise Crash("power cut")

    ledger = MigRecordStore(Dying())
    with pytest.raises(Crash):
        ledger.put(MigRecord(uuid="GPU-0", repairs=1))
    assert ledger.get("GPU-0").repairs == 0


@pytest.mark.parametrize(
    ("cpuinfo", "modules", "machine"),
    [
        ("flags\t\t: fpu vme sse", "nvidia_uvm 1 0 - Live\n", MachineResetInfo()),
        ("flags\t\t: fpu hypervisor sse", "", MachineResetInfo(virtual=True)),
        (
            "processor: 0\nflags\t: fpu",
            "nvidia_modeset 9 3 nvidia_drm\nnvidia_drm 73728 4 - Live\n",
            MachineResetInfo(display_users=4),
        ),
    ],
)
def test_f03_f04_the_machine_is_read_from_the_kernel(tmp_path, cpuinfo, modules, machine):
    assert read_machine(tmp_path) == MachineResetInfo()
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/cpuinfo").write_text(cpuinfo)
    (tmp_path / "proc/modules").write_text(modules)
    assert read_machine(tmp_path) == machine
    geometries = load_catalogue().geometries
    assert bool(find_reset_obstacle(geometries["a100-40gb"], machine)) == (machine != MachineResetInfo())
    assert find_reset_obstacle(geometries["h100-80gb-sxm"], machine) == ""
