"""Gangs by real processes: parts that are submitted with eelctl run one by one and begin together."""

import json

import pytest
from tests.e2e.processes import Cluster
from tests.e2e.run_test import begin, until_ended

from eelgrid_protos.messages import WorkloadPhase


@pytest.fixture
def cluster(tmp_path):
    with Cluster(tmp_path) as found:
        yield found


def test_the_parts_of_a_gang_start_together_and_commands_show_the_gang(cluster):
    begin(cluster)
    words = ("run", "-d", "--gang", "llama", "--gang-parts", "2")
    driver = cluster.eelctl(*words, "--", "true").stdout.strip()
    waiting = cluster.eelctl("explain", driver).stdout
    assert "gang: waits for 1 more part of gang llama" in waiting
    assert "It is a part of gang llama, of 2 parts." in waiting
    assert "submit the missing parts" in waiting
    document = json.loads(cluster.eelctl("get", driver, "-o", "json").stdout)
    assert document["spec"]["gang"]["name"] == "llama"
    other = cluster.eelctl("run", "-d", "--gang", "llama", "--gang-parts", "3", "--", "true", code=125)
    assert "--gang-parts" in other.stderr
    assert "gang llama has 2" in other.stderr
    workers = cluster.eelctl(*words, "--replicas", "2", "--", "true").stdout.strip()
    assert {until_ended(cluster, key).phase for key in (driver, workers)} == {WorkloadPhase.SUCCEEDED}
    assert "gang       llama, of 2 parts" in cluster.eelctl("get", workers).stdout
    listed = cluster.eelctl("workloads", "--all", "-o", "wide").stdout
    assert "GANG" in listed
    assert "llama" in listed
    again = cluster.eelctl("rerun", driver).stdout.strip()
    assert until_ended(cluster, again).spec.gang is None
