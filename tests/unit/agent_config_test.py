"""The agent's flags: defaults, and one typed error for each mistake."""

import os
from pathlib import Path

import pytest

from eelgrid_agent.__main__ import main
from eelgrid_agent.engine.users import RunAs
from eelgrid_agent.node.config import (
    BadAddress,
    BadEnforcement,
    BadLabel,
    BadLimit,
    BadNodeName,
    BadTlsFlags,
    parse_flags,
)


def test_defaults_bind_to_loopback():
    config = parse_flags([])
    assert (config.controller, config.listen, config.metrics) == ("127.0.0.1:7443", "127.0.0.1:7444", "127.0.0.1:9465")
    assert (config.tls, config.insecure, config.simulate) == (None, False, None)


def test_flags_are_read():
    config = parse_flags(
        [
            "--label",
            "rack=7",
            "--label",
            "row=a=b",
            "--pool",
            "p",
            "--node-name",
            "n-1",
            "--seed",
            "3",
            "--topology",
            "zone-a/rack-7",
        ]
    )
    assert config.topology == ("zone-a", "rack-7")
    assert config.labels == (("rack", "7"), ("row", "a=b"))
    assert (config.pool, config.node_name, config.seed) == ("p", "n-1", 3)


@pytest.mark.parametrize(("text", "power_w"), [("5600W", 5600.0), ("5.6kW", 5600.0)])
def test_a_power_budget_has_a_unit(text, power_w):
    assert parse_flags(["--power-budget", text]).power_budget_w == power_w


def test_a_power_budget_without_a_unit_is_refused(capsys):
    with pytest.raises(SystemExit):
        parse_flags(["--power-budget", "5600"])
    assert "write 5600W or 5600kW" in capsys.readouterr().err


def test_tls_takes_three_files():
    config = parse_flags(["--tls-certificate", "c", "--tls-key", "k", "--tls-authority", "a"])
    assert config.tls.key == Path("k")


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["--controller", "nowhere"], BadAddress),
        (["--listen", ":7"], BadAddress),
        (["--metrics", "127.0.0.1:99999"], BadAddress),
        (["--metrics", "127.0.0.1:٣"], BadAddress),
        (["--label", "rack"], BadLabel),
        (["--topology", "zone//rack"], BadNodeName),
        (["--topology", "zone/-rack"], BadNodeName),
        (["--topology", "/".join("abcdefghi")], BadNodeName),
        (["--topology", "zone", "--simulate", "fleet.json"], BadNodeName),
        (["--faults", "faults.jsonl"], BadEnforcement),
        (["--label", "=7"], BadLabel),
        (["--label", "a=1", "--label", "a=2"], BadLabel),
        (["--label", f"a={'x' * 254}"], BadLabel),
        (["--node-name", "no spaces"], BadNodeName),
        (["--pool=-x"], BadNodeName),
        (["--simulate", "f", "--pool", "p"], BadNodeName),
        (["--tls-key", "k"], BadTlsFlags),
        (["--spool-ticks", "0"], BadLimit),
    ],
)
def test_a_mistake_names_the_flag_and_the_remedy(arguments, error):
    with pytest.raises(error) as caught:
        parse_flags(arguments)
    assert caught.value.violation.field.startswith("--")
    assert caught.value.violation.remedy


def test_a_fleet_shares_the_spool():
    config = parse_flags([])
    assert config.ticks_most(1) == 600
    assert 30 <= config.ticks_most(1213) <= 150
    assert config.ticks_most(20_000) == 30
    assert parse_flags(["--spool-ticks", "5"]).ticks_most(1213) == 5


def test_a_mistake_is_one_line_and_exit_code_2(capsys):
    assert main(["--controller", "x"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_an_unreadable_fleet_file_is_one_line_and_exit_code_2(tmp_path, capsys):
    assert main(["--simulate", str(tmp_path / "none.json")]) == 2
    assert "none.json" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "level"),
    [([], "info"), (["--log-level", "debug"], "debug"), (["--log-level", "error"], "error"), (["--verbose"], "debug")],
)
def test_the_log_level_has_the_controllers_flag_and_the_older_one(flags, level):
    assert parse_flags(flags).log_level == level


def test_users_of_jobs_are_mapped_by_name():
    arguments = ["--run-processes", "--run-as", "owner", "--map-user", "a=b@example=alice", "--map-user", "bob=bob"]
    config = parse_flags(arguments)
    assert (config.run_as, config.job_users) == (RunAs.OWNER, (("a=b@example", "alice"), ("bob", "bob")))


@pytest.mark.parametrize("arguments", [("--run-as", "owner"), ("--map-user", "a=b"), ("--allow-root",)])
def test_users_of_jobs_have_no_meaning_without_processes(arguments):
    with pytest.raises(BadEnforcement, match="is given without --run-processes"):
        parse_flags(arguments)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_root_runs_processes_only_as_their_owners_or_if_it_is_said():
    with pytest.raises(BadEnforcement, match="with --run-as owner"):
        parse_flags(["--run-processes"])
    with pytest.raises(BadEnforcement, match="as root"):
        parse_flags(["--run-processes", "--run-as", "agent"])
    assert parse_flags(["--run-processes", "--run-as", "owner"]).run_processes
    assert parse_flags(["--run-processes", "--allow-root"]).run_processes
