"""`python -m bench.openb.times` on a small trace with times: its file, its savings, its refusals."""

import csv

import pytest
from bench.openb.times import main

from eelgrid_controller.replay.openb import NODE_LIST, task_list_name


@pytest.fixture
def data(tmp_path):
    nodes = [f"n{i},64000,262144,4,{'T4' if i % 2 else 'A100'}" for i in range(8)]
    (tmp_path / NODE_LIST).write_text("\n".join(["sn,cpu_milli,memory_mib,gpu,model", *nodes]) + "\n")
    titles = (
        "name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec,qos,pod_phase,creation_time,deletion_time,scheduled_time"
    )
    tasks = [f"p{i:02d},4000,1024,1,{250 + i % 4 * 250},,LS,Running,{i * 50},{i * 50 + 700},0" for i in range(40)]
    (tmp_path / task_list_name("small")).write_text("\n".join([titles, *tasks]) + "\n")
    return tmp_path


def test_savings_are_against_fgd_on_every_fleet(data, capsys):
    asked = ["--data", str(data), "--traces", "small", "--policies", "eelgrid,pwr", "--fleets", "8,4"]
    assert main([*asked, "--seeds", "2", "--processes", "1", "--out", str(data / "out")]) == 0
    rows = list(csv.DictReader((data / "out" / "times.csv").read_text().splitlines()))
    assert [(row["nodes"], row["gpus"], row["policy"]) for row in rows] == [
        (nodes, gpus, policy) for nodes, gpus in (("8", "32"), ("4", "16")) for policy in ("fgd", "eelgrid", "pwr")
    ]
    for fgd, *others in (rows[:3], rows[3:]):
        assert float(fgd["saving_pct"]) == float(fgd["saving_over_idle_pct"]) == 0.0
        for row in others:
            kwh, theirs = float(row["energy_kwh"]), float(fgd["energy_kwh"])
            assert float(row["saving_pct"]) == pytest.approx(100 * (theirs - kwh) / theirs, abs=1e-2)
            assert float(row["energy_over_idle_kwh"]) < kwh
    assert "written to" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (("--policies", "magic"), "there is no policy 'magic'"),
        (("--fleets", "0"), "at least one node"),
        (("--traces", "none"), "openb_pod_list_none.csv"),
    ],
)
def test_what_cannot_be_done_is_refused(data, capsys, changed, said):
    assert main(["--data", str(data), "--traces", "small", "--out", str(data / "out"), *changed]) == 2
    assert said in capsys.readouterr().err
    assert not (data / "out").exists()
