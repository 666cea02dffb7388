"""eelctl describe, version and help, and the groups of commands in help."""

import json
from dataclasses import replace

import pytest
from click.testing import CliRunner

from eelgrid_controller.cli.__main__ import COMMANDS, GROUPS, cli
from eelgrid_protos import __version__
from eelgrid_protos.messages import WhoAmIResponse


@pytest.fixture
def some_work(eelctl):
    eelctl("submit", "--id", "w-1", "--name", "train", "--user", "ada", "--gpu-share", "0.5", "--cpu", "1")


def test_a_workload_is_described_by_what_get_and_explain_know(eelctl, some_work, fake):
    fake.workloads["w-1"] = replace(fake.workloads["w-1"], power_w=12.5)
    text = eelctl("describe", "workload", "train").stdout
    assert text.startswith("w-1: placed\n")
    assert "power      12.5 W measured" in text
    assert "Replica 0 is on node-0, GPU 0. Feasible: 2 nodes." in text
    plain = json.loads(eelctl("describe", "workload", "w-1", "-o", "json").stdout)
    assert plain["workload"]["power_w"] == 12.5
    assert plain["explanation"]["workload"]["workload_id"] == "w-1"


def test_a_node_is_described_with_its_gpus_its_work_and_its_plan(eelctl, some_work):
    text = eelctl("describe", "node", "node-0").stdout
    assert text.startswith("node node-0\n  state ")
    for piece in ("\nGPUs:\n", "\nWorkloads:\n", "w-1  train  ada", "\nPlan:\n", "128 GiB"):
        assert piece in text
    plain = json.loads(eelctl("describe", "node", "node-0", "-o", "json").stdout)
    assert {name: len(part) for name, part in plain.items() if name != "node"} == {
        "gpus": 2,
        "workloads": 1,
        "plans": 1,
    }


@pytest.mark.parametrize("name", ["node-0/0", "GPU-node-0-0"])
def test_a_gpu_is_described_with_who_holds_it(eelctl, some_work, name):
    text = eelctl("describe", "gpu", name).stdout
    assert text.startswith("GPU 0 of node node-0\n")
    assert "w-1  train  ada" in text
    assert [one["workload_id"] for one in json.loads(eelctl("describe", "gpu", name, "-o", "json").stdout)["workloads"]]
    assert "Nothing holds it." in eelctl("describe", "gpu", "node-0/1").stdout


@pytest.mark.parametrize(
    ("kind", "name", "remedy"),
    [
        ("node", "node", "eelctl nodes"),
        ("gpu", "node-0/9", "NODE/INDEX"),
        ("gpu", "x", "NODE/INDEX"),
        ("workload", "x", "eelctl workloads"),
    ],
)
def test_what_is_not_there_is_not_found(eelctl, kind, name, remedy):
    assert remedy in eelctl("describe", kind, name, code=4).stderr


def test_versions_of_both_sides(eelctl, fake):
    fake.caller = WhoAmIResponse(controller_version="9.9")
    assert eelctl("version").stdout == f"eelctl      {__version__}\ncontroller  9.9\n"
    assert json.loads(eelctl("version", "-o", "json").stdout) == {"eelctl": __version__, "controller": "9.9"}


def test_the_version_of_eelctl_needs_no_controller():
    result = CliRunner().invoke(cli, ["--controller", "127.0.0.1:1", "version"], prog_name="eelctl")
    assert (result.exit_code, result.stdout) == (3, f"eelctl      {__version__}\n")
    assert "no controller answers" in result.stderr


def test_help_of_all_and_of_one(eelctl):
    assert eelctl("help").stdout == eelctl("--help").stdout
    assert eelctl("help", "policy", "set").stdout == eelctl("policy", "set", "--help").stdout
    assert "Did you mean" in eelctl("help", "nodez", code=2).stderr
    assert "No such command" in eelctl("help", "policy", "xyzzy", code=2).stderr
    assert "has no commands" in eelctl("help", "nodes", "x", code=2).stderr


def test_every_command_is_in_one_group_of_help(eelctl):
    grouped = [name for names in GROUPS.values() for name in names]
    assert sorted(grouped) == sorted(COMMANDS)
    text = eelctl("--help").stdout
    places = [text.index(f"\n{title}:\n") for title in GROUPS]
    assert places == sorted(places)
