"""The benchmark of submissions by store runs, and counts what it says."""

import csv

from bench import submissions
from tests.postgres_rig import needs_server

pytestmark = needs_server


def test_each_store_acknowledges_every_submission(tmp_path):
    assert submissions.main(["--jobs", "20", "--clients", "4", "--rounds", "1", "--out", str(tmp_path)]) == 0
    with (tmp_path / "submissions.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["store"] for row in rows] == ["sqlite", "postgresql", "postgresql, synchronous standby"]
    for row in rows:
        assert float(row["per_s"]) > 0.0
        assert 0.0 < float(row["median_ms"]) <= float(row["p99_ms"])
        # A server that spends nothing was not asked.
        assert (float(row["servers_cpu_ms"]) > 0.0) is (row["store"] != "sqlite")
