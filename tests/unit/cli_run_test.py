"""What eelctl run submits: its resources, its variables, its name; and exit codes as a shell has them."""

import click
import pytest

from eelgrid_controller.cli.jobs import WarningType, build_job, collect_environment
from eelgrid_controller.formatting import format_progress
from eelgrid_protos.messages import (
    AttemptState,
    AttemptStatus,
    JobProgress,
    Mobility,
    StandardInput,
    Workload,
    WorkloadPhase,
)
from eelgrid_protos.schema import list_violations

FLAGS = {
    "gpus": None,
    "gpu_model": "",
    "prefer_gpu_model": "",
    "prefer_gpu_worth": None,
    "gpu_load": "",
    "gpu_slowdown": None,
    "model_data": "",
    "model_data_worth": None,
    "cpus": None,
    "memory": None,
    "time_limit_s": None,
    "expect": None,
    "name": "",
    "replicas": 1,
    "env": (),
    "workdir": "",
    "stop_signal": "TERM",
    "grace_s": 10,
    "log_size": 1000,
    "namespace": "default",
    "user": "ann",
    "queue": "",
    "priority": 0,
}


def build(*command, **flags):
    request = build_job(command, FLAGS | flags)
    assert list(list_violations(request)) == []
    return request.spec


def test_a_command_without_resources_asks_for_one_cpu_and_no_gpu():
    spec = build("/usr/bin/python3.11", "train.py")
    assert (spec.request.cpu_milli, spec.request.gpu_count, spec.request.gpu_milli) == (1000, 0, 0)
    assert (spec.name, spec.user, spec.mobility) == ("python3-11", "ann", Mobility.FIXED)
    assert spec.process.argv == ("/usr/bin/python3.11", "train.py")


@pytest.mark.parametrize(("gpus", "count", "milli"), [(2000, 2, 1000), (1000, 1, 1000), (500, 1, 500)])
def test_gpus_are_whole_ones_or_a_share_of_one(gpus, count, milli):
    request = build("x", gpus=gpus).request
    assert (request.gpu_count, request.gpu_milli, request.cpu_milli) == (count, milli, 0)


@pytest.mark.parametrize("program", ["./a b/c d", "...", "ä", "x" * 300])
def test_any_program_has_a_name_that_the_contract_takes(program):
    assert build(program).name


def test_only_the_usual_variables_are_passed_on_unless_others_are_named():
    own = {"PATH": "/bin", "LC_ALL": "C", "CONDA_PREFIX": "/c", "SECRET": "s", "EELGRID_X": "1", "A.B": "no"}
    usual = {"PATH": "/bin", "LC_ALL": "C", "CONDA_PREFIX": "/c"}
    assert collect_environment((), own) == usual
    assert collect_environment(("SECRET", "N=a=b"), own) == usual | {"SECRET": "s", "N": "a=b"}
    assert collect_environment(("ALL", "CUDA_VISIBLE_DEVICES=0"), own) == usual | {"SECRET": "s"}
    with pytest.raises(click.BadParameter, match="MISSING is not set here; write --env MISSING=VALUE"):
        collect_environment(("MISSING",), own)


def test_a_relative_working_directory_is_that_of_the_caller(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert build("x").process.working_directory == str(tmp_path)
    assert build("x", workdir="sub").process.working_directory == f"{tmp_path}/sub"


@pytest.mark.parametrize(
    ("ends", "code"),
    [
        ([(0, 0, "", 1)], 0),
        ([(None, 9, "", 1)], 137),
        ([(None, 0, "stopped before it started", 1)], 1),
        ([(0, 0, "", 5), (7, 0, "", 9), (None, 15, "stopped", 10)], 7),
        ([], None),
    ],
)
def test_the_exit_code_is_that_of_the_process_that_failed_first(ends, code):
    attempts = tuple(
        AttemptStatus(
            workload_id="w", replica=number, attempt=1, state=AttemptState.ENDED, exit_code=exit_code,
            signal=signal, reason=reason, ended_ns=ended_ns,
        )
        for number, (exit_code, signal, reason, ended_ns) in enumerate(ends)
    )  # fmt: skip
    ended = Workload(workload_id="w", spec=build("x"), phase=WorkloadPhase.FAILED, attempts=attempts)
    assert ended.exit_code == code


@pytest.mark.parametrize(
    ("flags", "kind", "stop"),
    [
        ({}, StandardInput.UNSPECIFIED, "TERM"),
        ({"interactive": True}, StandardInput.PIPE, "TERM"),
        ({"pty": True}, StandardInput.TERMINAL, "HUP"),
        ({"pty": True, "interactive": True, "stop_signal": "INT"}, StandardInput.TERMINAL, "INT"),
    ],
)
def test_a_job_has_the_input_that_was_asked_for_and_with_a_terminal_hangs_up(flags, kind, stop):
    process = build("sh", **({"stop_signal": None} | flags)).process
    assert (process.standard_input, process.stop_signal) == (kind, stop)
    assert (process.terminal_size is not None) == (kind is StandardInput.TERMINAL)


@pytest.mark.parametrize(
    ("text", "found"), [("USR1@120", ("USR1", 120.0)), ("sigint@2m", ("INT", 120.0)), ("USR2", ("USR2", 60.0))]
)
def test_a_warning_is_a_signal_and_how_long_before_the_end(text, found):
    warning = WarningType().convert(text, None, None)
    assert warning == found
    process = build("x", warning=warning).process
    assert (process.warn_signal, process.warn_before_s) == found


@pytest.mark.parametrize("text", ["", "@5", "WINCH@5", "USR1@", "USR1@soon", "USR1@-5"])
def test_what_is_no_warning_is_refused(text):
    with pytest.raises(click.BadParameter):
        WarningType().convert(text, None, None)


@pytest.mark.parametrize(
    ("progress", "text"),
    [
        (None, "-"),
        (JobProgress(step=5), "step 5"),
        (JobProgress(step=50, total=200), "25%"),
        (JobProgress(step=50, total=200, metric=0.123456), "25% 0.1235"),
    ],
)
def test_progress_is_shown_as_percent_or_step(progress, text):
    assert (
        format_progress(Workload(workload_id="w", spec=build("x"), phase=WorkloadPhase.PLACED, progress=progress))
        == text
    )
