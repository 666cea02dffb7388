"""eelgrid-controller as a process: one line when it serves, one line when it cannot, and a clean stop."""

import asyncio
import contextlib
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from click.testing import CliRunner
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tests.builders.cluster import build_node, build_request
from tests.builders.server import run_controller
from tests.fork_server import run_program

from eelgrid_controller.__main__ import main
from eelgrid_controller.errors import ControllerConfigError
from eelgrid_controller.runtime.config import ControllerConfig
from eelgrid_controller.runtime.sqlite_journal import FILE_NAME, open_journal
from eelgrid_protos import __version__, rpc, transport
from eelgrid_protos.messages import CancelWorkloadRequest, ListWorkloadsRequest

FREE = ("--listen", "127.0.0.1:0", "--metrics", "127.0.0.1:0")


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "eelgrid_controller", *arguments]


@contextlib.contextmanager
def process(data: Path, *arguments: str) -> Iterator[tuple[subprocess.Popen[str], dict[str, str]]]:
    with subprocess.Popen(
        command("--data", str(data), *FREE, *arguments), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as child:
        try:
            assert child.stdout is not None
            line = child.stdout.readline()
            assert line.startswith("serving "), child.stderr.read() if child.stderr and not line else line
            yield child, dict(part.split("=", 1) for part in line.split()[1:])
        finally:
            if child.poll() is None:
                child.kill()


def get(address: str, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://{address}{path}", timeout=5.0) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def test_version() -> None:
    done = subprocess.run(command("--version"), capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == f"eelgrid-controller, version {__version__}"


@pytest.mark.parametrize("stop", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_is_clean_quick_and_loses_nothing(tmp_path: Path, stop: signal.Signals) -> None:
    with process(tmp_path) as (child, said):
        assert (said["nodes"], said["workloads"], said["replayed"]) == ("0", "0", "0")
        with transport.open_blocking_channel(said["listen"], tls=None) as channel:
            api = rpc.build_client(rpc.OPERATOR_SERVICE, channel)
            for number in range(3):
                api.submit_workload(build_request(f"w{number}"), timeout=5.0)
            start_s = time.monotonic()
            child.send_signal(stop)
            assert child.wait(timeout=10.0) == 0
            assert time.monotonic() - start_s < 3.0
        assert child.stderr is not None
        assert "Traceback" not in child.stderr.read()
    with process(tmp_path) as (_, said):
        assert (said["workloads"], said["replayed"], said["checkpoint"]) == ("3", "0", "6")


def test_a_kill_loses_nothing_that_was_answered(tmp_path: Path) -> None:
    with process(tmp_path) as (child, said), transport.open_blocking_channel(said["listen"], tls=None) as channel:
        api = rpc.build_client(rpc.OPERATOR_SERVICE, channel)
        for number in range(20):
            api.submit_workload(build_request(f"w{number}"), timeout=5.0)
        child.kill()
    with process(tmp_path) as (_, said), transport.open_blocking_channel(said["listen"], tls=None) as channel:
        assert (said["workloads"], said["replayed"]) == ("20", "40")
        listing = rpc.build_client(rpc.OPERATOR_SERVICE, channel).list_workloads(ListWorkloadsRequest(), timeout=5.0)
        assert [item.workload_id for item in listing.workloads] == [f"w{number}" for number in range(20)]


def expect_failure(code: int, *words: str, arguments: tuple[str, ...]) -> None:
    done = run_program("eelgrid_controller", arguments)
    assert done.returncode == code, done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    for word in words:
        assert word in last


def test_a_port_in_use_is_one_line(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        expect_failure(
            2, address, "--listen", arguments=("--data", str(tmp_path), "--listen", address, "--metrics", "127.0.0.1:0")
        )
        expect_failure(
            2,
            address,
            "--metrics",
            arguments=("--data", str(tmp_path), "--listen", "127.0.0.1:0", "--metrics", address),
        )


def test_an_open_address_without_tls_is_refused(tmp_path: Path) -> None:
    expect_failure(
        2,
        "--tls-certificate",
        "--insecure",
        arguments=("--data", str(tmp_path), "--listen", "0.0.0.0:0", "--metrics", "127.0.0.1:0"),
    )


def test_open_metrics_are_refused(tmp_path: Path) -> None:
    expect_failure(
        2,
        "0.0.0.0:0",
        "--insecure",
        arguments=("--data", str(tmp_path), "--listen", "127.0.0.1:0", "--metrics", "0.0.0.0:0"),
    )


def test_half_of_the_tls_files_is_a_usage_error(tmp_path: Path) -> None:
    expect_failure(2, "together", arguments=("--data", str(tmp_path), *FREE, "--tls-key", "k.pem"))


def test_a_foreign_journal_is_one_line_and_untouched(tmp_path: Path) -> None:
    with contextlib.closing(sqlite3.connect(tmp_path / FILE_NAME)) as connection:
        connection.execute("CREATE TABLE bookmarks (url TEXT)")
    before = (tmp_path / FILE_NAME).read_bytes()
    expect_failure(1, FILE_NAME, "another program", "--data", arguments=("--data", str(tmp_path), *FREE))
    assert (tmp_path / FILE_NAME).read_bytes() == before


def test_a_damaged_journal_is_one_line_with_the_remedy(tmp_path: Path) -> None:
    with process(tmp_path) as (child, said), transport.open_blocking_channel(said["listen"], tls=None) as channel:
        rpc.build_client(rpc.OPERATOR_SERVICE, channel).submit_workload(build_request("w1"), timeout=5.0)
        child.kill()
    with contextlib.closing(sqlite3.connect(tmp_path / FILE_NAME, isolation_level=None)) as connection:
        connection.execute("UPDATE events SET body = '{}' WHERE seq = 2")
    expect_failure(1, "entry 2 is damaged", "DELETE FROM events", arguments=("--data", str(tmp_path), *FREE))


def test_a_directory_that_is_held_or_cannot_be_is_one_line(tmp_path: Path) -> None:
    with contextlib.closing(open_journal(tmp_path, new_cluster_id="c")):
        expect_failure(1, f"process {os.getpid()}", arguments=("--data", str(tmp_path), *FREE))
    (tmp_path / "file").write_text("")
    expect_failure(2, "--data", arguments=("--data", str(tmp_path / "file" / "x"), *FREE))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("queue_most", 0),
        ("batch_most", -1),
        ("away_grace_s", -1.0),
        ("restart_grace_s", float("nan")),
        ("checkpoint_events_most", 10),
        ("stop_s", 1e9),
    ],
)
def test_numbers_that_no_controller_can_run_with_are_refused(field: str, value: float) -> None:
    with pytest.raises(ControllerConfigError, match=field):
        ControllerConfig(data=Path(), **{field: value})


async def test_metrics_probes_health_and_reflection(tmp_path: Path) -> None:
    async with run_controller(tmp_path) as rig:
        await rig.join(build_node())
        await rig.operators.submit_workload(build_request("w1"))
        status, page = await asyncio.to_thread(get, rig.metrics, "/metrics")
        assert status == 200
        for line in (
            'eelgrid_nodes{state="ready"} 1.0',
            'eelgrid_workloads{phase="placed"} 1.0',
            "eelgrid_agents_connected 1.0",
            "eelgrid_gpus_allocated_ratio 0.5",
            "eelgrid_gpu_turnover_ratio 0.0",
            "eelgrid_decision_duration_seconds_count 1.0",
            "eelgrid_journal_commits_total 2.0",
            "eelgrid_journal_entries_total 4.0",
            "eelgrid_journal_writable 1.0",
        ):
            assert f"{line}\n" in page
        assert "eelgrid_modelled_power_watts" in page
        await rig.operators.cancel_workload(CancelWorkloadRequest(workload_id="w1"))
        assert "eelgrid_gpu_turnover_ratio 1.0\n" in (await asyncio.to_thread(get, rig.metrics, "/metrics"))[1]
        for path, code in (("/livez", 200), ("/readyz", 200), ("/nothing", 404)):
            assert (await asyncio.to_thread(get, rig.metrics, path))[0] == code
        health = health_pb2_grpc.HealthStub(rig.channel)
        for service in ("", "eelgrid.v1.AgentService", "eelgrid.v1.OperatorService"):
            answer = await health.Check(health_pb2.HealthCheckRequest(service=service))
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        await rig.controller.stop()
        with pytest.raises(grpc.RpcError):
            await health.Check(health_pb2.HealthCheckRequest(), timeout=0.5)


async def test_the_metrics_port_survives_rude_peers(tmp_path: Path) -> None:
    async with run_controller(tmp_path) as rig:
        host, port = rig.metrics.split(":")
        for rude in (b"POST / HTTP/1.1\r\n\r\n", b"\xff" * 20_000, b"GET\r\n\r\n", b""):
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(rude)
            writer.write_eof()
            with contextlib.suppress(ConnectionError):
                assert b"200" not in (await reader.read())[:20]
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()
        assert (await asyncio.to_thread(get, rig.metrics, "/livez"))[0] == 200


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--webhook-listen=0.0.0.0:9443", "--kubernetes"], "--webhook-certificate"),
        (["--webhook-listen=0.0.0.0:9443", "--webhook-certificate=a", "--webhook-key=b"], "needs --kubernetes"),
    ],
)
def test_a_webhook_needs_a_certificate_and_somebody_who_ungates(flags, told):
    done = CliRunner().invoke(main, flags)
    assert done.exit_code == 2
    assert told in done.output


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--roles", "require"], "need --tls-authority"),
        (["--grant", "viewer=CN:alice"], "need --tls-authority"),
        (["--roles", "demand", "--tls-authority", "a"], "'permit', 'require'"),
        (
            ["--tls-authority", "a", "--grant", "root=CN:alice"],
            "--grant 'root=CN:alice' begins with no role; write one of",
        ),
        (
            ["--tls-authority", "a", "--roles", "require"],
            "--tls-certificate, --tls-key and --tls-authority belong together: give all three",
        ),
    ],
)
def test_roles_need_certificates_and_sense(flags: list[str], told: str) -> None:
    done = CliRunner().invoke(main, flags)
    assert done.exit_code == 2
    assert told in done.output


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--steer-interval", "0"], "--steer-interval is 0.0; give seconds between 0.1 and 86400"),
        (["--ledger-limit", "0"], "--ledger-limit is 0 bytes; give at least 0.01 GB"),
        (["--kubernetes", "--kubernetes-abilities", "fly"], "--kubernetes-abilities contain 'fly'; use only claims, "),
    ],
)
def test_an_error_of_the_configuration_names_the_option(flags: list[str], told: str) -> None:
    done = CliRunner().invoke(main, flags)
    assert done.exit_code == 2
    assert told in done.output
