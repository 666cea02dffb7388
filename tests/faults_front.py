"""A front of two clusters, one of them behind an ingest process, under a Prometheus that alerts.

Owns these processes and the faults by name. Must not know which alert follows.
"""

from eelgrid_protos.messages import CancelWorkloadRequest
from tests.e2e.processes import free_address, metric
from tests.e2e.several_clusters_test import JOB, Front, Site
from tests.faults_rig import Scene

WORK = "job"
CONTROLLER_FLAGS = ("--away-grace", "3", "--restart-grace", "10")


class FaultyFront(Scene):
    """Cluster `north`, which has an ingest process, cluster `south`, and their front; a context."""

    def __init__(self, folder):
        super().__init__(folder / "front", ())
        self.cluster.folder.mkdir()
        self.north, self.south = Site(folder / "north", "north", 0.1), Site(folder / "south", "south", 0.4)
        self.front = Front(self.cluster.folder)
        self.ingest_metrics = free_address()

    def __enter__(self):
        try:
            for site in (self.north, self.south):
                self._held.enter_context(site)
                site.begin(*CONTROLLER_FLAGS, agent_flags=("--energy-window", "1"))
            self._held.enter_context(self.front)
            self.controller = self.north.process
            self._start_ingest()
            self.front.begin((self.north, self.south))
            self.submit_work()
            targets = {
                "controller": [self.north.metrics, self.south.metrics],
                "front": [self.front.metrics],
                "ingest": [self.ingest_metrics],
            }
            self.begin_alerting(targets)
        except BaseException:
            self._held.close()
            raise
        return self

    def _start_ingest(self):
        flags = ("--ingest", self.north.address, "--listen", free_address(), "--metrics", self.ingest_metrics)
        self.front.run("ingest", "-m", "eelgrid_controller", *flags)
        self.until(lambda: metric(self.ingest_metrics, "eelgrid_ingest_connected") == 1, what="the leader is reached")

    def submit_work(self):
        """Somebody submits a job, which runs where energy is cheap."""
        self.front.eelctl(*JOB, "--id", WORK)
        self.until(lambda: WORK in self.north.placed(), what="the job runs")

    # Faults, each with what takes it back

    def kill_cluster(self):
        """The only controller of the cluster is gone."""
        self.north.process.kill()

    def restart_cluster(self):
        """It begins anew, on what it had written."""
        self.controller = self.north.process = self.north.controller(*CONTROLLER_FLAGS)
        self.north.reconnect()

    def cancel_work(self):
        """Somebody ends the job by the front, which must tell its cluster."""
        self.front.operators.cancel_workload(CancelWorkloadRequest(workload_id=WORK), timeout=15.0)

    def find_copy(self):
        """What the front knows of the job in its cluster."""
        (copy,) = self.front.dispatch(WORK).copies
        return copy
