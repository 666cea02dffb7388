"""The checkpoint helper of the client: whole files only, the note for the agent, and the signal that asks to stop."""

import json
import os
import signal

import pytest

from eelgrid import checkpoint
from eelgrid_controller.queueing.checkpoint_interval import compute_checkpoint_interval


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("EELGRID_CHECKPOINT_DIR", str(tmp_path / "kept"))
    return tmp_path / "kept"


def test_a_checkpoint_replaces_the_one_before_once_it_is_whole(folder):
    assert checkpoint.latest() is None
    checkpoint.save(lambda path: path.write_text("one"))

    def fail(path):
        path.write_text("tw")
        raise RuntimeError

    with pytest.raises(RuntimeError):
        checkpoint.save(fail)
    assert checkpoint.latest().read_text() == "one"
    checkpoint.save(lambda path: path.write_text("three"))
    assert checkpoint.latest().read_text() == "three"
    assert sorted(path.name for path in folder.iterdir()) == [".eelgrid-checkpoint", "checkpoint"]


def test_a_folder_is_a_checkpoint_and_there_is_one_at_every_moment(folder):
    def write(text):
        def into(path):
            path.mkdir()
            (path / "rank-0").write_text(text)

        return into

    checkpoint.save(write("one"))
    checkpoint.save(write("two"))
    found = checkpoint.latest()
    assert (found / "rank-0").read_text() == "two"
    # Killed between the two renames.
    found.rename(found.with_name(".checkpoint.old"))
    assert (checkpoint.latest() / "rank-0").read_text() == "two"
    checkpoint.save(write("three"))
    assert (checkpoint.latest() / "rank-0").read_text() == "three"
    assert not (folder / ".checkpoint.old").exists()


def test_a_checkpoint_that_a_framework_wrote_is_noted(folder):
    checkpoint.folder()
    checkpoint.note()
    assert json.loads((folder / ".eelgrid-checkpoint").read_text())["time_ns"] > 0


def test_the_signal_of_the_job_asks_to_stop_and_is_handled_as_before_afterwards(monkeypatch):
    monkeypatch.setenv("EELGRID_PREEMPT_SIGNAL", "USR2")
    monkeypatch.setenv("EELGRID_GRACE_S", "60")
    before = signal.getsignal(signal.SIGUSR2)
    with checkpoint.on_preempt() as stop:
        assert not stop
        assert stop.seconds_left == 60.0
        os.kill(os.getpid(), signal.SIGUSR2)
        assert stop
        assert 59.0 < stop.seconds_left <= 60.0
    assert signal.getsignal(signal.SIGUSR2) is before


def test_without_eelgrid_it_works_in_the_working_directory(tmp_path, monkeypatch):
    for name in ("EELGRID_CHECKPOINT_DIR", "EELGRID_ATTEMPT", "EELGRID_PREEMPT_SIGNAL", "EELGRID_GRACE_S"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    assert checkpoint.attempt() == 0
    with checkpoint.on_preempt() as stop:
        checkpoint.save(lambda path: path.write_text("x"))
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop
    assert (tmp_path / "checkpoints" / "checkpoint").read_text() == "x"


@pytest.fixture
def fresh_saves(monkeypatch):
    for name in ("EELGRID_INTERRUPTED_EVERY_S", "EELGRID_CHECKPOINT_INTERVAL"):
        monkeypatch.delenv(name, raising=False)
    saves = checkpoint._Saves()
    monkeypatch.setattr(checkpoint, "_saves", saves)
    return saves


def test_the_interval_is_that_of_earlier_runs_until_a_save_of_this_one_was_measured(folder, monkeypatch, fresh_saves):
    assert checkpoint.interval() == 600.0
    monkeypatch.setenv("EELGRID_CHECKPOINT_INTERVAL", "1320")
    monkeypatch.setenv("EELGRID_INTERRUPTED_EVERY_S", "21600")
    assert checkpoint.interval() == 1320.0
    checkpoint.folder()
    checkpoint.note(30.0)
    checkpoint.note(50.0)
    assert checkpoint.interval() == pytest.approx(compute_checkpoint_interval(40.0, 21600.0))
    assert json.loads((folder / ".eelgrid-checkpoint").read_text())["seconds"] == 40.0
    monkeypatch.setenv("EELGRID_INTERRUPTED_EVERY_S", "10")
    assert checkpoint.interval() == 10.0


def test_a_save_is_measured(folder, fresh_saves):
    checkpoint.save(lambda path: path.write_text("one"))
    assert json.loads((folder / ".eelgrid-checkpoint").read_text())["seconds"] >= 1e-3


def test_a_checkpoint_is_due_an_interval_after_the_last_one(folder, monkeypatch, fresh_saves):
    monkeypatch.setenv("EELGRID_CHECKPOINT_INTERVAL", "100")
    assert not checkpoint.is_due()
    fresh_saves.last_s -= 100.0
    assert checkpoint.is_due()
    checkpoint.folder()
    checkpoint.note()
    assert not checkpoint.is_due()
