"""State files: whole after any crash, damaged ones moved aside, and the bytes of every format of the agent."""

from pathlib import Path

import pytest

from eelgrid_agent.energy.node_energy import ENERGY_OUTBOX
from eelgrid_agent.enforce.mig.journal import MIG_JOURNAL
from eelgrid_agent.enforce.power import POWER_JOURNAL
from eelgrid_agent.kubelet.claim_preparation import CLAIM_JOURNAL
from eelgrid_agent.state_files import (
    MAX_SET_ASIDE,
    MemoryState,
    StateDamaged,
    StateFile,
    StateFormat,
    StateUnreadable,
    StateUnwritable,
    replace_file,
)

# Written by version 0.2.0, before one class wrote all of them.
WRITTEN = Path(__file__).parent.parent / "journals" / "agent_state"
FORMATS = {
    "settings.json": POWER_JOURNAL,
    "mig.json": MIG_JOURNAL,
    "claims.json": CLAIM_JOURNAL,
    "energy.json": ENERGY_OUTBOX,
}
COUNTS = StateFormat(
    title="list of counts",
    schema=3,
    encode=lambda counts: {"counts": list(counts)},
    decode=lambda document: tuple(int(count) for count in document["counts"]),
    empty=tuple,
    bytes_most=200,
    damage_remedy="count again",
    write_consequence="nothing is counted",
)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "counts.json"


@pytest.mark.parametrize("name", FORMATS)
def test_files_of_earlier_versions_load_and_are_stored_with_the_same_bytes(tmp_path, name):
    written = (WRITTEN / name).read_bytes()
    (tmp_path / name).write_bytes(written)
    file = StateFile(tmp_path / name, FORMATS[name])
    value = file.load()
    assert value
    file.store(value)
    assert (tmp_path / name).read_bytes() == written


@pytest.mark.parametrize("name", FORMATS)
def test_every_cut_of_a_file_is_damaged_or_means_the_same(name):
    written, form = (WRITTEN / name).read_bytes(), FORMATS[name]
    value = form.from_bytes(written)
    for length in range(len(written)):
        try:
            assert form.from_bytes(written[:length]) == value
        except ValueError:
            continue


def test_a_missing_file_is_the_empty_value_and_a_stored_one_comes_back(path):
    assert StateFile(path, COUNTS).load() == ()
    StateFile(path, COUNTS).store((1, 2))
    assert StateFile(path, COUNTS).load() == (1, 2)
    assert path.stat().st_mode & 0o777 == 0o600
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b'{"schema": 2, "counts": []}', "schema 2; this version reads schema 3"),
        (b"[]", "schema None"),
        (b'{"schema": 3}', "unexpected content: KeyError"),
        (b'{"schema": 3, "counts": [{}]}', "unexpected content: TypeError"),
        (b"\xff", "utf-8"),
        (b"{" * 150, "Expecting property name"),
        (b" " * 300, "more than 200 bytes"),
    ],
)
def test_a_damaged_file_is_moved_aside_once_and_reported_with_the_remedy(path, content, problem):
    path.write_bytes(content)
    with pytest.raises(StateDamaged, match=problem) as caught:
        StateFile(path, COUNTS).load()
    assert caught.value.path == path.with_name("counts.json.corrupt-1")
    assert caught.value.path.read_bytes() == content
    assert str(caught.value).endswith("counts.json.corrupt-1: count again")
    assert StateFile(path, COUNTS).load() == ()


def test_peek_leaves_a_damaged_file_in_its_place(path):
    path.write_bytes(b"{")
    with pytest.raises(StateDamaged) as caught:
        StateFile(path, COUNTS).peek()
    assert (caught.value.path, path.read_bytes()) == (path, b"{")


def test_a_damaged_file_stays_when_too_many_were_moved_aside(path):
    for number in range(1, MAX_SET_ASIDE + 1):
        path.with_name(f"counts.json.corrupt-{number}").write_bytes(b"")
    path.write_bytes(b"{")
    with pytest.raises(StateUnwritable, match="9 damaged ones are kept beside it already; move it away by hand"):
        StateFile(path, COUNTS).load()
    assert path.read_bytes() == b"{"


def test_a_file_that_cannot_be_read_or_written_says_what_to_do(path):
    path.mkdir()
    with pytest.raises(StateUnreadable, match="Is a directory; make it readable for the agent"):
        StateFile(path, COUNTS).load()
    with pytest.raises(StateUnwritable, match=r"Is a directory; make room .*: nothing is counted"):
        StateFile(path, COUNTS).store((1,))


def test_a_link_in_the_place_of_the_new_file_is_not_followed(path, tmp_path):
    theirs = tmp_path / "theirs"
    theirs.write_bytes(b"theirs")
    path.with_name("counts.json.new").symlink_to(theirs)
    StateFile(path, COUNTS).store((7,))
    assert (theirs.read_bytes(), StateFile(path, COUNTS).load()) == (b"theirs", (7,))


def test_a_file_for_other_readers_has_its_mode_whatever_the_umask(path):
    replace_file(path, b"x", mode=0o644)
    assert path.stat().st_mode & 0o777 == 0o644


def test_state_in_memory_keeps_what_was_stored_last():
    state = MemoryState((1,))
    state.store((2,))
    assert state.load() == (2,)
