"""PowerPolicy reconciler: applies PowerPolicy objects and reports their status.

The policy values that they replaced are kept in a file beside the journal.
"""

import asyncio
import contextlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from eelgrid_controller.core.steps import CommitResult
from eelgrid_controller.engines.kubernetes.api.errors import (
    ClusterError,
    Conflict,
    ObjectNotFound,
    RetryLimits,
    StaleTerm,
)
from eelgrid_controller.engines.kubernetes.api.informer import Delta
from eelgrid_controller.engines.kubernetes.api.port import POWER_POLICIES, Object
from eelgrid_controller.engines.kubernetes.model.power_policy import (
    ACCEPTED,
    CONFLICTING,
    WITHIN_BUDGET,
    AppliedPolicy,
    FieldRecord,
    PolicyDecision,
    PolicyOutcome,
    PolicyRecords,
    PowerPolicyMerger,
    build_policy_status,
    decode_value,
    encode_value,
)
from eelgrid_controller.engines.kubernetes.model.status_reporting import ConditionSet, EventReference, StatusCondition
from eelgrid_controller.engines.kubernetes.reconcilers.gate_engine import ReconcilerContext
from eelgrid_controller.engines.kubernetes.reconcilers.reconciler import CLUSTER_KEY, Reconciler, Result
from eelgrid_controller.state.events import PolicyChanged
from eelgrid_controller.state.policy import BudgetHierarchy, find_policy_violations
from eelgrid_protos.errors import ContractError
from eelgrid_protos.faults import Aborted, Fault
from eelgrid_protos.messages import Policy

FILE_NAME = "power-policies.json"
_FORMAT = 1
_BYTES_MOST = 256 * 1024 * 1024


class FormerValuesFile:
    """The file of former policy values; calls block on the disk, so make them in a thread."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / FILE_NAME

    def load(self) -> tuple[PolicyRecords, str]:
        """Load what was saved last, and why there is nothing where the file is unreadable; raises OSError."""
        try:
            with self.path.open("rb") as file:
                return _memory(json.loads(file.read(_BYTES_MOST))), ""
        except FileNotFoundError:
            return PolicyRecords(), ""
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            aside = self.path.with_name(f"{FILE_NAME}.corrupt")
            self.path.replace(aside)
            return PolicyRecords(), f"{error}; moved to {aside}"

    def save(self, memory: PolicyRecords) -> None:
        """Replace the file; raises OSError, and then the one before is whole."""
        fresh = self.path.with_name(f"{FILE_NAME}.new")
        with fresh.open("wb") as file:
            file.write(json.dumps(_plain(memory), separators=(",", ":")).encode())
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(self.path)
        folder = os.open(self.path.parent, os.O_RDONLY)
        try:
            with contextlib.suppress(OSError):  # some file systems cannot
                os.fsync(folder)
        finally:
            os.close(folder)


def _plain(memory: PolicyRecords) -> dict[str, Any]:
    records = {
        key: {"former": encode_value(one.former), "puts": [encode_value(put) for put in one.puts]}
        for key, one in memory.records.items()
    }
    return {"format": _FORMAT, "records": records, "good": dict(memory.good)}


def _memory(plain: Any) -> PolicyRecords:
    if plain["format"] != _FORMAT:
        raise ValueError(f"format {plain['format']!r}; this version reads format {_FORMAT}")
    records = {
        str(key): FieldRecord(decode_value(key, one["former"]), tuple(decode_value(key, put) for put in one["puts"]))
        for key, one in plain["records"].items()
    }
    good = {
        str(uid): {"metadata": dict(one["metadata"]), "spec": dict(one["spec"])} for uid, one in plain["good"].items()
    }
    return PolicyRecords(records, good)


_OBJECTS_MOST = 10_000
_ATTEMPTS = 5
_LIMITS = RetryLimits(attempts=3, whole_s=10.0, first_s=0.2, most_s=2.0)
# Statuses that people should hear of as an Event: each condition, and what it is then.
_TOLD = {ACCEPTED: False, CONFLICTING: True, WITHIN_BUDGET: False}


class PowerPolicyReconciler(Reconciler[str]):
    """Puts the PowerPolicy objects of one cluster in force together, and writes their status."""

    def __init__(
        self, around: ReconcilerContext, *, every_s: float = 5.0, status_s: float = 5.0, failed_s: float = 30.0
    ) -> None:
        """Rounds at least each `every_s`; one status at most each `status_s`, after a failure each `failed_s`."""
        super().__init__(around, "policies", limits=_LIMITS)
        self.ready_poll_s = min(every_s, self.ready_poll_s)
        self.rounds = 0
        self.statuses = 0
        self._around = around
        self._every_s, self._status_s, self._failed_s = every_s, status_s, failed_s
        self._former = FormerValuesFile(around.data)
        self._memory = PolicyRecords()
        self._saved: PolicyRecords | None = None  # as it is on disk
        self._due_s: dict[str, float] = {}  # uid -> when its status may be written again
        self._said: dict[str, str] = {}
        around.loop.listeners.append(self._on_commit)

    def is_ready(self) -> bool:
        """While this one leads and knows all nodes: a selector must not lose its nodes at each start."""
        return super().is_ready() and self._around.engine.nodes.is_synced

    async def start(self, group: asyncio.TaskGroup) -> None:
        """Load the values that objects replaced, and read the objects."""
        self._memory, fault = await asyncio.to_thread(self._former.load)
        self._saved = None if fault else self._memory
        if fault:
            self.log.error("file=%s read=no error=%s action=start_without", self._former.path, fault)
        self._machine = PowerPolicyMerger(find_policy_violations)
        self._objects = self.make_informer(POWER_POLICIES, keep=_prune_object, max_objects=_OBJECTS_MOST)
        self._objects.add_listener(self._on_objects)
        group.create_task(self._objects.run())
        await self._objects.wait_synced()
        self.queue.add(CLUSTER_KEY)

    def _on_objects(self, _: Sequence[Delta]) -> None:
        self.queue.add(CLUSTER_KEY)

    def _on_commit(self, committed: CommitResult) -> None:
        if any(isinstance(event, PolicyChanged) for event in committed.events):
            self.queue.add(CLUSTER_KEY)

    async def reconcile(self, _: str) -> Result | None:
        """Put in force what the objects want together, then write each status that differs."""
        self.rounds += 1
        decision, applied = await self._apply()
        draws = self._around.draws()
        at_s = self.clock.monotonic_s()
        self._due_s = {uid: due_s for uid, due_s in self._due_s.items() if due_s > at_s}
        for one in decision.standings:
            if self.term() is None:
                break
            if one.found["metadata"]["uid"] in self._due_s:
                continue
            status = build_policy_status(one, applied, draws, at_ns=self.clock.now_ns())
            if status != one.found.get("status"):
                await self._write(one, status)
        return Result(self._every_s)

    # The policy

    async def _apply(self) -> tuple[PolicyDecision, AppliedPolicy]:
        """Put in force what objects want; what was decided, and what is in force now."""
        fault = "the policy kept changing while it was being updated; it is retried shortly"
        for _ in range(_ATTEMPTS):
            policy = await self._around.loop.read(lambda core: core.state.policy)
            decision = self._merge_policies(policy)
            try:
                await self._save(decision.ahead)
                if decision.policy != policy:
                    if self.term() is None:
                        return decision, _applied_policy(policy, "this controller is no longer the leader")
                    policy = await self._around.loop.update_policy(decision.policy)
                    self.log.info("policy=changed revision=%d objects=%d", policy.revision, len(decision.standings))
                await self._save(decision.after)
            except Aborted:
                continue
            except (Fault, ContractError) as error:
                fault = f"the controller rejected it: {error}"
                break
            except OSError as error:
                fault = f"{self._former.path} cannot be written: {error}; free space or grant write access there"
                break
            self._log_fault_once("policy", "")
            return decision, _applied_policy(policy)
        self._log_fault_once("policy", fault)
        return decision, _applied_policy(await self._around.loop.read(lambda core: core.state.policy), fault)

    def _merge_policies(self, policy: Policy) -> PolicyDecision:
        nodes = {
            key.name: node["metadata"].get("labels") or {} for key, node in self._around.engine.nodes.objects.items()
        }
        return self._machine.merge_policies(self._objects.objects.values(), nodes, policy, self._memory)

    async def _save(self, memory: PolicyRecords) -> None:
        if memory != self._saved:
            await asyncio.to_thread(self._former.save, memory)
            self._saved = memory
        self._memory = memory

    # Statuses

    async def _write(self, one: PolicyOutcome, status: Mapping[str, Any]) -> None:
        metadata, before = one.found["metadata"], one.found.get("status") or {}
        uid, name = metadata["uid"], metadata["name"]
        body = {
            "metadata": {"uid": uid, "resourceVersion": metadata["resourceVersion"]},
            # A merge patch takes away only what it names.
            "status": {**dict.fromkeys(before.keys() - status.keys()), **status},
        }

        now_s = self.clock.monotonic_s
        try:
            await self.write(lambda: self.cluster.patch(POWER_POLICIES, name, body, subresource="status"))
        except (Conflict, ObjectNotFound, StaleTerm):
            return  # a newer object is on its way, or none, or another leads
        except ClusterError as error:
            self.failures += 1
            self._due_s[uid] = now_s() + self._failed_s
            self._log_fault_once(name, f"its status could not be written: {error}")
            return
        self.statuses += 1
        self._due_s[uid] = now_s() + self._status_s
        self._log_fault_once(name, "")
        was = ConditionSet.from_json(before.get("conditions"))
        for condition in ConditionSet.from_json(status["conditions"]):
            earlier = was.get(condition.type)
            is_news = earlier is None or earlier.status is not condition.status
            if is_news and _TOLD.get(condition.type) is condition.status:
                self._write_event(one.found, condition)

    def _write_event(self, found: Mapping[str, Any], condition: StatusCondition) -> None:
        name, uid = found["metadata"]["name"], found["metadata"]["uid"]
        self.events.record(
            EventReference(POWER_POLICIES.api_version, "PowerPolicy", "", name, uid),
            condition.message,
            is_warning=True,
            reason=condition.reason,
            action="ApplyingPolicy",
        )

    def _log_fault_once(self, what: str, fault: str) -> None:
        """A fault in the log, once until it is another."""
        if fault and self._said.get(what) != fault:
            self.log.warning("object=%s error=%s", what, fault)
        if fault:
            self._said[what] = fault
        else:
            self._said.pop(what, None)


def _applied_policy(policy: Policy, fault: str = "") -> AppliedPolicy:
    return AppliedPolicy(policy.revision, BudgetHierarchy(policy).limits_w, fault)


def _prune_object(found: Object) -> Object:
    metadata = {key: value for key, value in found["metadata"].items() if key not in ("managedFields", "annotations")}
    return {**found, "metadata": metadata}
