"""Both daemons log lines of one shape, and end with the same exit code where an address is in use."""

import re
import socket

import pytest
from tests.e2e.processes import Cluster, fleet_of
from tests.fork_server import run_program

SHAPE = re.compile(
    r"time=\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z level=(DEBUG|INFO|WARNING|ERROR) logger=[\w.]+ [\w.]+=\S.*"
)


def test_both_daemons_log_lines_of_one_shape(tmp_path):
    # From nothing, as a machine starts them.
    with Cluster(tmp_path, cold=True) as cluster:
        cluster.controller()
        cluster.agent(fleet_of(tmp_path / "fleet.json", ({"name": "n", "cpu_milli": 1000, "memory_bytes": 2**30},)))
        cluster.until_ready(1)
        logs = {path.name: path.read_text().splitlines() for path in tmp_path.glob("*.log")}
    assert len(logs) >= 2
    for name, lines in logs.items():
        # The controller's first line, which programs wait for, is on standard output and is no log line.
        records = [line for line in lines if not line.startswith((" ", "serving listen="))]
        assert records, name
        assert [line for line in records if not SHAPE.fullmatch(line)] == [], name


@pytest.mark.parametrize(
    "program", [("eelgrid_controller", "--data", "data"), ("eelgrid_agent", "--simulate", "x.json")]
)
@pytest.mark.parametrize("option", ["--listen", "--metrics"])
def test_an_address_in_use_is_exit_code_2_of_both(program, option, tmp_path):
    fleet_of(tmp_path / "x.json", ({"name": "n", "cpu_milli": 1000, "memory_bytes": 2**30},))
    module, *arguments = program
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        ports = {"--listen": "127.0.0.1:0", "--metrics": "127.0.0.1:0", option: address}
        options = [text for pair in ports.items() for text in pair]
        done = run_program(module, (*arguments, *options), cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert address in done.stderr
    assert "Traceback" not in done.stderr
