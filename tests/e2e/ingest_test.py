"""Agents behind real ingest processes under mutual TLS: placed, taken on by another when one is killed, back after the leader is."""

import contextlib

import pytest
from tests.builders.cluster import build_request
from tests.certificates_rig import Authority
from tests.e2e.processes import Cluster, fleet_of, free_address, metric, scrape

from eelgrid_protos import faults, rpc, transport
from eelgrid_protos.controller_addresses import order_addresses
from eelgrid_protos.messages import ForwardRequest

LOCAL = ("localhost", "127.0.0.1")
NODE = {
    "name": "n-{index}",
    "count": 4,
    "cpu_milli": 16000,
    "memory_bytes": 2**36,
    "gpus": [{"product": "a10", "count": 2}],
}


def test_agents_move_from_a_killed_ingest_process_to_another_and_outlive_the_leader(tmp_path):
    authority = Authority()
    admin = authority.write(tmp_path / "admin", ("CN", "admin"), ("O", "eelgrid:admin"), names=LOCAL)
    relay = authority.write(tmp_path / "ingest", ("CN", "ingest"), ("O", "eelgrid:ingest"), names=LOCAL)
    agent = authority.write(tmp_path / "agent", ("CN", "fleet"), ("O", "eelgrid:agent"), names=LOCAL)
    with Cluster(tmp_path, tls=admin) as cluster:
        roles = ("--roles", "require")
        controller = cluster.controller(*roles)
        relays = {}
        for name in ("a", "b"):
            address, metrics = free_address(), free_address()
            flags = ("--ingest", cluster.address, "--listen", address, "--metrics", metrics, *cluster._tls_flags(relay))
            relays[address] = cluster.run(f"ingest-{name}", "-m", "eelgrid_controller", *flags), metrics

        def is_connected(address):
            with contextlib.suppress(OSError):
                return metric(address, "eelgrid_ingest_connected") == 1
            return False

        # An agent that finds its first one away stays with the other for minutes.
        cluster.until(lambda: all(is_connected(metrics) for _, metrics in relays.values()), what="both are connected")
        fleet = fleet_of(tmp_path / "fleet.json", [NODE])
        cluster.run(
            "fleet", "-m", "eelgrid_agent", "--controller", ",".join(relays), "--simulate", str(fleet),
            "--listen", free_address(), "--metrics", free_address(), *cluster._tls_flags(agent),
        )  # fmt: skip
        cluster.until_ready(4)

        def count_agents():
            return {address: metric(metrics, "eelgrid_agents_connected") for address, (_, metrics) in relays.items()}

        cluster.until(lambda: sum(count_agents().values()) == 4, what="behind both")
        # Each node's first one is by its name and the addresses.
        assert count_agents() == {
            address: float(sum(order_addresses(relays, f"n-{index}")[0] == address for index in range(4)))
            for address in relays
        }
        first, second = sorted(relays, key=count_agents().get, reverse=True)
        cluster.until(lambda: metric(cluster.metrics, "eelgrid_ingest_received_batches_total") > 0, what="batches")
        cluster.operators.submit_workload(build_request("w", gpus=1))
        relays[first][0].kill()
        cluster.until(lambda: metric(relays[second][1], "eelgrid_agents_connected") == 4, what="behind the second")
        assert cluster.summary().nodes_ready == 4
        controller.kill()
        cluster.controller(*roles)
        cluster.reconnect()
        cluster.until(
            lambda: metric(cluster.metrics, "eelgrid_ingest_agents_connected") == 4, within_s=60.0, what="back"
        )
        assert cluster.summary().placed == 1
        # Not one agent had to connect again.
        family = scrape(relays[second][1])["eelgrid_ingest_kept_streams"]
        assert {sample.labels["outcome"]: sample.value for sample in family.samples} == {
            "handed_over": 4.0,
            "ended": 0.0,
        }
        # Neither an agent nor a role that may do everything else hands on what agents say.
        for files in (agent, admin):
            with transport.open_blocking_channel(cluster.address, tls=files) as channel:
                answers = rpc.build_client(rpc.INGEST_SERVICE, channel).forward(iter((ForwardRequest(),)))
                with pytest.raises(faults.PermissionDenied, match="needs the role ingest"):
                    next(answers)
