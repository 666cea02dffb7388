"""`eelgrid-agent mig` on a simulated node through the real binding: what it prints, changes, refuses and returns."""

import json
import os
import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from tests.mig_node import MigNode, layout, shown

from eelgrid_agent.enforce.mig.host import read_sysfs_board
from eelgrid_agent.enforce.mig.layout import PciId
from eelgrid_agent.state_files import (
    StateDirectoryLocked,
    StateDirectoryUnusable,
    default_state_directory,
    lock_state_directory,
    replace_file,
)
from eelgrid_protos.messages import Gpu


@pytest.fixture
def mig(tmp_path, capsys):
    return MigNode(tmp_path, capsys)


def test_show_reports_what_stands(mig):
    code, out, err = mig("show")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == "node gpu-7 (simulated)   driver 580.95.05   permission root"
    assert any(line.startswith("GPU 0  NVIDIA A100-SXM4-40GB  GPU-") and line.endswith("  MIG on") for line in lines)
    assert any(line.startswith("  2   3g.20gb  4-7     adopted  0 (3c)   1    -        MIG-") for line in lines)
    assert "  free: slices 1-3, 3 compute; room for 2g.10gb at 2; 1g.10gb at 2; 1g.5gb at 1 2 3" in lines
    assert any(line.startswith("GPU 1  NVIDIA H100") and line.endswith("MIG off") for line in lines)
    assert any(line.startswith("GPU 2  Tesla T4") and line.endswith("no MIG") for line in lines)
    assert not mig.state.exists(), "a look writes nothing"


def test_every_output_says_the_same(mig):
    document = shown(mig)
    code, out, _ = mig("show", "-o", "yaml")
    assert code == 0
    assert yaml.safe_load(out) == document
    assert document["gpus"][0]["board"] == "0x20B010DE"
    assert document["gpus"][0]["free"]["room"]["1g.5gb+me"] == [1, 2, 3]
    (share,) = document["gpus"][0]["instances"][1]["compute_instances"]
    assert (share["slices"], share["generation"], share["processes"]) == (3, 1, [])


def test_plan_tells_the_steps_and_why(mig):
    code, out, err = mig("plan", "SITE", "--config", "halves")
    assert (code, err) == (0, "")
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert "1. destroy compute instance 0 of GPU instance 7 (1g.5gb at 0) its GPU instance is removed" in lines
    assert "2. destroy GPU instance 7 (1g.5gb at 0) it exists and is not requested" in lines
    assert "3. create 3g.20gb at 0 it is requested and does not exist" in lines
    assert "4. create compute instance over all of 3g.20gb at 0 work runs in compute instances" in lines
    assert "1. turn MIG mode on it is off and requested on" in lines
    assert not mig.state.exists()


def test_apply_is_seen_by_a_later_look(mig):
    before = shown(mig)["gpus"][0]["instances"][1]
    code, out, err = mig("apply", "SITE", "-c", "halves", "--yes")
    assert code == 0, err
    assert "  wanted: 3g.20gb@0,3g.20gb@4" in out
    assert [line for line in err.splitlines() if line.startswith("GPU 0")] == [
        "GPU 0: destroy compute instance 0 of GPU instance 7: done",
        "GPU 0: destroy GPU instance 7: done",
        "GPU 0: create 3g.20gb at 0: done, id 1",
        "GPU 0: create compute instance in GPU instance 1: done, id 0",
        "GPU 0: read back: 3g.20gb@0, 3g.20gb@4",
    ]
    document = shown(mig)
    assert layout(document) == [("3g.20gb", 0, "made"), ("3g.20gb", 4, "adopted")]
    assert layout(document, 1) == [("3g.40gb", 0, "made"), ("3g.40gb", 4, "made")]
    assert document["gpus"][0]["instances"][1] == before, "what was wanted already was not touched"
    assert document["gpus"][0]["wanted"]["because"] == "the layout requested last"
    assert document["gpus"][0]["wanted"]["steps"] == []
    code, out, err = mig("apply", "SITE", "-c", "halves")
    assert code == 0
    assert out.count("exists already") == 2
    assert "done" not in err


def test_an_export_applied_again_changes_nothing(mig, tmp_path):
    assert mig("apply", "-y", "-l", "0=2c.3g.20gb@4,1c.3g.20gb@4,2x1g.5gb", "-l", "1=1g.20gb,4g.40gb@0")[0] == 0
    before = shown(mig)
    code, out, err = mig("export", "--label", "now")
    assert (code, err) == (0, "")
    file = tmp_path / "now.yaml"
    file.write_text(out)
    assert mig("assert", str(file)) == (0, "the layout exists\n", "")
    code, out, err = mig("apply", str(file), "--yes")
    assert code == 0
    assert "done" not in err
    assert out.count("exists already") == 2
    after = shown(mig)
    assert [gpu["instances"] for gpu in before["gpus"][:2]] == [gpu["instances"] for gpu in after["gpus"][:2]]
    code, out, _ = mig("export", "-o", "json", "--label", "now")
    assert json.loads(out) == yaml.safe_load(file.read_text())


def test_assert_says_why_not(mig):
    code, out, err = mig("assert", "SITE", "-c", "halves")
    assert (code, out) == (3, "")
    assert "GPU 0 has 1 of 1g.5gb, 1 of 3g.20gb; " in err
    assert "site.yaml:5: mig-configs.halves[0] requests 2 of 3g.20gb" in err
    assert "GPU 1 has MIG off" in err
    assert "GPU 2 is not covered by any entry" in err
    assert mig("assert", "-l", "0=3g.20gb@4,1g.5gb@0") == (0, "the layout exists\n", "")
    code, out, _ = mig("assert", "-o", "json", "-l", "0=empty")
    assert (code, json.loads(out)["stands"]) == (3, False)
    assert mig("assert", "--mode-only", "-l", "0=empty")[0] == 0


def test_what_is_in_use_is_not_touched(mig):
    assert mig("apply", "-y", "-l", "0=3g.20gb@4,1g.5gb@0")[0] == 0
    with mig.changed() as state:
        state["gpus"][0]["processes"] = [{"pid": 4711, "instance": 2, "compute": 0}]
    code, out, _ = mig("show")
    assert code == 0
    assert "pid 4711" in out
    code, out, err = mig("plan", "-l", "0=off")
    assert code == 1
    assert "refused by rule busy: " in out
    before = (mig.state / "devices.json").read_text()
    code, _, err = mig("apply", "-y", "-l", "0=7g.40gb")
    assert code == 1
    assert err.startswith("eelgrid-agent mig: GPU 0: refused by rule busy: GPU instance 2 (3g.20gb at 4) is in use")
    assert err.endswith("nothing was changed\n")
    assert (mig.state / "devices.json").read_text() == before
    # Counts go around it.
    assert mig("apply", "-y", "-l", "0=3g.20gb,2g.10gb")[0] == 0
    assert [place[:2] for place in layout(shown(mig))] == [("2g.10gb", 0), ("3g.20gb", 4)]


def test_what_something_else_made_is_taken_over_only_when_told(mig):
    assert mig("apply", "-y", "-l", "0=3g.20gb@4")[0] == 0
    with mig.changed() as state:
        state["gpus"][0]["instances"].append({"profile": "2g.10gb", "start": 0, "compute": [[2, 0]]})
    assert layout(shown(mig)) == [("2g.10gb", 0, "foreign"), ("3g.20gb", 4, "adopted")]
    code, _, err = mig("apply", "-y", "-l", "0=4g.20gb@0")
    assert code == 1
    assert "refused by rule foreign" in err
    code, _, err = mig("apply", "-y", "--adopt", "-l", "0=4g.20gb@0")
    assert code == 0, err
    assert layout(shown(mig)) == [("4g.20gb", 0, "made")]


def test_a_mode_that_waits_for_a_reset(mig):
    """An A100 takes a new mode only with a reset; until then nothing is placed."""
    code, _, err = mig("apply", "-y", "-l", "0=off")
    assert code == 1
    assert "refused by rule pending: MIG mode off waits for a reset" in err
    assert "MIG on, off after a reset" in mig("show")[1]
    with mig.changed() as state:
        state["gpus"][0]["mig"] = state["gpus"][0]["pending"]
    assert mig("assert", "-l", "0=off")[0] == 0


def test_nobody_is_asked_where_nobody_is(mig, monkeypatch):
    code, _, err = mig("apply", "-l", "0=empty")
    assert code == 2
    assert (
        err
        == "eelgrid-agent mig: --yes: is missing, and there is no terminal to confirm on; add it to change the GPUs\n"
    )
    read, write = os.openpty()
    with os.fdopen(read, "r+b", buffering=0) as terminal, os.fdopen(write, "r") as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        terminal.write(b"n\n")
        code, _, err = mig("apply", "-l", "0=empty")
        assert (code, err.splitlines()[0]) == (
            2,
            "Take 4 steps on 1 GPU? [y/N] eelgrid-agent mig: not confirmed; nothing was changed",
        )
        terminal.write(b"yes\n")
        assert mig("apply", "-l", "0=empty")[0] == 0
    assert layout(shown(mig)) == []


def test_one_at_a_time(mig):
    with lock_state_directory(mig.state, "eelgrid-agent"):
        code, _, err = mig("apply", "-y", "-l", "0=empty")
        assert code == 1
        assert f"{mig.state}: is held by eelgrid-agent (process {os.getpid()}, since 20" in err
        assert "stop it or wait for it, then try again" in err
        assert mig("show")[0] == 0, "looking is free"
    assert mig("apply", "-y", "-l", "0=empty")[0] == 0


@pytest.mark.parametrize(
    ("command", "arguments", "code", "message"),
    [
        ("plan", [], 2, "no layout is requested; give a mig-parted file, or --layout GPU=LAYOUT"),
        ("plan", ["SITE", "-l", "0=off"], 2, "FILE and --layout: both request a layout"),
        ("show", ["-c", "halves"], 2, "--config: names a configuration of a file; give the file"),
        ("plan", ["SITE"], 2, "mig-configs: holds 2 configurations; say which with --config: halves, off"),
        ("plan", ["SITE", "-c", "thirds"], 2, "has no 'thirds'; choose one of: halves, off"),
        ("plan", ["no-such-file"], 2, "no-such-file: cannot be read (No such file or directory)"),
        ("plan", ["-l", "9=off"], 2, "there is no GPU '9'; name one by its UUID or index: 0, 1, 2, or all"),
        ("plan", ["-l", "1=1g.5gb"], 2, "has no such profile; on this part 1 slices go by 1g.10gb or 1g.20gb"),
        ("show", ["--node", "gpu-8"], 2, "has no node 'gpu-8'; name one of: gpu-7"),
        ("apply", ["SITE", "-c", "off", "--state", "/proc/eelgrid"], 1, "/proc/eelgrid/gpu-7: cannot be used"),
    ],
)
def test_a_mistake_is_one_line_that_says_what_to_do(mig, command, arguments, code, message):
    found = mig(command, *arguments)
    assert found[0] == code
    assert message in found[2]
    assert found[2].startswith("eelgrid-agent mig: ")
    assert found[2].count("\n") == 1


def test_a_damaged_state_is_reported_and_kept(mig):
    assert mig("apply", "-y", "-l", "0=empty")[0] == 0
    (mig.state / "mig.json").write_text("{")
    code, out, _ = mig("show")
    assert code == 0
    assert "mig.json: " in out
    assert "`mig apply` moves it aside" in out
    code, _, err = mig("apply", "-y", "-l", "0=3g.20gb")
    assert code == 1
    assert "by rule journal: " in err
    assert [path.read_text() for path in mig.state.glob("mig.json.corrupt*")] == ["{"]
    assert mig("apply", "-y", "-l", "0=3g.20gb")[0] == 0
    devices = mig.state / "devices.json"
    for text, message in (("{", "does not describe this node"), ('{"schema": 2}', "does not have schema 1")):
        devices.write_text(text)
        code, _, err = mig("show")
        assert code == 2
        assert message in err
        assert "remove it to start again from the fleet file" in err


def test_the_state_directory(tmp_path):
    assert default_state_directory({}, root=True) == Path("/var/lib/eelgrid")
    assert default_state_directory({"STATE_DIRECTORY": "/a:/b"}, root=True) == Path("/a")
    assert default_state_directory({"XDG_STATE_HOME": "/x", "HOME": "/h"}, root=False) == Path("/x/eelgrid")
    assert default_state_directory({"HOME": "/h"}, root=False) == Path("/h/.local/state/eelgrid")
    with lock_state_directory(tmp_path / "a" / "b", "one") as directory:
        assert stat.S_IMODE(directory.stat().st_mode) & 0o007 == 0
        with (
            pytest.raises(StateDirectoryLocked, match=r"is held by one \(process"),
            lock_state_directory(directory, "two"),
        ):
            pass
        (directory / "agent.lock").write_text("half a no")
        with (
            pytest.raises(StateDirectoryLocked, match="is held by another process"),
            lock_state_directory(directory, "two"),
        ):
            pass
    with lock_state_directory(directory, "two"):
        assert json.loads((directory / "agent.lock").read_text())["who"] == "two"
    (tmp_path / "file").write_text("")
    with pytest.raises(StateDirectoryUnusable, match="cannot be used"), lock_state_directory(tmp_path / "file", "one"):
        pass


def test_a_lock_file_that_was_removed_lets_no_second_holder_in(tmp_path):
    with lock_state_directory(tmp_path, "one"):
        (tmp_path / "agent.lock").unlink()
        with pytest.raises(StateDirectoryLocked), lock_state_directory(tmp_path, "two"):
            pass
    with lock_state_directory(tmp_path, "three"):
        pass


@pytest.mark.parametrize("name", ["agent.lock", "settings.json", "mig.json.new"])
def test_a_symbolic_link_in_the_state_directory_is_refused_and_not_followed(tmp_path, name):
    target, folder = tmp_path / "target", tmp_path / "state"
    target.write_bytes(b"mine")
    folder.mkdir()
    (folder / name).symlink_to(target)
    with pytest.raises(StateDirectoryUnusable, match=f"symbolic link, {name}"), lock_state_directory(folder, "one"):
        pass
    assert target.read_bytes() == b"mine"


def test_a_journal_is_not_written_through_a_link_that_came_later(tmp_path):
    target = tmp_path / "target"
    target.write_bytes(b"mine")
    (tmp_path / "settings.json.new").symlink_to(target)
    (tmp_path / "settings.json").symlink_to(target)
    replace_file(tmp_path / "settings.json", b"ours")
    assert target.read_bytes() == b"mine"
    assert (tmp_path / "settings.json").read_bytes() == b"ours"
    assert not (tmp_path / "settings.json").is_symlink()


def test_a_lock_dies_with_its_holder(tmp_path):
    """Killed in any way, for the kernel closes the file."""
    code = (
        "import os, sys; from pathlib import Path; from eelgrid_agent.state_files import lock_state_directory\n"
        "with lock_state_directory(Path(sys.argv[1]), 'a child'): os.kill(os.getpid(), 9)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False)
    assert done.returncode == -9
    assert json.loads((tmp_path / "agent.lock").read_text())["who"] == "a child"
    with (
        lock_state_directory(tmp_path, "a parent"),
        pytest.raises(StateDirectoryLocked, match="a parent"),
        lock_state_directory(tmp_path, "another"),
    ):
        pass


def test_boards_are_read_from_the_kernel(tmp_path):
    gpu = Gpu(uuid="GPU-1", index=0, product="p", model="m", pci_bus_id="00000000:3B:00.0")
    folder = tmp_path / "0000:3b:00.0"
    folder.mkdir()
    names = {"device": 0x20B2, "vendor": 0x10DE, "subsystem_device": 0x1533, "subsystem_vendor": 0x10DE}
    for name, number in names.items():
        (folder / name).write_text(f"0x{number:04x}\n")
    assert read_sysfs_board(gpu, tmp_path) == PciId(0x20B2, 0x10DE, (0x1533, 0x10DE))
    (folder / "vendor").write_text("none\n")
    assert read_sysfs_board(gpu, tmp_path) is None
    assert read_sysfs_board(Gpu(uuid="GPU-1", index=0, product="p", model="m"), tmp_path) is None


def test_the_page_says_how_it_is(mig, tmp_path):
    page = (Path(__file__).resolve().parents[2] / "docs/how-to/mig-layouts.md").read_text("utf-8")
    site = tmp_path / "page.yaml"
    site.write_text(page.split('```yaml title="site.yaml"\n')[1].split("```")[0])
    fleet = re.search(r"echo '(\{.*?\})' > fleet.json", page, re.DOTALL)
    mig.fleet.write_text(json.dumps({"nodes": [{**json.loads(fleet[1])["nodes"][0], "name": "gpu-7"}]}))
    (words,) = re.findall(r"mig apply --yes --simulate fleet.json (.*)", page)
    assert mig("apply", "--yes", *words.split())[0] == 0
    assert [[place[:2] for place in layout(shown(mig), index)] for index in (0, 1)] == [
        [("1g.5gb", 0), ("1g.5gb", 1), ("3g.20gb", 4)],
        [("3g.40gb", 0), ("3g.40gb", 4)],
    ]
    assert mig("apply", "--yes", str(site), "-c", "mixed")[0] == 0
    for text in re.findall(r"^\| `([0-9a-z]+=[^`]+)` \|", page, re.MULTILINE):
        assert mig("plan", "-l", text)[0] == 0, text
    for code in ("0", "1", "2", "3", "130"):
        assert f"| {code} |" in page
