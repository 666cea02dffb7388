"""Ability `policies`: PowerPolicy objects are put in force, and their statuses say what came of it.

Owns the informer, the file of former values, the order of writes, and how often a status is
written. Must not know how objects are merged (`kubernetes/power_policies.py`) or what a
status says (`kubernetes/power_status.py`).

Theory. A round goes over everything: objects, labels of nodes, the policy in force. It begins
when something of these changed, and now and then for the watts. What will be done is on disk
before it is done, and what was done after it; so a round that was cut off is only gone over
again. A policy that somebody else changed meanwhile is read anew. Only who leads changes
anything; another round of the same leader changes nothing.
"""

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

from eelgrid_controller.adapters.kubernetes.abilities import Surroundings
from eelgrid_controller.adapters.kubernetes.errors import ClusterError, Conflict, NotFound
from eelgrid_controller.adapters.kubernetes.former_values import FormerValues
from eelgrid_controller.adapters.kubernetes.held import Delta
from eelgrid_controller.adapters.kubernetes.informer import Informer
from eelgrid_controller.adapters.kubernetes.port import Object
from eelgrid_controller.adapters.kubernetes.resources import EVENTS, POWER_POLICIES
from eelgrid_controller.adapters.kubernetes.retry import Limits, with_retries
from eelgrid_controller.budget_places import BudgetPlaces
from eelgrid_controller.command import Committed
from eelgrid_controller.events import PolicyChanged
from eelgrid_controller.kubernetes.conditions import Condition, Conditions
from eelgrid_controller.kubernetes.people_events import Regarding, event_of
from eelgrid_controller.kubernetes.power_policies import Decision, Memory, PowerPolicies, Standing
from eelgrid_controller.kubernetes.power_status import ACCEPTED, CONFLICTING, WITHIN_BUDGET, Applied, status_of
from eelgrid_controller.standing_order import policy_violations
from eelgrid_protos.errors import ContractError
from eelgrid_protos.faults import Aborted, Fault
from eelgrid_protos.messages import Policy

__all__ = ["PoliciesPart"]

_OBJECTS_MOST = 10_000
_ATTEMPTS = 5
_LOOK_S = 0.5  # between looks whether this one leads and knows the nodes
_LIMITS = Limits(attempts=3, whole_s=10.0, first_s=0.2, most_s=2.0)
# Statuses that people should hear of as an Event: each condition, and what it is then.
_TOLD = {ACCEPTED: False, CONFLICTING: True, WITHIN_BUDGET: False}


class PoliciesPart:
    """PowerPolicy objects of one cluster."""

    def __init__(
        self, around: Surroundings, *, every_s: float = 5.0, status_s: float = 5.0, failed_s: float = 30.0
    ) -> None:
        """Rounds at least each `every_s`; one status at most each `status_s`, after a failure each `failed_s`."""
        self.rounds = 0
        self.statuses = 0
        self.failures = 0
        self._around = around
        self._every_s, self._status_s, self._failed_s = every_s, status_s, failed_s
        self._former = FormerValues(around.data)
        self._memory = Memory()
        self._saved: Memory | None = None  # as it is on disk
        self._due_s: dict[str, float] = {}  # uid -> when its status may be written again
        self._wake = asyncio.Event()
        self._said: dict[str, str] = {}
        self._log = around.log.getChild("policies")

    async def run(self) -> None:
        """Work until cancelled."""
        around = self._around
        self._memory, fault = await asyncio.to_thread(self._former.load)
        self._saved = None if fault else self._memory
        if fault:
            self._log.error("file=%s read=no error=%s action=begin_without", self._former.path, fault)
        self._machine = PowerPolicies(policy_violations)
        self._objects = Informer(
            around.cluster, POWER_POLICIES, rng=around.rng, monotonic_s=around.clock.monotonic_s, log=self._log,
            keep=_pruned, most=_OBJECTS_MOST,
        )  # fmt: skip
        self._objects.hear(self._changed)
        around.loop.listeners.append(self._committed)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._objects.run())
                group.create_task(self._go_on())
        finally:
            around.loop.listeners.remove(self._committed)

    def _changed(self, _: Sequence[Delta]) -> None:
        self._wake.set()

    def _committed(self, committed: Committed) -> None:
        if any(isinstance(event, PolicyChanged) for event in committed.events):
            self._wake.set()

    async def _go_on(self) -> None:
        await self._objects.synced()
        while True:
            self._wake.clear()
            # Nodes' labels are read only once they are all there: a selector must not lose its nodes at each start.
            is_ready = self._around.elector.term() is not None and self._around.engine.nodes.is_synced
            if is_ready:
                await self._round()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._every_s if is_ready else min(self._every_s, _LOOK_S)):
                    await self._wake.wait()

    async def _round(self) -> None:
        self.rounds += 1
        decision, applied = await self._apply()
        draws = self._around.draws()
        at_s = self._around.clock.monotonic_s()
        self._due_s = {uid: due_s for uid, due_s in self._due_s.items() if due_s > at_s}
        for one in decision.standings:
            if self._around.elector.term() is None:
                return
            if one.found["metadata"]["uid"] in self._due_s:
                continue
            status = status_of(one, applied, draws, at_ns=self._around.clock.now_ns())
            if status != one.found.get("status"):
                await self._write(one, status)

    # The policy

    async def _apply(self) -> tuple[Decision, Applied]:
        """Put in force what objects want; what was decided, and what is in force now."""
        fault = "the policy was changed by somebody else again and again; tried again in a moment"
        for _ in range(_ATTEMPTS):
            policy = await self._around.loop.read(lambda core: core.state.policy)
            decision = self._decide(policy)
            try:
                await self._save(decision.ahead)
                if decision.policy != policy:
                    if self._around.elector.term() is None:
                        return decision, _applied(policy, "this controller does not lead any more")
                    policy = await self._around.loop.update_policy(decision.policy)
                    self._log.info("policy=changed revision=%d objects=%d", policy.revision, len(decision.standings))
                await self._save(decision.after)
            except Aborted:
                continue
            except (Fault, ContractError) as error:
                fault = f"the controller did not take it: {error}"
                break
            except OSError as error:
                fault = f"{self._former.path} cannot be written: {error}; make room or give rights there"
                break
            self._say("policy", "")
            return decision, _applied(policy)
        self._say("policy", fault)
        return decision, _applied(await self._around.loop.read(lambda core: core.state.policy), fault)

    def _decide(self, policy: Policy) -> Decision:
        nodes = {
            key.name: node["metadata"].get("labels") or {} for key, node in self._around.engine.nodes.objects.items()
        }
        return self._machine.decide(self._objects.objects.values(), nodes, policy, self._memory)

    async def _save(self, memory: Memory) -> None:
        if memory != self._saved:
            await asyncio.to_thread(self._former.save, memory)
            self._saved = memory
        self._memory = memory

    # Statuses

    async def _write(self, one: Standing, status: Mapping[str, Any]) -> None:
        metadata, before = one.found["metadata"], one.found.get("status") or {}
        uid, name = metadata["uid"], metadata["name"]
        body = {
            "metadata": {"uid": uid, "resourceVersion": metadata["resourceVersion"]},
            # A merge patch takes away only what it names.
            "status": {**dict.fromkeys(before.keys() - status.keys()), **status},
        }

        async def call() -> Object:
            return await self._around.cluster.patch(POWER_POLICIES, name, body, subresource="status")

        now_s = self._around.clock.monotonic_s
        try:
            await with_retries(
                call, rng=self._around.rng, is_idempotent=True, limits=_LIMITS, monotonic_s=now_s
            )  # fmt: skip
        except (Conflict, NotFound):
            return  # a newer object is on its way, or none
        except ClusterError as error:
            self.failures += 1
            self._due_s[uid] = now_s() + self._failed_s
            self._say(name, f"its status is not written: {error}")
            return
        self.statuses += 1
        self._due_s[uid] = now_s() + self._status_s
        self._say(name, "")
        was = Conditions.from_json(before.get("conditions"))
        for condition in Conditions.from_json(status["conditions"]):
            earlier = was.get(condition.type)
            is_news = earlier is None or earlier.status is not condition.status
            if is_news and _TOLD.get(condition.type) is condition.status:
                await self._tell(one.found, condition)

    async def _tell(self, found: Mapping[str, Any], condition: Condition) -> None:
        name, uid = found["metadata"]["name"], found["metadata"]["uid"]
        event = event_of(
            Regarding(POWER_POLICIES.api_version, "PowerPolicy", "", name, uid), condition.message, is_warning=True,
            reason=condition.reason, action="ApplyingPolicy", identity=self._around.identity,
            now_ns=self._around.clock.now_ns(),
        )  # fmt: skip
        try:
            await self._around.cluster.create(EVENTS, event, namespace=event["metadata"]["namespace"])
        except ClusterError as error:
            self._log.debug("policy=%s told=no error=%s", name, error)

    def _say(self, what: str, fault: str) -> None:
        """A fault in the log, once until it is another."""
        if fault and self._said.get(what) != fault:
            self._log.warning("object=%s error=%s", what, fault)
        if fault:
            self._said[what] = fault
        else:
            self._said.pop(what, None)


def _applied(policy: Policy, fault: str = "") -> Applied:
    return Applied(policy.revision, BudgetPlaces(policy).limits_w, fault)


def _pruned(found: Object) -> Object:
    metadata = {key: value for key, value in found["metadata"].items() if key not in ("managedFields", "annotations")}
    return {**found, "metadata": metadata}
