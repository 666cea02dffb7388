"""A small living fleet of real processes under a Prometheus that alerts, and the rehearsal of faults in it.

Owns the processes, the switches of their faults and the course of a rehearsal: quiet, the
fault, what fires, the fault taken back, quiet. Must not know which fault makes which alert
fire.
"""

import json
import resource
import time
from contextlib import ExitStack
from dataclasses import dataclass, replace

from eelgrid_protos.messages import (
    CancelWorkloadRequest,
    GetPolicyRequest,
    ListGpusRequest,
    ResourceRequest,
    SubmitWorkloadRequest,
    UpdatePolicyRequest,
    WorkloadSpec,
)
from tests.alerting_rig import FACTOR, Alerting
from tests.e2e.processes import Cluster, free_address

FIRES_S, RESOLVES_S = 120.0, 120.0
# Two evaluations and some.
QUIET_S = 3.0


@dataclass(frozen=True)
class Row:
    """One line of the rehearsal's table."""

    alert: str
    fault: str
    fired_s: float
    resolved_s: float


class FaultyAgent:
    """An agent process with one simulated node, which can be ended, begun anew and given faults."""

    def __init__(self, cluster, name, gpus, *flags, pool="p"):
        self.cluster, self.name, self.flags = cluster, name, flags
        self.metrics = free_address()
        self._fleet, self._faults = cluster.folder / f"{name}.json", cluster.folder / f"{name}.faults"
        node = {
            "name": name,
            "pool": pool,
            "cpu_milli": 64_000,
            "memory_bytes": 2**38,
            "hurry": FACTOR,
            "gpus": list(gpus),
        }
        self._fleet.write_text(json.dumps({"nodes": [node]}))
        self.child = None

    def start(self, *flags):
        """Begins, without the faults of the life before."""
        self._faults.write_text("")
        self.child = self.cluster.agent(
            self._fleet,
            "--metrics",
            self.metrics,
            "--faults",
            str(self._faults),
            "--energy-window",
            "1",
            *self.flags,
            *flags,
        )

    def fault(self, fault, gpu=None, **fields):
        """Does this to the simulated node."""
        line = {"fault": fault, **({} if gpu is None else {"gpu": gpu}), **fields}
        with self._faults.open("a") as out:
            out.write(json.dumps(line) + "\n")


class Scene:
    """Agents, a controller and a Prometheus; a context. `agents` are (name, gpus, flags)."""

    def __init__(self, folder, agents, *controller):
        self.cluster = Cluster(folder)
        self.agents = {name: FaultyAgent(self.cluster, name, gpus, *flags, pool=name) for name, gpus, flags in agents}
        self.controller = None
        self.rows = []
        # What fires for the whole of the scene's time, by a fault that stands.
        self.standing = []
        self._controller_flags = controller
        self._held = ExitStack()

    def __enter__(self):
        self._held.enter_context(self.cluster)
        try:
            self.start_controller()
            for agent in self.agents.values():
                agent.start()
            self.cluster.until_ready(len(self.agents))
            policy = self.cluster.operators.get_policy(GetPolicyRequest(), timeout=10.0).policy
            self.set_policy(send_interval_s=0.5, sample_interval_s=0.5)
            assert policy.budgets == ()
            targets = {
                "controller": [self.cluster.metrics],
                "agents": [one.metrics for one in self.agents.values()],
            }
            self.begin_alerting(targets)
        except BaseException:
            self._held.close()
            raise
        return self

    def __exit__(self, *reason):
        self._held.close()

    def begin_alerting(self, targets):
        """Starts Prometheus, with the addresses of each job; returns when it has scraped everything."""
        self.alerting = self._held.enter_context(Alerting(self.cluster.folder, targets))
        self.until(self.alerting.is_up, what="Prometheus scrapes everything")

    def until(self, condition, *, within_s=60.0, what=""):
        """What the condition gives once it is true."""
        return self.cluster.until(condition, within_s=within_s, what=what)

    def start_controller(self):
        """Begins, or begins anew."""
        self.controller = self.cluster.controller(*self._controller_flags)

    def set_policy(self, **changes):
        """Changes the policy in force."""
        policy = self.cluster.operators.get_policy(GetPolicyRequest(), timeout=10.0).policy
        self.cluster.operators.update_policy(UpdatePolicyRequest(policy=replace(policy, **changes)), timeout=10.0)

    def submit(self, key, model, *, gpus=1, **spec):
        """A workload of whole GPUs of a model."""
        request = ResourceRequest(
            cpu_milli=1000, memory_bytes=2**30, gpu_count=gpus, gpu_milli=1000, gpu_models=(model,)
        )
        self.cluster.operators.submit_workload(
            SubmitWorkloadRequest(workload_id=key, spec=WorkloadSpec(name=key, request=request, **spec)), timeout=10.0
        )

    def cancel(self, key):
        """Ends a workload."""
        self.cluster.operators.cancel_workload(CancelWorkloadRequest(workload_id=key), timeout=10.0)

    def uuids(self, node):
        """The GPUs of a node, by their place in the fleet file."""
        gpus = self.cluster.operators.list_gpus(ListGpusRequest(page_size=1000), timeout=10.0).gpus
        return [one.gpu.uuid for one in sorted(gpus, key=lambda one: one.gpu.index) if one.node_name == node]

    def limit_files(self, size):
        """No file of the controller may grow beyond so many bytes; None lifts it."""
        _, hard = resource.prlimit(self.controller.process.pid, resource.RLIMIT_FSIZE)
        soft = hard if size is None else size
        resource.prlimit(self.controller.process.pid, resource.RLIMIT_FSIZE, (soft, hard))

    # Rehearsals

    def strangers(self, labels, known):
        """Those that nobody expects."""
        return [one for one in labels if not any(awaited.meets(one) for awaited in (*known, *self.standing))]

    def until_quiet(self, *, within_s=RESOLVES_S):
        """Nothing fires but what stands, nor is about to, for a while."""
        since_s = time.monotonic()

        def look():
            nonlocal since_s
            if self.strangers(self.alerting.active(), ()):
                since_s = time.monotonic()
            return time.monotonic() - since_s > QUIET_S

        self.until(look, within_s=within_s, what="quiet")

    def rehearse(self, fault, begin, end, awaited, also=(), begun_s=None, within_s=FIRES_S):
        """Does it, waits until all that is awaited fires, takes it back, waits until nothing of it fires.

        `also` may fire beside, rightly. Anything else that ever fired fails. A fault that was begun before was so at
        `begun_s`.
        """
        known = (*awaited, *also)
        if begun_s is None:
            self.until_quiet()
        began_s = begun_s or time.time()
        begin()
        fired = self._fired(awaited, known, began_s, within_s)
        took_back_s = time.time()
        end()
        resolved = self._resolved(known, took_back_s)
        strange = self.strangers(self.alerting.fired(took_back_s if begun_s else began_s), known)
        assert strange == [], f"{fault}: {strange}"
        for one in awaited:
            self.rows.append(Row(str(one), fault, fired[one] - began_s, resolved[one] - took_back_s))

    def _fired(self, awaited, known, began_s, within_s):
        seen = {}

        def look():
            firing = self.alerting.firing()
            for one in awaited:
                if one not in seen and any(one.meets(labels) for labels in firing):
                    seen[one] = time.time()
            strange = self.strangers(firing, known)
            assert strange == [], f"while {[str(one) for one in awaited]} were awaited: {strange}"
            return len(seen) == len(awaited)

        names = ", ".join(str(one) for one in awaited)
        try:
            self.until(look, within_s=within_s, what=names)
        except AssertionError as error:
            missing = [str(one) for one in awaited if one not in seen]
            raise AssertionError(f"did not fire: {missing} after {time.time() - began_s:.0f} s\n{error}") from None
        return seen

    def _resolved(self, known, took_back_s):
        seen = {}

        def look():
            firing = self.alerting.firing()
            for one in known:
                if any(one.meets(labels) for labels in firing):
                    seen.pop(one, None)
                else:
                    seen.setdefault(one, time.time())
            return len(seen) == len(known)

        try:
            self.until(look, within_s=RESOLVES_S, what="alerts resolve")
        except AssertionError as error:
            held = [str(one) for one in known if one not in seen]
            raise AssertionError(f"did not resolve: {held} after {time.time() - took_back_s:.0f} s\n{error}") from None
        return seen

    def table(self):
        """The rows for people."""
        lines = [f"{'alert':60} {'fired s':>8} {'resolved s':>10}  fault"]
        lines += [f"{row.alert:60} {row.fired_s:8.0f} {row.resolved_s:10.0f}  {row.fault}" for row in self.rows]
        return "\n".join(lines)
