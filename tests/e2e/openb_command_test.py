"""`python -m bench.openb` on a small generated trace: its files, its refusals, and the same figures on two processes."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from bench.openb.__main__ import main
from tests.tables import read_csv

from eelgrid_controller.replay.openb import NODE_LIST, task_list_name
from eelgrid_controller.replay.trace_loading import synthesize_openb
from eelgrid_protos.quantities import MIB

ROOT = Path(__file__).resolve().parents[2]
COLUMNS = (
    "trace,policy,seeds,saving_mean_pct,saving_per_gpu_pct,grar_1,alloc_100_pct,alloc_130_pct,"
    "gap_power_pct,gap_alloc_pp,gap_joint_pct,moves,saving_moved_pct,over_idle_kwh,saving_kwh_pct,"
    "decision_p50_us,decision_p99_us"
)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Every tenth node and task of the generated trace, and one list of tasks that share GPUs only."""
    folder = tmp_path_factory.mktemp("data")
    nodes, tasks = synthesize_openb()
    lines = ["sn,cpu_milli,memory_mib,gpu,model"]
    lines += [f"{n.name},{n.cpu_milli},{n.memory_bytes // MIB},{n.gpu_count},{n.gpu_model}" for n in nodes[::40]]
    (folder / NODE_LIST).write_text("\n".join(lines) + "\n")
    huge = replace(tasks[0], name="huge", cpu_milli=1_000_000, gpu_count=8, gpu_milli=1000)  # no node holds it
    kept_of = (
        ("whole", [huge, *tasks[::40]]),
        ("shares", [task for task in tasks[::40] if task.gpu_count < 2]),
    )
    for name, kept in kept_of:
        lines = ["name,cpu_milli,memory_mib,num_gpu,gpu_milli"]
        lines += [f"{t.name},{t.cpu_milli},{t.memory_bytes // MIB},{t.gpu_count},{t.gpu_milli}" for t in kept]
        (folder / task_list_name(name)).write_text("\n".join(lines) + "\n")
    return folder


@pytest.fixture(scope="module")
def timed(data, tmp_path_factory):
    """The list of whole tasks with arrivals a minute apart, each for two hours, on the same nodes."""
    folder = tmp_path_factory.mktemp("timed")
    (folder / NODE_LIST).write_text((data / NODE_LIST).read_text())
    titles, *rows = (data / task_list_name("whole")).read_text().splitlines()
    timed = [f"{titles},creation_time,deletion_time"]
    timed += [f"{row},{60 * i},{60 * i + 7200}" for i, row in enumerate(rows)]
    (folder / task_list_name("whole")).write_text("\n".join(timed) + "\n")
    return folder


@pytest.fixture(scope="module")
def compared(data, tmp_path_factory):
    """The files of one comparison, made in this process."""
    out = tmp_path_factory.mktemp("out")
    arguments = ["--data", str(data), "--traces", "whole,shares", "--policies", "fgd,pwr,pwr200,eelgrid"]
    assert main([*arguments, "--seeds", "2", "--bound-seeds", "2", "--processes", "1", "--out", str(out)]) == 0
    return out


def test_the_files_of_a_comparison(compared):
    rows = read_csv(compared / "summary.csv")
    assert (compared / "summary.csv").read_text().splitlines()[0] == COLUMNS
    assert [(row["trace"], row["policy"], row["seeds"]) for row in rows] == [
        (trace, policy, "2") for trace in ("whole", "shares") for policy in ("fgd", "pwr", "pwr200", "eelgrid")
    ]
    for row in rows:
        assert (float(row["saving_mean_pct"]) == 0.0) is (row["policy"] == "fgd")
        assert 50.0 < float(row["alloc_100_pct"]) <= float(row["alloc_130_pct"]) <= 100.0
        assert float(row["grar_1"]) == pytest.approx(float(row["alloc_100_pct"]) / 100, abs=1e-5)
        assert float(row["gap_power_pct"]) > 0.0
        assert float(row["gap_alloc_pp"]) > -0.01
        assert 0.0 < float(row["decision_p50_us"]) <= float(row["decision_p99_us"])
    assert len(read_csv(compared / "runs.csv")) == 2 * 4 * 2
    assert len(read_csv(compared / "curves.csv")) == 2 * 4 * 261
    assert {row["seed"] for row in read_csv(compared / "bounds.csv")} == {"42", "43"}
    for name in ("whole.png", "shares.png", "saving_and_grar.png"):
        assert (compared / name).stat().st_size > 10_000


def test_no_policy_passes_the_bound_where_all_was_placed(compared):
    """Both are means over the same two seeds."""
    bounds = {}
    for row in read_csv(compared / "bounds.csv"):
        key = row["trace"], float(row["x"])
        bounds[key] = bounds.get(key, 0.0) + float(row["power_w_least"]) / 2
    checked = 0
    for row in read_csv(compared / "curves.csv"):
        x = float(row["x"])
        if x in {0.1, 0.2, 0.4} and float(row["allocated_pct"]) >= 100 * x - 1e-3:
            assert float(row["power_w"]) > bounds[row["trace"], x]
            checked += 1
    assert checked == 2 * 4 * 3


def test_the_joint_bound_is_below_every_policy(compared):
    gaps = read_csv(compared / "joint.csv")
    assert [(row["trace"], row["policy"], row["seed"]) for row in gaps] == [
        (trace, policy, "42") for trace in ("shares", "whole") for policy in ("eelgrid", "fgd", "pwr", "pwr200")
    ]
    assert all(float(row["power_w"]) > float(row["power_w_least"]) > 0.0 for row in gaps)
    told = {(row["trace"], row["policy"]): row["gap_joint_pct"] for row in read_csv(compared / "summary.csv")}
    assert told == {(row["trace"], row["policy"]): row["gap_joint_pct"] for row in gaps}


def test_moves_are_told_with_what_they_save(compared):
    for row in read_csv(compared / "summary.csv"):
        if row["policy"] == "eelgrid":
            assert float(row["moves"]) > 0.0
            assert float(row["saving_moved_pct"]) > float(row["saving_mean_pct"])
        else:
            assert row["moves"] == row["saving_moved_pct"] == ""
        assert row["over_idle_kwh"] == row["saving_kwh_pct"] == ""  # the lists have no times


def test_departures_are_told_in_kwh(timed, tmp_path):
    none = ["--bound-seeds", "0", "--joint-seeds", "0", "--move-seeds", "0", "--no-plots", "--processes", "1"]
    asked = ["--data", str(timed), "--traces", "whole", "--policies", "pwr,eelgrid", "--seeds", "1", *none]
    assert main([*asked, "--times-nodes", "8", "--out", str(tmp_path / "out")]) == 0
    for row in read_csv(tmp_path / "out" / "summary.csv"):
        assert float(row["over_idle_kwh"]) > 0.0
        assert float(row["saving_kwh_pct"]) != 0.0
        assert row["gap_joint_pct"] == row["moves"] == ""


def test_two_processes_give_the_same_curves_as_one(data, compared, tmp_path):
    command = [sys.executable, "-m", "bench.openb", "--data", data, "--traces", "whole,shares", "--out", tmp_path]
    command += ["--policies", "fgd,pwr,pwr200,eelgrid", "--seeds", "2", "--bound-seeds", "0", "--no-plots"]
    command += ["--joint-seeds", "0", "--move-seeds", "0", "--times-seeds", "0"]
    finished = subprocess.run([*command, "--processes", "2"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr
    assert (tmp_path / "curves.csv").read_bytes() == (compared / "curves.csv").read_bytes()
    assert "pwr200" in finished.stdout
    assert {row["gap_power_pct"] for row in read_csv(tmp_path / "summary.csv")} == {""}


def test_drawn_mixes_are_compared_with_fgd_and_the_best_pwr_mix(data, tmp_path, capsys):
    for name in ("default", "gpuspec33"):
        (tmp_path / task_list_name(name)).write_text((data / task_list_name("whole")).read_text())
    (tmp_path / NODE_LIST).write_text((data / NODE_LIST).read_text())
    out = tmp_path / "out"
    arguments = ["--data", str(tmp_path), "--mixes", "2", "--seed", "5", "--seeds", "2", "--processes", "1"]
    status = main([*arguments, "--out", str(out)])
    rows = read_csv(out / "mixes.csv")
    assert [row["mix"] for row in rows] == ["0", "1"]
    for row in rows:
        assert row["pwr"].startswith("pwr")
        assert 0.0 < float(row["cpu_only"]) < 0.6
        assert float(row["over_fgd"]) == pytest.approx(float(row["alloc"]) - float(row["fgd_alloc"]), abs=0.0011)
        assert float(row["over_pwr"]) == pytest.approx(float(row["per_gpu"]) - float(row["pwr_per_gpu"]), abs=0.0011)
    kept = all(float(row["over_fgd"]) >= -0.1 and float(row["over_pwr"]) >= 0.0 for row in rows)
    assert status == (0 if kept else 1)
    assert f"): {'met' if kept else 'MISSED'}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (["--policies", "fgd,magic"], "there is no policy 'magic'; take one of random, "),
        (["--traces", "nowhere"], "there is no trace 'nowhere'; take one that is here: shares, whole"),
        (["--policies", ""], "an empty list of names"),
        (["--seeds", "0"], "1 to 1000 seeds"),
        (["--mixes", "-1"], "draw 1 to 1000 mixes"),
        (["--mixes", "2", "--seed", "-1"], "draw 1 to 1000 mixes"),
        (["--data", "/nonexistent"], f"/nonexistent: has no {NODE_LIST}"),
    ],
)
def test_what_cannot_be_done_is_refused_before_anything_runs(data, tmp_path, capsys, changed, said):
    arguments = ["--data", str(data), "--out", str(tmp_path / "out"), *changed]
    assert main(arguments) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_malformed_list_is_named_with_line_and_column(data, tmp_path, capsys):
    (tmp_path / NODE_LIST).write_text((data / NODE_LIST).read_text())
    (tmp_path / task_list_name("bad")).write_text(
        "name,cpu_milli,memory_mib,num_gpu,gpu_milli\np0,1,1,1,1000\np1,1,1,one,5\n"
    )
    assert main(["--data", str(tmp_path), "--traces", "bad", "--out", str(tmp_path / "out")]) == 2
    assert "openb_pod_list_bad.csv, line 3, column num_gpu: holds 'one'" in capsys.readouterr().err
