"""What `eelgrid-agent mig` prints on narrow and wide terminals, and what it tells who may not change anything."""

import fcntl
import json
import os
import pty
import struct
import sys
import termios
import time
from pathlib import Path

import pytest
from tests.mig_node import MigNode, layout, shown

from eelgrid_agent.cli.mig import format_inspection, format_plan, run_mig_command


@pytest.fixture
def mig(tmp_path, capsys):
    return MigNode(tmp_path, capsys)


def document(mig, command, *arguments):
    return json.loads(mig(command, "-o", "json", *arguments)[1])


@pytest.mark.parametrize("width", [None, 80, 120])
def test_nothing_is_cut_at_any_width(mig, width, tmp_path):
    found = document(mig, "plan", "SITE", "-c", "halves")
    lines = [*format_inspection(found, width), *format_plan(found, width)]
    whole = " ".join([*format_inspection(found), *format_plan(found)]).split()
    # What goes below its row changes the order of the words and nothing else.
    assert sorted(" ".join(lines).split()) == sorted(whole)
    if width is not None:
        # A path is one word, however long.
        assert max(len(line) for line in lines if str(tmp_path) not in line) <= width
    # At 80 columns the UUID of an instance and the reason of a step go below.
    assert any(line.startswith("      MIG-") for line in lines) == (width == 80)
    assert ("        it is requested and does not exist" in lines) == (width == 80)


def test_a_terminal_is_asked_for_its_width_and_a_pipe_is_not(mig, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    parent, child = pty.openpty()
    fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 72, 0, 0))
    with os.fdopen(child, "w") as terminal, os.fdopen(parent, "rb", buffering=0) as screen:
        # What is asked is the terminal of this program's own output.
        own = os.dup(1)
        os.dup2(terminal.fileno(), 1)
        try:
            monkeypatch.setattr(sys, "__stdout__", terminal)
            monkeypatch.setattr(sys, "stdout", terminal)
            assert run_mig_command(["show", "--simulate", str(mig.fleet)]) == 0
        finally:
            os.dup2(own, 1)
            os.close(own)
        lines = screen.read(65_536).decode().splitlines()
    assert "      UUID" in lines
    assert max(len(line) for line in lines if not line.startswith("GPU")) <= 72


def test_output_that_cannot_be_written_is_one_line(mig, monkeypatch):
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("this machine has no full device")
    with full.open("w") as nowhere:
        monkeypatch.setattr(sys, "stdout", nowhere)
        code, _, err = mig("show")
        monkeypatch.undo()
    assert code == 1
    assert err == "eelgrid-agent mig: the output: No space left on device; make room, or write it elsewhere\n"


@pytest.mark.parametrize(
    ("rights", "wanted", "needs"),
    [("mig_config", "1=empty", "root"), ("mig_monitor", "0=3g.20gb@4,1g.5gb@0,1g.5gb@1", "mig_config")],
)
def test_who_may_not_is_refused_before_anything_is_changed(mig, rights, wanted, needs):
    assert mig("apply", "-y", "-l", "0=3g.20gb@4,1g.5gb@0")[0] == 0
    with mig.changed() as state:
        state["rights"] = rights
    before = layout(shown(mig))
    code, out, err = mig("plan", "-l", wanted)
    assert (code, "1. " in out) == (0, True)
    assert f"`mig apply` would be refused: this user has {rights} and the steps take {needs}; run as root" in err
    code, out, err = mig("apply", "-y", "-l", wanted, "-o", "json")
    assert code == 1
    (result,) = json.loads(out)["results"]
    assert (result["status"], result["rule"]) == ("refused", "no-permission")
    assert err.endswith("nothing was changed\n")
    assert layout(shown(mig)) == before


def test_who_may_not_list_processes_is_told_why_everything_counts_as_in_use(mig):
    assert mig("apply", "-y", "-l", "0=3g.20gb@4,1g.5gb@0")[0] == 0
    with mig.changed() as state:
        state["rights"] = "read_only"
    assert "note: this user may not list the processes of MIG instances, so each counts as in use" in mig("show")[1]
    code, out, err = mig("plan", "-l", "0=empty")
    assert (code, "refused by rule busy" in out) == (1, True)
    assert "note: this user may not list the processes" in err


def test_a_change_of_mode_that_another_program_blocks_is_undone_and_reported_once(mig, monkeypatch):
    monkeypatch.setattr(time, "sleep", lambda _: None)
    assert mig("apply", "-y", "-l", "1=3g.40gb@4")[0] == 0
    before = shown(mig)["gpus"][1]["instances"]
    with mig.changed() as state:
        state["gpus"][1]["clients"] = ["dcgm"]
    code, _, err = mig("apply", "-y", "-l", "1=off")
    assert code == 1
    assert err.count("turn MIG mode off: a client, a process or an instance uses it") == 1
    assert "refused by rule in-use: " in err
    assert "undone: 3g.40gb@4" in err
    (now,) = shown(mig)["gpus"][1]["instances"]
    # The slice is there again under its UUID, and whoever held it before holds nothing.
    assert (now["start"], now["profile"]) == (before[0]["start"], before[0]["profile"])
    (was,), (is_,) = before[0]["compute_instances"], now["compute_instances"]
    assert (is_["uuid"], is_["generation"] > was["generation"]) == (was["uuid"], True)


def test_a_layout_that_waits_for_a_reset_is_shown(mig):
    assert mig("apply", "-y", "-l", "0=off")[0] == 1
    found = shown(mig)["gpus"][0]
    assert found["kept"] == {"under_way": "pending", "repairs": 0, "given_up": False}
    assert found["wanted"]["layout"] == "off"
    assert (
        "  under way: the MIG mode waits for a reset of the GPU or a reboot; the layout follows then" in mig("show")[1]
    )


def test_a_rights_word_that_is_none_is_refused(mig):
    assert mig("apply", "-y", "-l", "0=empty")[0] == 0
    with mig.changed() as state:
        state["rights"] = "admin"
    code, _, err = mig("show")
    assert code == 2
    assert "has unknown rights 'admin'; choose one of read_only, mig_monitor, mig_config, root" in err
