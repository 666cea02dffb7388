"""A replay through real processes while the controller is killed: nothing lost, nothing placed twice."""

import json
import signal
import socket
import subprocess
import sys
import time
from collections import Counter

import pytest

from eelgrid_controller.replay.fleet import write_fleet
from eelgrid_controller.replay.locate import Trace, TraceSource
from eelgrid_controller.replay.synthesize import synthesize
from eelgrid_protos import catalogue, faults, rpc, transport
from eelgrid_protos.messages import GetSummaryRequest, ListNodesRequest, ListWorkloadsRequest, WorkloadPhase

TASKS = 600


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Cluster:
    """A controller and a fleet as processes, and the operators' API."""

    def __init__(self, folder):
        self.folder = folder
        self.address = f"127.0.0.1:{free_port()}"
        self.metrics = f"127.0.0.1:{free_port()}"
        self.processes = []

    def start(self, name, module, *arguments):
        log = (self.folder / f"{name}-{len(self.processes)}.log").open("wb")
        command = [sys.executable, "-m", module, *arguments]
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, cwd=self.folder)
        log.close()
        self.processes.append(process)
        return process

    def controller(self):
        data = str(self.folder / "data")
        return self.start(
            "controller", "eelgrid_controller", "--listen", self.address, "--metrics", self.metrics, "--data", data
        )

    def fleet(self, rows):
        write_fleet(self.folder / "fleet.json", rows, catalogue.load().products)
        return self.start(
            "fleet", "eelgrid_agent", "--controller", self.address, "--listen", "127.0.0.1:0", "--metrics",
            f"127.0.0.1:{free_port()}", "--simulate", str(self.folder / "fleet.json"),
        )  # fmt: skip

    def replay(self):
        command = [sys.executable, "-m", "eelgrid_controller.cli", "--controller", self.address, "--timeout", "5"]
        command += ["replay", "--trace", "generated", "--limit", str(TASKS), "--in-flight", "4", "-o", "json"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.processes.append(process)
        return process

    def end(self):
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.communicate()

    def until(self, reached, timeout_s=60.0):
        """The first summary that fulfils a condition, over channels that survive nobody answering."""
        deadline_s = time.monotonic() + timeout_s
        with transport.blocking_channel(self.address, tls=None) as channel:
            client = rpc.client(rpc.OPERATOR_SERVICE, channel)
            while time.monotonic() < deadline_s:
                try:
                    summary = client.get_summary(GetSummaryRequest(), timeout=2.0).summary
                    if reached(summary):
                        return summary
                except (faults.Unavailable, faults.DeadlineExceeded):
                    pass
                time.sleep(0.05)
        logs = "\n".join(path.read_text()[-2000:] for path in self.folder.glob("*.log"))
        raise AssertionError(f"not reached in {timeout_s} s\n{logs}")

    def everything(self):
        with transport.blocking_channel(self.address, tls=None) as channel:
            client = rpc.client(rpc.OPERATOR_SERVICE, channel)
            page = client.list_workloads(ListWorkloadsRequest(page_size=1000), timeout=10.0)
            nodes = client.list_nodes(ListNodesRequest(page_size=1000), timeout=10.0).nodes
        assert page.next_page_token == ""
        return page.workloads, nodes


@pytest.fixture
def cluster(tmp_path):
    found = Cluster(tmp_path)
    yield found
    found.end()


def test_killed_twice_in_the_middle(cluster):
    nodes, tasks = synthesize()
    rows = Trace(nodes=nodes, tasks=tasks, source=TraceSource.GENERATED, where="").limited(nodes=60, tasks=None).nodes
    controller = cluster.controller()
    cluster.until(lambda summary: True)
    cluster.fleet(rows)
    cluster.until(lambda summary: summary.nodes_ready == 60)
    replay = cluster.replay()
    for share in (0.2, 0.5):
        cluster.until(lambda summary, share=share: summary.placed + summary.pending > share * TASKS)
        controller.send_signal(signal.SIGKILL)
        controller.wait()
        controller = cluster.controller()
    out, err = replay.communicate(timeout=120)
    assert replay.returncode == 0, out + err
    figures = json.loads(out)
    assert figures["repeats"] >= 1
    cluster.until(lambda summary: summary.nodes_ready == 60)
    workloads, found = cluster.everything()
    ids = [workload.workload_id for workload in workloads]
    assert sorted(ids) == sorted(task.name for task in tasks[:TASKS])
    assert all(len(w.placements) == (1 if w.phase is WorkloadPhase.PLACED else 0) for w in workloads)
    held, cpu = Counter(), Counter()
    for workload in workloads:
        for placement in workload.placements:
            cpu[placement.node_name] += workload.spec.request.cpu_milli
            for index in placement.gpu_indexes:
                held[placement.node_name, index] += workload.spec.request.gpu_milli
    assert max(held.values()) <= 1000
    for node in found:
        name = node.inventory.node_name
        assert cpu[name] == node.allocated_cpu_milli <= node.inventory.cpu_milli
        assert sum(milli for (owner, _), milli in held.items() if owner == name) == node.allocated_gpu_milli
