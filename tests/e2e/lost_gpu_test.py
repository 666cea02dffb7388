"""A GPU that is lost is seen everywhere at once, and so is its return: eelctl, the page, and both logs, once each."""

import json

from tests.e2e.page_controller_test import answer, picture
from tests.e2e.processes import Cluster, fleet_of

NODES = [
    {"name": "n1", "cpu_milli": 8000, "memory_bytes": 2**35, "gpus": [{"product": "a10", "count": 2}]},
    {"name": "n2", "cpu_milli": 8000, "memory_bytes": 2**35, "gpus": [{"product": "a10", "count": 2}]},
]


def cells(cluster, *arguments, title):
    """A column of a table, by the first cell of each row."""
    head, *rows = cluster.eelctl(*arguments).stdout.splitlines()
    start = head.index(title)
    end = next((at for at in range(start, len(head) - 1) if head[at] == " " != head[at + 1]), len(head))
    end = end + 1 if end < len(head) else None
    return [(row.split()[0], row[start:end].strip()) for row in rows]


def told(child, mark):
    """The lines of a log that say this."""
    return [line for line in child.text().splitlines() if mark in line]


def test_a_lost_gpu_is_seen_everywhere_at_once(tmp_path):
    with Cluster(tmp_path) as cluster:
        controller = cluster.controller("--page", "127.0.0.1:0")
        page = controller.said("serving listen=")["page"]
        cluster.set_policy(sample_interval_s=0.5, send_interval_s=0.5)
        faults = tmp_path / "faults"
        faults.write_text("")
        agent = cluster.agent(fleet_of(tmp_path / "fleet.json", NODES), "--faults", str(faults))
        cluster.until_ready(2)
        cluster.eelctl("submit", "--id", "job", "--name", "job", "--gpus", 2, "--cpu", 1)
        (placement,) = json.loads(cluster.eelctl("get", "job", "-o", "json").stdout)["placements"]
        name, uuid = placement["node_name"], placement["gpu_uuids"][1]
        index = placement["gpu_indexes"][1]
        before = len(picture(page)["changes"])

        def fault(kind):
            with faults.open("a") as out:
                out.write(json.dumps({"fault": kind, "node": name, "gpu": index}) + "\n")

        def changes():
            return [change[2:5:2] for change in picture(page)["changes"][before:]]

        def is_lost():
            # Whatever is first, the next look finds it everywhere.
            return told(controller, "gpu_lost")

        fault("lose")
        cluster.until(is_lost, what="the controller hears of the loss")
        states = dict(cells(cluster, "gpus", "--node", name, title="STATE"))
        gpus = json.loads(cluster.eelctl("gpus", "--node", name, "-o", "json").stdout)
        assert [gpu["gpu"]["lost"] for gpu in gpus] == [gpu["gpu"]["uuid"] == uuid for gpu in gpus]
        assert "lost" in cluster.eelctl("gpus", "--node", name).stdout, states
        assert dict(cells(cluster, "nodes", title="STATE"))[name] == "ready, 1 GPU lost"
        assert cluster.summary().gpus_lost == 1
        assert "on a lost GPU" in cluster.eelctl("get", "job").stdout
        assert "on a lost GPU" in cluster.eelctl("workloads", "-o", "wide").stdout
        assert "on a lost GPU" in cluster.eelctl("explain", "job").stdout
        assert "1 GPU lost" in cluster.eelctl("top", "--once").stdout
        assert answer(page, "workload?id=job")["placements"][0]["lost"] is True
        # The inventory follows the event; nobody joined.
        cluster.until(lambda: len(picture(page)["changes"]) > before, what="the page tells of it")
        assert picture(page)["counts"]["gpus_lost"] == 1
        words = f"GPU {index} of {name}"
        assert changes() == [["GPU lost", words]]

        fault("restore")
        cluster.until(lambda: told(controller, "gpu_returned"), what="the controller hears of the return")
        cluster.until(lambda: cluster.summary().gpus_lost == 0, what="it counts again")
        assert dict(cells(cluster, "nodes", title="STATE"))[name] == "ready"
        assert "lost GPU" not in cluster.eelctl("get", "job").stdout + cluster.eelctl("explain", "job").stdout
        cluster.until(lambda: len(changes()) > 1, what="the page tells of it")
        assert changes() == [["GPU lost", words], ["GPU returned", words]]
        for child in (agent, controller):
            for event in ("gpu_lost", "gpu_returned"):
                (line,) = told(child, f"event={event}")
                assert "WARNING" in line
                assert f"node={name}" in line
                assert uuid in line
