"""Lists say who: names and users beside ids, names where ids are typed, and what ended only if asked for."""

import json
from dataclasses import replace

import pytest

from eelgrid_protos.messages import WorkloadPhase


@pytest.fixture
def trains(eelctl):
    """Two live workloads and one that ended are called train; one of each other name."""
    for key, name, user in (("w-1", "train", "ada"), ("w-2", "train", "bob"), ("w-3", "serve", "ada")):
        eelctl("submit", "--id", key, "--name", name, "--user", user, "--gpu-share", "0.5", "--cpu", "1")
    eelctl("submit", "--id", "w-4", "--name", "train", "--cpu", "1")
    eelctl("cancel", "w-4")
    eelctl("submit", "--id", "w-5", "--name", "old", "--cpu", "1")
    eelctl("cancel", "w-5")


def listed(eelctl, *arguments):
    return [one["workload_id"] for one in json.loads(eelctl("workloads", *arguments, "-o", "json").stdout)]


def test_a_list_has_what_is_live_unless_all_is_asked_for(eelctl, trains):
    assert listed(eelctl) == ["w-1", "w-2", "w-3"]
    assert listed(eelctl, "--all") == ["w-1", "w-2", "w-3", "w-4", "w-5"]
    assert listed(eelctl, "--phase", "cancelled") == ["w-4", "w-5"]
    assert "exclude each other" in eelctl("workloads", "--all", "--phase", "placed", code=2).stderr
    assert "--all includes those that ended" in eelctl("workloads", "--name", "old").stderr


def test_a_watch_shows_how_live_work_ends_and_not_what_had_ended(eelctl, trains, fake):
    shown = [json.loads(line) for line in eelctl("workloads", "-w", "-o", "json").stdout.splitlines()]
    assert [one["workload_id"] for one in shown] == ["w-1", "w-2", "w-3"]
    ended = replace(fake.workloads["w-3"], phase=WorkloadPhase.CANCELLED, revision=9)
    fake.workloads["w-3-again"] = ended
    shown = [json.loads(line) for line in eelctl("workloads", "-w", "-o", "json").stdout.splitlines()]
    assert [(one["workload_id"], one["phase"]) for one in shown[2:]] == [("w-3", "placed"), ("w-3", "cancelled")]
    assert eelctl("workloads", "-w", "--all", "--no-headers").stdout.count("\n") == 6


def test_a_name_stands_for_an_id_where_it_is_unique(eelctl, trains, fake):
    assert eelctl("get", "serve").stdout.startswith("w-3: placed")
    assert eelctl("explain", "serve").stdout.startswith("w-3 (batch_job serve)")
    assert eelctl("get", "old").stdout.startswith("w-5: cancelled"), "one that ended, as no live one has the name"
    eelctl("cancel", "w-2")
    assert eelctl("get", "train").stdout.startswith("w-1: placed"), "the live one of three"
    assert eelctl("cancel", "train", "serve", "--yes").stdout == "w-1: cancelled\nw-3: cancelled\n"


def test_an_id_comes_before_a_name(eelctl, trains, fake):
    eelctl("submit", "--id", "other", "--name", "w-1", "--cpu", "1")
    fake.calls.clear()
    assert eelctl("get", "w-1").stdout.startswith("w-1: placed")
    assert fake.calls == ["get_workload"]


@pytest.mark.parametrize("command", [("get",), ("cancel",), ("explain",), ("whatif", "--cancel")])
def test_a_name_of_several_is_refused_with_all_of_them(eelctl, trains, fake, command):
    said = eelctl(*command, "train", code=5).stderr
    assert "2 workloads are called 'train': w-1 (placed of ada), w-2 (placed of bob)" in said
    assert "next: give the id of one; `eelctl workloads --name train` lists them" in said
    assert listed(eelctl) == ["w-1", "w-2", "w-3"], "nothing was done"


@pytest.mark.parametrize("name", ["nobody", "no such name!"])
def test_a_name_that_none_has_is_not_found_or_invalid(eelctl, trains, name):
    assert name in eelctl("get", name, code=4 if name == "nobody" else 5).stderr


def test_gpus_show_who_holds_them(eelctl, trains):
    title, first, second = eelctl("gpus").stdout.splitlines()
    assert title.split()[-3:] == ["WORKLOADS", "NAME", "USER"]
    assert first.split()[-3:] == ["3", "train,serve", "ada,bob"]
    assert second.split()[-3:] == ["0", "-", "-"]


def test_what_get_prints_can_be_submitted_again(eelctl, trains, fake, tmp_path):
    fake.workloads["w-1"] = replace(fake.workloads["w-1"], power_w=12.0, lost_replicas=(0,))
    file = tmp_path / "w.yaml"
    file.write_text(eelctl("get", "w-1", "-o", "yaml").stdout)
    assert eelctl("submit", "-f", str(file)).stdout.startswith("w-1: placed")
