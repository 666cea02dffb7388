"""A controller in a cluster whose API server misbehaves on order, under a Prometheus that alerts.

Owns the API server in a thread, the controller's process over it, and the faults by name.
Must not know which alert follows.
"""

import asyncio
import threading

from eelgrid_controller.engines.kubernetes.api.port import NODES, PODS
from eelgrid_controller.engines.kubernetes.model.well_known import ANNOTATION_GROUP_SIZE
from tests.builders.kubernetes import build_node, build_pod
from tests.e2e.kubernetes_gate_test import config, rules
from tests.fakes.kubernetes.cluster import FakeCluster
from tests.fakes.kubernetes.faults import server_error
from tests.fakes.kubernetes.scheduler import Scheduler
from tests.faults_rig import Scene

NODES_THERE = 2


class FaultyCluster(Scene):
    """Two nodes with eight GPUs each, and a controller that leads; a context."""

    def __init__(self, folder):
        super().__init__(
            folder,
            (),
            "--kubernetes",
            "--kubeconfig",
            str(folder / "kubeconfig"),
            "--kubernetes-lease",
            "8",
            "--kubernetes-namespace",
            "default",
        )
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self.fake = FakeCluster()
        self.trouble = None

    def call(self, awaitable):
        """What it gives, of the API server's own thread."""
        return asyncio.run_coroutine_threadsafe(awaitable, self._loop).result(30.0)

    def __enter__(self):
        self._thread.start()
        self._held.callback(self._end_loop)
        self.call(self.fake.start())
        self._held.callback(lambda: self.call(self.fake.__aexit__()))
        # A real server sends one about each minute.
        self.fake.knobs.bookmark_every_s = 1.0
        config(self.fake, self.cluster.folder)
        for index in range(NODES_THERE):
            self.call(self._create(NODES, build_node(f"n{index}")))
        self.call(self.fake.add(Scheduler(self.fake)))
        self._held.enter_context(self.cluster)
        try:
            self.start_controller()
            self.begin_alerting({"controller": [self.cluster.metrics]})
        except BaseException:
            self._held.close()
            raise
        return self

    async def _create(self, resource, body):
        # A client belongs to the thread that makes it.
        await self.fake.client().create(resource, body)

    def _end_loop(self):
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    # Faults, each with what takes it back

    def ask(self, name, *, gpus=1, annotations=None):
        """Somebody makes a pod behind the gate."""
        made = build_pod(name, gpus=gpus)
        made["metadata"]["annotations"] = annotations or {}
        self.call(self._create(PODS, made))

    def ask_unreadably(self, name):
        """A pod whose wishes nobody can read."""
        self.ask(name, annotations={ANNOTATION_GROUP_SIZE: "many"})

    def withdraw(self, name):
        """The pod goes."""

        async def delete():
            await self.fake.client().delete(PODS, name, namespace="default", grace_s=0)

        self.call(delete())

    def forbid_patches(self):
        """An administrator takes the right to patch pods away."""
        left = [
            {**rule, "verbs": [verb for verb in rule["verbs"] if verb != "patch"]}
            if "pods" in rule["resources"]
            else rule
            for rule in rules()
        ]
        self.fake.access.grant("controller", left)

    def allow_patches(self):
        """And gives it back."""
        self.fake.access.grant("controller", rules())

    def break_leases(self):
        """The API server fails at everything about Leases."""
        self.trouble = self.fake.knobs.add("refuse", part="/leases", fault=server_error)

    def mend(self):
        """It does so no more."""
        self.fake.knobs.end(self.trouble)

    def mute(self):
        """Watches stay open and tell nothing."""
        self.fake.knobs.is_mute = True

    def restart(self):
        """The API server begins anew, and talks."""
        self.fake.knobs.is_mute = False
        self.call(self.fake.stop())
        self.call(self.fake.start())
