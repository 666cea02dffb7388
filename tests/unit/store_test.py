"""The journal on real files: durable, checked, exclusive, and clear about damage."""

import os
import random
import resource
import shutil
import signal
import sqlite3
import stat
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from eelgrid_controller.errors import (
    ControllerConfigError,
    JournalCorrupt,
    JournalForeign,
    JournalFull,
    JournalGone,
    JournalHeld,
    JournalLost,
    JournalTooNew,
    JournalUnavailable,
    LostEntries,
)
from eelgrid_controller.runtime.sqlite_journal import FILE_NAME, FORMAT_VERSION, MARK_NAME, SqliteJournal, open_journal
from eelgrid_controller.state.journal import Checkpoint, JournalEntry, JournalHistory


def opened(data: Path, **options) -> SqliteJournal:
    return open_journal(data, new_cluster_id="cluster-1", **options)


def entries(*names: str) -> list[JournalEntry]:
    return [JournalEntry("node_lost", {"time_ns": 1, "node_name": name}) for name in names]


def names_in(journal: SqliteJournal, after: int = 0) -> list[str]:
    return [entry.body["node_name"] for _, entry in journal.entries_after(after)]


def read_all(data: Path) -> tuple[Checkpoint | None, list[str]]:
    with closing(opened(data)) as journal:
        checkpoint = journal.newest_checkpoint()
        return checkpoint, names_in(journal, checkpoint.seq if checkpoint else 0)


def edit(data: Path, *statements: str) -> None:
    with closing(sqlite3.connect(data / FILE_NAME, isolation_level=None)) as connection:
        for statement in statements:
            connection.execute(statement)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    journal = opened(tmp_path)
    journal.append(entries("a", "b"))
    journal.write_checkpoint(Checkpoint(2, {"nodes": ["a", "b"]}, "digest-2"))
    journal.append(entries("c", "d", "e"))
    journal.close()
    return tmp_path


def test_what_was_appended_comes_back_in_order_after_reopening(data: Path) -> None:
    with closing(opened(data)) as journal:
        assert journal.last_seq == 5
        assert journal.newest_checkpoint() == Checkpoint(2, {"nodes": ["a", "b"]}, "digest-2")
        assert list(journal.entries_after(2)) == list(enumerate(entries("c", "d", "e"), 3))
        assert journal.append(entries("f")) == 6
        assert names_in(journal) == ["a", "b", "c", "d", "e", "f"]
        assert journal.cluster_id == "cluster-1"


def test_numbers_go_on_after_every_entry_was_pruned(tmp_path: Path) -> None:
    with closing(opened(tmp_path, retained=0)) as journal:
        for seq in (1, 2, 3):
            journal.append(entries(f"n{seq}"))
            journal.write_checkpoint(Checkpoint(seq, {}, ""))
    with closing(opened(tmp_path, retained=0)) as journal:
        assert journal.append(entries("n4")) == 4
        assert names_in(journal, 3) == ["n4"]


def test_pruning_keeps_two_checkpoints_all_entries_since_the_older_and_the_recent_past(tmp_path: Path) -> None:
    with closing(opened(tmp_path, retained=4)) as journal:
        for seq in range(1, 11):
            journal.append(entries(f"n{seq}"))
            if seq in (3, 8, 9):
                journal.write_checkpoint(Checkpoint(seq, {"at": seq}, ""))
        # older checkpoint 8, but the last four of then nine entries stay: 6, 7, 8, 9, and 10 came later.
        assert [seq for seq, _ in journal.entries_after(5)] == [6, 7, 8, 9, 10]
    edit(tmp_path, "DELETE FROM checkpoints WHERE seq=9")
    with closing(opened(tmp_path)) as journal:
        assert journal.newest_checkpoint() == Checkpoint(8, {"at": 8}, "")
        assert names_in(journal, 8) == ["n9", "n10"]


def test_a_flipped_bit_in_an_entry_is_named_with_what_is_still_good(data: Path) -> None:
    edit(data, "UPDATE events SET body = replace(body, '\"d\"', '\"x\"') WHERE seq = 4")
    with closing(opened(data)) as journal, pytest.raises(JournalCorrupt) as caught:
        names_in(journal, 2)
    assert caught.value.seq == 4
    assert str(data / FILE_NAME) in str(caught.value)
    assert "the checkpoint at entry 2 and the entries up to 3 are good" in str(caught.value)


def test_the_remedy_for_a_damaged_entry_works(data: Path) -> None:
    edit(data, "UPDATE events SET crc32 = crc32 + 1 WHERE seq = 4", "DELETE FROM events WHERE seq>=4")
    with closing(opened(data, accepts_loss=True)) as journal:
        assert names_in(journal, 2) == ["c"]
        assert journal.append(entries("d2")) == 4


@pytest.mark.parametrize(("gone", "seq"), [("seq = 4", 4), ("seq IN (3, 4)", 3)])
def test_a_missing_entry_is_never_passed_over(data: Path, gone: str, seq: int) -> None:
    edit(data, f"DELETE FROM events WHERE {gone}")
    with closing(opened(data)) as journal, pytest.raises(JournalCorrupt, match="missing") as caught:
        names_in(journal, 2)
    assert caught.value.seq == seq


def test_entries_that_vanished_before_a_checkpoint_are_missed_when_it_is_not_used(data: Path) -> None:
    edit(data, "DELETE FROM events WHERE seq = 1", "DELETE FROM checkpoints")
    with closing(opened(data)) as journal, pytest.raises(JournalCorrupt, match="entries 1 to 1 are missing"):
        names_in(journal, 0)


def test_a_damaged_checkpoint_names_the_way_back_and_loses_nothing(data: Path) -> None:
    edit(data, "UPDATE checkpoints SET body = zeroblob(length(body)) WHERE seq = 2")
    with (
        closing(opened(data)) as journal,
        pytest.raises(JournalCorrupt, match="the beginning and the entries") as caught,
    ):
        journal.newest_checkpoint()
    assert caught.value.seq == 2
    edit(data, "DELETE FROM checkpoints WHERE seq=2")
    with closing(opened(data)) as journal:
        assert journal.newest_checkpoint() is None
        assert names_in(journal) == ["a", "b", "c", "d", "e"]


def test_a_file_that_is_no_database_is_foreign(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).write_bytes(b"these are my tax papers" * 100)
    with pytest.raises(JournalForeign, match="no SQLite file"):
        opened(tmp_path)
    assert (tmp_path / FILE_NAME).read_bytes() == b"these are my tax papers" * 100


def test_a_database_of_another_program_is_foreign_and_left_alone(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / FILE_NAME)) as connection:
        connection.execute("CREATE TABLE bookmarks (url TEXT)")
    before = (tmp_path / FILE_NAME).read_bytes()
    with pytest.raises(JournalForeign, match="another program"):
        opened(tmp_path)
    assert (tmp_path / FILE_NAME).read_bytes() == before


def test_a_newer_format_is_refused_with_both_versions(data: Path) -> None:
    edit(data, f"PRAGMA user_version={FORMAT_VERSION + 1}")
    with pytest.raises(
        JournalTooNew, match=f"version {FORMAT_VERSION + 1}, this controller reads up to {FORMAT_VERSION}"
    ):
        opened(data)


@pytest.mark.parametrize("size", [0, 50, 4096, 6000])
def test_a_truncated_file_is_never_a_beginning(data: Path, size: int) -> None:
    with (data / FILE_NAME).open("r+b") as file:
        file.truncate(size)
    with pytest.raises((JournalCorrupt, JournalForeign)):
        read_all(data)


def test_random_damage_is_found_or_harmless(data: Path) -> None:
    good = (data / FILE_NAME).read_bytes()
    chance = random.Random(7)
    found = 0
    for _ in range(60):
        damaged = bytearray(good)
        for _ in range(20):
            damaged[chance.randrange(len(damaged))] ^= 1 << chance.randrange(8)
        (data / FILE_NAME).write_bytes(damaged)
        try:
            assert read_all(data) == (Checkpoint(2, {"nodes": ["a", "b"]}, "digest-2"), ["c", "d", "e"])
        except (JournalCorrupt, JournalForeign, JournalTooNew, JournalUnavailable):
            found += 1
    assert found > 10


def test_a_second_controller_learns_who_holds_the_directory(data: Path) -> None:
    with closing(opened(data)), pytest.raises(JournalHeld, match=r"process \d+.*stop that one"):
        opened(data)
    opened(data).close()


def test_a_directory_that_cannot_be_is_a_config_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ControllerConfigError, match="--data"):
        opened(tmp_path / "file" / "data")


def test_a_full_file_takes_nothing_keeps_all_and_goes_on_when_there_is_room(tmp_path: Path) -> None:
    bulky = [JournalEntry("bulk", {"text": "x" * 3000})]
    journal = opened(tmp_path, bytes_most=40 * 4096)

    def fill() -> None:
        for _ in range(200):
            journal.append(bulky * 3)

    with pytest.raises(JournalFull, match="free space in"):
        fill()
    accepted = journal.last_seq
    assert accepted > 3
    with pytest.raises(JournalFull):
        journal.probe()
    assert len(list(journal.entries_after(0))) == accepted
    journal.close()
    with closing(opened(tmp_path)) as journal:
        journal.probe()
        assert journal.append(bulky) == accepted + 1
        assert len(list(journal.entries_after(0))) == accepted + 1


def test_a_limit_of_the_operating_system_takes_nothing_and_keeps_all(data: Path) -> None:
    journal = opened(data)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (16 * 4096, hard))
        with pytest.raises((JournalFull, JournalUnavailable)):
            journal.append([JournalEntry("bulk", {"text": "x" * 3000})] * 100)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
    assert names_in(journal) == ["a", "b", "c", "d", "e"]
    assert journal.append(entries("f")) == 6
    journal.close()


_WRITER = textwrap.dedent(
    """
    import sys
    from pathlib import Path
    from eelgrid_controller.runtime.sqlite_journal import open_journal
    from eelgrid_controller.state.journal import Checkpoint, JournalEntry

    journal = open_journal(Path(sys.argv[1]), new_cluster_id="c", retained=5)
    number = journal.last_seq
    while True:
        batch = [JournalEntry("bulk", {"number": number + i, "text": "y" * 500}) for i in range(1, 1 + number % 7 + 1)]
        number = journal.append(batch)
        if number % 5 == 0:
            journal.write_checkpoint(Checkpoint(number, {"number": number}, str(number)))
        sys.stdout.write(f"{number}\\n")
        sys.stdout.flush()
    """
)


def test_a_kill_at_any_moment_loses_nothing_that_was_accepted(tmp_path: Path) -> None:
    chance = random.Random(3)
    told = 0
    for _ in range(8):
        with subprocess.Popen(
            [sys.executable, "-c", _WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True
        ) as child:
            assert child.stdout is not None
            for _ in range(chance.randrange(1, 120)):
                told = int(child.stdout.readline())
            child.kill()
            rest = child.stdout.read().split("\n")[:-1]
            told = int(rest[-1]) if rest else told
        with closing(opened(tmp_path, retained=5)) as journal:
            assert journal.last_seq >= told
            checkpoint = journal.newest_checkpoint()
            start = checkpoint.seq if checkpoint else 0
            assert checkpoint is None or checkpoint.state == {"number": start}
            numbers = [entry.body["number"] for _, entry in journal.entries_after(start)]
            assert numbers == list(range(start + 1, journal.last_seq + 1))
    assert told > 8


def test_a_beginning_that_was_cut_short_is_made_again(tmp_path: Path) -> None:
    opened(tmp_path).close()
    (tmp_path / MARK_NAME).unlink()
    shutil.move(tmp_path / FILE_NAME, tmp_path / "journal.new")
    with closing(opened(tmp_path)) as journal:
        assert journal.last_seq == 0


def test_the_past_begins_at_the_older_checkpoint_and_is_read_beside_the_writer(data: Path) -> None:
    with closing(opened(data, retained=0)) as journal:
        journal.write_checkpoint(Checkpoint(5, {"nodes": list("abcde")}, "digest-5"))
        journal.append(entries("f"))
        with ThreadPoolExecutor(1) as pool:
            past = pool.submit(journal.read_history).result()
        assert past.checkpoint == Checkpoint(2, {"nodes": ["a", "b"]}, "digest-2")
        assert past.entries == tuple(enumerate(entries("c", "d", "e", "f"), 3))
        assert journal.append(entries("g")) == 7


def test_the_past_goes_back_to_the_first_entry_while_that_is_kept(data: Path) -> None:
    with closing(opened(data)) as journal:
        journal.write_checkpoint(Checkpoint(5, {"nodes": list("abcde")}, "digest-5"))
        assert journal.read_history() == JournalHistory(None, tuple(enumerate(entries("a", "b", "c", "d", "e"), 1)))


def test_the_past_of_a_new_journal_is_empty(tmp_path: Path) -> None:
    with closing(opened(tmp_path)) as journal:
        assert journal.read_history() == JournalHistory(None, ())


@pytest.mark.parametrize(
    "damage",
    [
        "UPDATE events SET body = replace(body, 'd', 'x') WHERE seq = 4",
        "DELETE FROM events WHERE seq = 4",
        "DELETE FROM events WHERE seq = 1; UPDATE checkpoints SET digest = 'other'",
    ],
)
def test_a_damaged_past_is_refused(data: Path, damage: str) -> None:
    with closing(opened(data)) as journal:
        edit(data, *damage.split("; "))
        with pytest.raises(JournalCorrupt):
            journal.read_history()


# What was acknowledged is there, or its loss is said


_BUSY = textwrap.dedent(
    """
    import os, sys
    from pathlib import Path
    from eelgrid_controller.runtime.sqlite_journal import open_journal
    from eelgrid_controller.state.journal import JournalEntry

    journal = open_journal(Path(sys.argv[1]), new_cluster_id="c")
    for number in range(int(sys.argv[2])):
        journal.append([JournalEntry("node_lost", {"time_ns": 1, "node_name": f"n{number}", "text": "y" * 900})])
    os.kill(os.getpid(), 9)
    """
)


@pytest.fixture
def killed(tmp_path: Path) -> Path:
    """A journal of 300 entries whose controller was killed: most of them stand in the log alone."""
    subprocess.run([sys.executable, "-c", _BUSY, str(tmp_path), "300"], check=False)
    assert (tmp_path / f"{FILE_NAME}-wal").stat().st_size > 300 * 900
    return tmp_path


def test_a_killed_journal_opens_without_a_word_when_nothing_is_lost(killed: Path) -> None:
    with closing(opened(killed)) as journal:
        assert journal.last_seq == 300
        assert journal.lost is None


def test_a_bit_flip_in_the_middle_of_the_log_is_reported_with_the_entries_that_are_gone(killed: Path) -> None:
    log = killed / f"{FILE_NAME}-wal"
    damaged = bytearray(log.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    log.write_bytes(damaged)
    with pytest.raises(JournalLost, match=r"entries \d+ to 300 were acknowledged and are gone") as caught:
        opened(killed)
    assert 100 < caught.value.lost.first < 200
    assert caught.value.lost.last == 300
    assert "--accept-journal-loss" in str(caught.value)
    assert log.read_bytes() == damaged, "what may still be rescued is left as it was"


def test_a_log_that_was_deleted_is_reported_and_the_loss_must_be_accepted(killed: Path) -> None:
    (killed / f"{FILE_NAME}-wal").unlink()
    with pytest.raises(JournalLost, match="entries 1 to 300 were acknowledged and are gone") as caught:
        opened(killed)
    assert caught.value.lost == LostEntries(1, 300)
    with closing(opened(killed, accepts_loss=True)) as journal:
        assert journal.lost == LostEntries(1, 300)
    with pytest.raises(JournalLost):  # nothing was appended, so nothing has recorded the loss
        opened(killed)
    with closing(opened(killed, accepts_loss=True)) as journal:
        assert journal.append(entries("journal-rolled-back")) == 1
    with closing(opened(killed)) as journal:
        assert journal.lost is None
        assert names_in(journal) == ["journal-rolled-back"]


def test_a_deleted_database_is_no_beginning(data: Path) -> None:
    (data / FILE_NAME).unlink()
    with pytest.raises(JournalLost, match="entries 1 to 5"):
        opened(data)
    assert not (data / FILE_NAME).exists()


def test_a_backup_that_is_put_back_is_reported_by_what_came_after_it(data: Path) -> None:
    shutil.copy(data / FILE_NAME, data / "backup")
    with closing(opened(data)) as journal:
        journal.append(entries("f", "g"))
    shutil.copy(data / "backup", data / FILE_NAME)
    with pytest.raises(JournalLost, match="entries 6 to 7 were acknowledged and are gone: it ends at entry 5"):
        opened(data)


def test_another_history_of_the_same_length_is_reported(data: Path) -> None:
    shutil.copy(data / FILE_NAME, data / "backup")
    with closing(opened(data)) as journal:
        journal.append(entries("f", "g"))
    mark = (data / MARK_NAME).read_bytes()
    shutil.copy(data / "backup", data / FILE_NAME)
    with closing(opened(data, accepts_loss=True)) as journal:
        journal.append(entries("other", "history", "longer"))
    (data / MARK_NAME).write_bytes(mark)
    with pytest.raises(JournalLost, match="entries 3 to 7 are not those that were acknowledged"):
        opened(data)


@pytest.mark.parametrize("spoil", [Path.unlink, lambda path: path.write_bytes(bytes(8192))])
def test_a_mark_that_is_missing_or_damaged_is_reported(data: Path, spoil) -> None:
    spoil(data / MARK_NAME)
    with pytest.raises(JournalLost, match="nobody can tell whether entries after 5 were acknowledged") as caught:
        opened(data)
    assert caught.value.lost == LostEntries(6, None)
    with closing(opened(data, accepts_loss=True)) as journal:
        journal.append(entries("f"))
    assert read_all(data)[1] == ["c", "d", "e", "f"]


@pytest.mark.parametrize("slot", [0, 1])
def test_one_damaged_slot_of_the_mark_harms_nothing(data: Path, slot: int) -> None:
    mark = bytearray((data / MARK_NAME).read_bytes())
    mark[slot * 4096 + 10] ^= 1
    (data / MARK_NAME).write_bytes(mark)
    assert read_all(data)[1] == ["c", "d", "e"]
    assert read_all(data)[1] == ["c", "d", "e"]


def test_entries_that_were_committed_and_not_marked_before_a_kill_are_kept(data: Path) -> None:
    mark = (data / MARK_NAME).read_bytes()
    with closing(opened(data)) as journal:
        journal.append(entries("f"))
    (data / MARK_NAME).write_bytes(mark)
    assert read_all(data)[1] == ["c", "d", "e", "f"]
    (data / f"{FILE_NAME}-wal").unlink(missing_ok=True)
    assert read_all(data)[1] == ["c", "d", "e", "f"]


def test_a_directory_of_before_there_were_marks_starts_and_gets_one(data: Path) -> None:
    edit(data, "DELETE FROM meta WHERE key = 'chain'")
    (data / MARK_NAME).unlink()
    for name in ("f", "g"):
        with closing(opened(data)) as journal:
            assert journal.lost is None
            journal.append(entries(name))
    edit(data, "DELETE FROM events WHERE seq = 7")
    with pytest.raises(JournalLost, match="entries 7 to 7"):
        opened(data)


def test_an_earlier_version_may_have_written_in_between(data: Path) -> None:
    """It knows no mark: its entries come after it, and its checkpoint prunes what the chain begins with."""
    edit(
        data,
        "INSERT INTO events SELECT 6, kind, body, 0 FROM events WHERE seq = 5",
        "INSERT INTO checkpoints SELECT 6, body, digest, 0 FROM checkpoints",
        "DELETE FROM events WHERE seq <= 5",
    )
    with closing(opened(data)) as journal:
        assert journal.last_seq == 6
        journal.append(entries("g"))
    with closing(opened(data)) as journal:
        assert journal.last_seq == 7


def test_the_chain_goes_on_over_checkpoints_and_restarts(tmp_path: Path) -> None:
    for number in range(13):
        with closing(opened(tmp_path, retained=0)) as journal:
            assert journal.lost is None
            journal.append(entries(*(f"n{number}-{index}" for index in range(1 + number % 3))))
            if number % 4 == 3:
                journal.write_checkpoint(Checkpoint(journal.last_seq, {}, ""))
    edit(tmp_path, "UPDATE events SET crc32 = crc32 + 1 WHERE seq = (SELECT max(seq) FROM events)")
    with closing(opened(tmp_path)) as journal, pytest.raises(JournalCorrupt, match="is damaged"):
        names_in(journal, journal.newest_checkpoint().seq)


def test_what_the_mark_refuses_leaves_no_trace_in_the_journal(data: Path) -> None:
    """A disk that takes the commit and not the mark: nobody is told, so nothing may remain."""
    journal = opened(data)
    mark = os.open(data / MARK_NAME, os.O_RDONLY)
    os.dup2(mark, journal._mark._descriptor)  # not writable, as after a remount
    with pytest.raises(JournalUnavailable, match=MARK_NAME):
        journal.append(entries("f"))
    assert names_in(journal) == ["a", "b", "c", "d", "e"]
    assert journal.last_seq == 5
    writable = os.open(data / MARK_NAME, os.O_RDWR)
    os.dup2(writable, journal._mark._descriptor)
    assert journal.append(entries("g")) == 6
    journal.close()
    os.close(mark)
    os.close(writable)
    assert read_all(data)[1] == ["c", "d", "e", "g"]


# Files in the data directory


def test_nobody_but_owner_and_group_may_read_the_data(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        with closing(opened(tmp_path / "new" / "data")) as journal:
            journal.append(entries("a"))
            modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in journal.path.parent.iterdir()}
            assert {FILE_NAME, f"{FILE_NAME}-wal", MARK_NAME, "controller.lock"} <= modes.keys()
            assert set(modes.values()) == {0o640}
            assert stat.S_IMODE(journal.path.parent.stat().st_mode) == 0o750
    finally:
        os.umask(before)


def test_files_of_earlier_versions_are_taken_from_others(data: Path) -> None:
    for name in (FILE_NAME, "controller.lock", "energy.sqlite3", "notes"):
        (data / name).touch()
        (data / name).chmod(0o664)
    opened(data).close()
    modes = {name: stat.S_IMODE((data / name).stat().st_mode) for name in (FILE_NAME, "energy.sqlite3", "notes")}
    assert modes == {FILE_NAME: 0o640, "energy.sqlite3": 0o640, "notes": 0o664}


@pytest.mark.parametrize("name", [FILE_NAME, f"{FILE_NAME}-wal", MARK_NAME, "controller.lock", "energy.sqlite3"])
def test_a_symbolic_link_in_the_data_directory_is_refused_and_not_followed(tmp_path: Path, name: str) -> None:
    target, folder = tmp_path / "target", tmp_path / "data"
    target.write_bytes(b"mine")
    target.chmod(0o666)
    folder.mkdir()
    (folder / name).symlink_to(target)
    with pytest.raises(ControllerConfigError, match=f"symbolic link, {name}"):
        opened(folder)
    assert target.read_bytes() == b"mine"
    assert stat.S_IMODE(target.stat().st_mode) == 0o666


def test_a_lock_file_that_was_removed_lets_no_second_controller_in(data: Path) -> None:
    with closing(opened(data)):
        (data / "controller.lock").unlink()
        with pytest.raises(JournalHeld):
            opened(data)


@pytest.mark.parametrize("name", [FILE_NAME, f"{FILE_NAME}-wal", MARK_NAME, "controller.lock"])
def test_a_file_that_is_removed_in_use_is_noticed_before_anything_more_is_accepted(data: Path, name: str) -> None:
    with closing(opened(data)) as journal:
        journal.append(entries("f"))
        shutil.move(data / name, data / "elsewhere")
        for write in (journal.check_files, journal.probe, lambda: journal.append(entries("g"))):
            with pytest.raises(JournalGone, match=f"{name} was removed or replaced"):
                write()
        shutil.move(data / "elsewhere", data / name)
        journal.probe()
        assert journal.append(entries("g")) == 7


def test_a_data_directory_that_is_deleted_is_noticed(data: Path) -> None:
    with closing(opened(data)) as journal:
        shutil.rmtree(data)
        with pytest.raises(JournalGone):
            journal.append(entries("f"))
