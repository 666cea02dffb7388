"""Fail-over of whole controllers on a real PostgreSQL, judged by clients' and agents' logs alone.

The leader is killed, stopped and paused for three lease times, in turns, under load. EELGRID_HA_ROUNDS says how often (2);
`python -m bench.ha` has the long run.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time

import pytest
from tests import postgres_rig
from tests.builders.stores import postgres_store
from tests.e2e.processes import metric
from tests.ha_faults import DatabaseFaults, FaultClient, Promotions, await_replay
from tests.ha_scene import HaScene
from tests.postgres_rig import PostgresServer
from tests.waiting import poll_until

from eelgrid.client import Client
from eelgrid.errors import EelgridError, UnavailableError
from eelgrid_protos.messages import WorkloadPhase

pytestmark = postgres_rig.needs_server
ROUNDS = int(os.environ.get("EELGRID_HA_ROUNDS", "2"))
LEASE_S = 2.0


def test_work_that_ran_before_a_standby_without_its_start_was_promoted_does_not_run_again(tmp_path):
    """It waits in the promoted journal, and ran on nodes that joined after the standby was cut off."""
    with (
        Promotions() as database,
        HaScene(tmp_path, database.url, lease_s=LEASE_S, agent_waits=True, restart_grace_s=30) as scene,
    ):
        scene.wait_until_all_stand()
        client, first = FaultClient(scene), {"w-0", "w-1", "w-2"}
        client.wait_until_served(0, answers=len(first))

        def run_some():
            scene.start_agent()  # several jobs start at once, so that others may end before these
            poll_until(lambda: first <= scene.list_ended(), "the first jobs have run", within_s=60.0)

        database.run("promote", client, meanwhile=run_some)
        verdict = scene.judge()
        lost = client.unexcused(verdict.lost, database.windows_ns)
        with Client(scene.addresses) as client:
            phases = {client.get_workload(key).phase for key in first}
    assert phases == {WorkloadPhase.SUCCEEDED}
    check_verdict(verdict, lost)


def check_verdict(verdict, lost):
    """No acknowledged job is lost, `lost` being those that may not be; none ran twice, and no device had two."""
    assert not lost
    assert not verdict.doubled
    assert not verdict.overlapping


def test_a_leader_that_is_killed_stopped_or_paused_loses_and_doubles_no_job(tmp_path):
    found = []
    with postgres_store(None) as store, HaScene(tmp_path, store.url, lease_s=LEASE_S) as scene:
        for _ in range(ROUNDS):
            found.append(scene.fail_over("kill", signal.SIGKILL))
            found.append(scene.fail_over("stop", signal.SIGTERM))
            found.append(scene.fail_over("pause", signal.SIGSTOP, stop_s=3.0 * LEASE_S))
        verdict = scene.judge()
    for one in found:
        print(f"{one.deed}: ready {one.ready_s:.2f} s, agents {one.agents_s:.2f} s, a client {one.served_s:.2f} s")
    print(f"{verdict.acknowledged} acknowledged, {verdict.refused} refused, lease {LEASE_S:g} s")
    assert verdict.acknowledged > 2 * ROUNDS
    check_verdict(verdict, verdict.lost)


def test_agents_behind_ingest_processes_lose_and_double_no_job_when_leaders_and_ingest_processes_end(tmp_path):
    """The leader is killed, and paused for three leases; each ingest process is killed; ticks are lost where they are counted."""
    with postgres_store(None) as store, HaScene(tmp_path, store.url, lease_s=LEASE_S, nodes=4, ingests=2) as scene:
        found = [
            scene.fail_over("kill", signal.SIGKILL),
            scene.fail_over("pause", signal.SIGSTOP, stop_s=3.0 * LEASE_S),
        ]
        scene.wait_until_all_stand()
        for address in list(scene.ingests):
            killed, _ = scene.ingests[address]
            killed.kill()
            (other,) = (metrics for one, (_, metrics) in scene.ingests.items() if one != address)
            scene.wait_for_metric(other, "eelgrid_agents_connected", 4)
            scene.begin_ingest(address)
            scene.wait_for_metric(scene.ingests[address][1], "eelgrid_ingest_connected", 1)
        verdict = scene.judge()
        dropped = metric(scene.agent_metrics, "eelgrid_agent_dropped_samples_total")
        lost = metric(scene.find_metrics(scene.find_leader()), "eelgrid_samples_lost_total")
    for one in found:
        print(f"{one.deed}: ready {one.ready_s:.2f} s, agents {one.agents_s:.2f} s, a client {one.served_s:.2f} s")
    print(f"{verdict.acknowledged} acknowledged, {verdict.refused} refused, ticks dropped {dropped}, lost {lost}")
    assert verdict.acknowledged > 4
    check_verdict(verdict, verdict.lost)
    assert dropped == 0
    assert lost == 0


def test_a_leader_and_an_ingest_process_that_end_or_stop_at_once_lose_and_double_no_job(tmp_path):
    """Both are killed, then both are stopped for three leases; agents come back by the other ingest process meanwhile."""
    with postgres_store(None) as store, HaScene(tmp_path, store.url, lease_s=LEASE_S, nodes=4, ingests=2) as scene:
        first, second = scene.ingests
        found = [scene.fail_over("kill", signal.SIGKILL, also=(scene.ingests[first][0],))]
        scene.begin_ingest(first)
        scene.wait_for_metric(scene.ingests[first][1], "eelgrid_ingest_connected", 1)
        stopped = scene.ingests[second][0]
        found.append(scene.fail_over("pause", signal.SIGSTOP, stop_s=3.0 * LEASE_S, also=(stopped,)))
        scene.wait_for_metric(scene.ingests[second][1], "eelgrid_ingest_connected", 1)
        assert stopped.process.poll() is None, stopped.tail()
        scene.wait_until_all_stand()
        scene.wait_for_agents(scene.leader)
        verdict = scene.judge()
        dropped = metric(scene.agent_metrics, "eelgrid_agent_dropped_samples_total")
    for one in found:
        print(f"{one.deed}: ready {one.ready_s:.2f} s, agents {one.agents_s:.2f} s, a client {one.served_s:.2f} s")
    print(f"{verdict.acknowledged} acknowledged, {verdict.refused} refused, ticks dropped {dropped}")
    assert verdict.acknowledged > 4
    check_verdict(verdict, verdict.lost)
    assert dropped == 0


@pytest.mark.parametrize("world", [DatabaseFaults, Promotions])
def test_each_fault_of_the_database_refuses_with_its_reason_and_is_served_again_by_itself(tmp_path, world):
    """`python -m bench.ha --faults 100` has the long run."""
    with world() as database, HaScene(tmp_path, database.url, lease_s=LEASE_S, restart_grace_s=30) as scene:
        client, found = FaultClient(scene), []
        for kind in database.kinds:
            scene.wait_until_all_stand()
            found.append(database.run(kind, client))
        verdict = scene.judge()
        lost = client.unexcused(verdict.lost, database.windows_ns)
    for one in found:
        print(f"{one.fault}: served {one.served_s:.2f} s after its end; told {one.reason}")
    print(f"{verdict.acknowledged} acknowledged, {verdict.refused} refused, {len(verdict.lost)} lost")
    # One after each fault: where all is quick no more are asked for.
    assert verdict.acknowledged >= len(found)
    check_verdict(verdict, lost)


def test_reads_that_may_be_stale_go_on_while_none_leads(tmp_path):
    with postgres_store(None) as store, HaScene(tmp_path, store.url, lease_s=120.0) as scene:
        poll_until(lambda: len(acknowledged(scene)) > 3, "a client is served")
        scene.wait_until_all_stand()
        scene.process(scene.leader).signal(signal.SIGKILL)
        began_s = time.monotonic()
        words = ("-m", "eelgrid_controller.cli", "--controller", scene.addresses, "--stale", "-o", "json", "nodes")
        done = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=20.0, check=False)
        took_s = time.monotonic() - began_s
        assert done.returncode == 0, done.stderr
        assert {one["inventory"]["node_name"] for one in json.loads(done.stdout)} == {"n0", "n1"}
        assert "stale answer: at most " in done.stderr
        with Client(scene.addresses, timeout_s=5.0) as client:
            stale = client.allow_stale()

            def knows_all():
                known = {one.workload_id for one in stale.list_workloads()}
                return {key for _, key, *_ in acknowledged(scene)} <= known

            # A copy may be older than the last acknowledgement, by as much as it says.
            poll_until(knows_all, "a follower knows what was acknowledged")
            assert stale.staleness.age_s < 5.0
            with pytest.raises(UnavailableError):
                client.get_summary()
        # Nobody has led in between: the lease is two minutes.
        assert scene.find_leader() is None
        print(f"eelctl --stale took {took_s:.2f} s: {done.stderr.strip()}")


def acknowledged(scene):
    return [line.split() for line in scene.answers.read_text().splitlines() if line.startswith("ok")]


def test_a_promoted_standby_without_the_last_transactions_is_led_and_obeyed(tmp_path):
    """Acknowledgements since the standby was cut off are lost, as asynchronous replication has it; nothing else is.

    A job whose second attempt the promoted journal does not have runs on.
    """
    primary = PostgresServer()
    servers = [primary]
    try:
        primary.start()
        name = primary.create_database().rpartition("/")[2]
        standby = PostgresServer(source=primary)
        servers.append(standby)
        standby.start()
        hosts = "&".join(f"host=127.0.0.1:{one.port}" for one in servers)
        with HaScene(tmp_path, f"postgresql://postgres@/{name}?{hosts}", lease_s=LEASE_S, restart_grace_s=30) as scene:
            poll_until(lambda: len(acknowledged(scene)) > 5, "a client is served")
            scene.submit_retried("again", first_s=3, second_s=30)
            poll_until(lambda: scene.count_begins("again"), "its first attempt has begun")
            await_replay(primary, standby)
            standby.stop()
            cut_ns, before = time.time_ns(), len(acknowledged(scene))
            poll_until(lambda: len(acknowledged(scene)) > before + 10, "transactions that the standby lacks")
            poll_until(lambda: 2 in scene.count_begins("again"), "its second attempt has begun", within_s=60.0)
            primary.stop(signal.SIGQUIT)
            standby.start()
            standby.promote()
            crashed_ns = time.time_ns()

            def find_obeyed():
                term = json.loads((tmp_path / "agent" / "leader.json").read_text())
                return term if term["timeline"] == 2 else None

            term = poll_until(find_obeyed, "the agent obeys a leader of the promoted server", within_s=120.0)
            leader = poll_until(scene.find_leader, "one leads")
            scene.wait_for_agents(leader)
            with Client(scene.addresses, timeout_s=20.0) as client:
                ahead = [node.inventory.node_name for node in client.list_nodes() if node.ahead_epoch is not None]

                def reconcile():
                    with contextlib.suppress(EelgridError):
                        return [client.reconcile_node(node) for node in ahead] or True

                poll_until(reconcile, "starts are resumed", within_s=120.0)
            served = len(acknowledged(scene))
            poll_until(lambda: len(acknowledged(scene)) > served + 5, "a client is served")
            with Client(scene.addresses, timeout_s=20.0) as client:
                poll_until(lambda: client.get_workload("again").phase.is_ended, "the retried job ends", within_s=120.0)
                assert client.get_workload("again").phase is WorkloadPhase.SUCCEEDED
            assert scene.count_begins("again") == {1: 1, 2: 1}
            verdict = scene.judge(within_s=60.0)
            verdict.doubled.remove("again")
            times = {key: int(at_ns) for _, key, at_ns, *_ in acknowledged(scene)}
        lost = [key for key in verdict.lost if not cut_ns < times[key] < crashed_ns]
        print(
            f"term {term['timeline']}.{term['epoch']}, {len(ahead)} nodes ahead of the journal, "
            f"{verdict.acknowledged} acknowledged, {len(verdict.lost)} of them lost with the primary"
        )
        check_verdict(verdict, lost)
    finally:
        for one in servers:
            one.remove()
