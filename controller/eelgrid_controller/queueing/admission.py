"""Admission by queue: who may submit where, whether a workload may start by its queue's quota, and why not.

`QueueIndex` follows the state after each event: the quota tree with the usage of running work, the waiting work by queue,
and the capacity of the nodes. It decides on the state as it is at that moment, so two workloads of one pass never pass a
limit together. Owns the sentences about queues. Must not know where work is placed.

Of the models that a request allows, those whose quota all its replicas fit into are left: a narrowed request is never
placed beyond a quota, and one that would fit only on several models together waits. Watts are counted in the same way,
each model at its most powerful registered GPU, so that what is placed is never charged with more than was admitted.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from itertools import islice

from eelgrid_controller.formatting import format_cpu, format_gpu, format_memory, format_watts
from eelgrid_controller.queueing.fair_share import NOT_BY_QUOTA, FairRound, PendingTree, compute_age_check
from eelgrid_controller.queueing.past_use import PastUse
from eelgrid_controller.queueing.quota import QuotaShortage, QuotaTree
from eelgrid_controller.state.cluster_state import ClusterState
from eelgrid_controller.state.events import (
    ArraySubmitted,
    Event,
    PolicyChanged,
    PreemptionStarted,
    WorkloadDeferred,
    WorkloadHeld,
    WorkloadQueueChanged,
    WorkloadReleased,
    WorkloadSubmitted,
)
from eelgrid_controller.state.gangs import get_gang_key
from eelgrid_controller.state.interference import count_held_milli, list_limit_settings
from eelgrid_controller.state.node_allocations import NodeRecord, is_sliced, list_rechargeable_workloads
from eelgrid_controller.state.pending_reasons import PendingConstraint
from eelgrid_controller.state.queue_usage import (
    QueueCharge,
    count_charge,
    count_milliwatts,
    count_placed,
    list_leaf_queues,
    qualify_queue,
    resolve_queue,
    resolve_user,
    scale_milliwatts,
)
from eelgrid_protos.errors import Violation
from eelgrid_protos.faults import InvalidArgument, PermissionDenied
from eelgrid_protos.messages import (
    DEFAULT_QUEUE,
    MODEL_PREFIX,
    POWER_RESOURCE,
    Inventory,
    Placement,
    Queue,
    QueueStatus,
    Workload,
    WorkloadSpec,
)
from eelgrid_protos.quantities import GPU_MILLI_WHOLE

_NAMED = 8
_FIELDS = {"gpu": "gpu_count", "cpu": "cpu_milli", "memory": "memory_bytes", POWER_RESOURCE: "gpu_count"}


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueHold:
    """Why work may not start by its queue, whatever room there is.

    Without a shortage the queue that it names holds no work. `is_lasting` if it would not fit if nothing else ran.
    """

    queue: str
    shortage: QuotaShortage | None = None
    is_lasting: bool = False

    @property
    def constraint(self) -> PendingConstraint:
        """The constraint that holds it back."""
        if self.shortage is None:
            return PendingConstraint.QUEUE
        return PendingConstraint.MAX_QUOTA if self.is_lasting else PendingConstraint.QUOTA


def format_resource_amount(resource: str, amount: int) -> str:
    """Formats an amount of a resource with its unit: 2 GPUs, 0.5 H100, 16 CPUs, 64 GiB of memory."""
    if resource == "memory":
        return f"{format_memory(amount)} of memory"
    if resource == "cpu":
        return f"{format_cpu(amount)} CPU{'' if amount == GPU_MILLI_WHOLE else 's'}"
    if resource == "gpu":
        return f"{format_gpu(amount)} GPU{'' if amount == GPU_MILLI_WHOLE else 's'}"
    if resource == POWER_RESOURCE:
        return f"{format_watts(amount)} of power"
    return f"{format_gpu(amount)} {resource.removeprefix(MODEL_PREFIX)}"


def describe_queue_hold(hold: QueueHold) -> str:
    """Returns why work waits for its queue: the constraint, a colon and a sentence without numbers."""
    shortage = hold.shortage
    if shortage is None:
        return hold.constraint.describe("" if hold.queue else "unnamed", queue=hold.queue)
    case = "" if hold.is_lasting else shortage.bound
    return hold.constraint.describe(case, queue=shortage.queue, resource=shortage.resource)


_BOUNDS: Mapping[str, tuple[str, str]] = {
    "quota": ("of its quota", "nominal"),
    "borrowing": ("of its quota and what it may borrow", "borrow"),
    "usage": ("of what it may use", "max"),
}


def describe_queue_remedy(hold: QueueHold, tree: QuotaTree) -> str:
    """Describes what is used of the bound, by how much the request exceeds it, and what would help."""
    shortage = hold.shortage
    if shortage is None:
        names = [queue.name for queue in tree.queues if not tree.children[tree.numbers[queue.name]]]
        queues = ", ".join(names[:_NAMED]) + (", ..." if len(names) > _NAMED else "")
        return f"The queue that it names holds no work. To help: eelctl queue move it to one of {queues}."
    bound, field = _BOUNDS[shortage.bound]
    resource = shortage.resource
    used, most, more, lack = (
        format_resource_amount(resource, amount)
        for amount in (shortage.used, shortage.most, shortage.more, shortage.lack)
    )
    declared = next((q for q in tree.queues[tree.numbers[shortage.queue]].quotas if q.resource == resource), None)
    now = 0
    if declared is not None:
        now = {
            "quota": declared.nominal,
            "borrowing": declared.borrowing_limit or 0,
            "usage": declared.usage_limit or 0,
        }[shortage.bound]
    raised = format_resource_amount(resource, now + shortage.lack)
    raise_it = f"raise {field} of {resource} in queue {shortage.queue} to {raised} (eelctl queue apply)"
    if hold.is_lasting:
        return (
            f"Queue {shortage.queue} can have {most} {bound} at the most, and this needs {more}. To help: ask for {lack} "
            f"less, or {raise_it}."
        )
    return (
        f"Queue {shortage.queue} uses {used} of {most} {bound}, and this needs {more} more. To help: wait for or cancel "
        f"work in it that holds {lack}, or {raise_it}."
    )


class QueueIndex:
    """The queues of one state: their usage, what waits in them, and what may start."""

    def __init__(self, state: ClusterState) -> None:
        self._state = state
        self._capacity: dict[str, tuple[int, int, int]] = {}
        # By node: the inventory that was counted, and by model the milliwatts that its GPUs would be charged with.
        self._counted: dict[str, tuple[Inventory, Mapping[str, int]]] = {}
        # By model: the most of these of any GPU; None until it is needed.
        self._milliwatts: dict[str, int] | None = None
        self._capacity_sum: list[int] = [0, 0, 0]
        # Rises with every change of the queues, so that a round over others ends.
        self.generation = 0
        self._rebuild()

    @property
    def is_active(self) -> bool:
        """Whether the policy declares queues."""
        return bool(self._queues)

    def _rebuild(self) -> None:
        state = self._state
        self._queues, self._limits = state.policy.queues, list_limit_settings(state.policy)
        self.generation += 1
        self.tree = QuotaTree(self._queues)
        self._pending = PendingTree(len(self._queues) + 1)
        self._charges: dict[str, QueueCharge] = {}
        self._running: dict[str, int] = {}
        self._charged: dict[str, dict[str, QueueCharge]] = {}
        self._capacity, self._capacity_sum = {}, [0, 0, 0]
        self._counted, self._milliwatts = {}, None
        # Counts changes of what runs and of the nodes; by the top of a tree, when it last changed.
        self._version, self._use_versions = 0, [0] * len(self._queues)
        self._leaves = frozenset(list_leaf_queues(self._queues))
        if not self._queues:
            return
        for workload_id in state.queue_usage.charges:
            self._sync_charge(workload_id)
        for workload_id in state.pending:
            self.sync_pending(workload_id)
        self._refresh_capacity(state.nodes)

    def refresh(self, event: Event, touched: Iterable[str]) -> None:
        """Follows an event that was applied, and has changed these nodes."""
        if isinstance(event, PolicyChanged):
            if (self._state.policy.queues, list_limit_settings(self._state.policy)) != (self._queues, self._limits):
                self._rebuild()
            return
        if not self._queues:
            return
        if isinstance(event, WorkloadDeferred | PreemptionStarted):
            self._pending.forget_reason(event.workload_id)
            return
        for workload_id in (*_list_named(event), *list_rechargeable_workloads(event, self._state.nodes)):
            self._sync_charge(workload_id)
            self.sync_pending(workload_id)
        self._refresh_capacity(touched)

    def _sync_charge(self, workload_id: str) -> None:
        charge = self._state.queue_usage.charges.get(workload_id)
        before = self._charges.pop(workload_id, None)
        self._note_change(before, charge)
        for one, sign in ((before, -1), (charge, 1)):
            if one is not None:
                in_queue = self._charged.setdefault(one.queue, {})
                in_queue.pop(workload_id, None)
                if one is charge:
                    in_queue[workload_id] = one
                self.tree.add(one.queue, one.amounts, sign)
                self._running[one.queue] = self._running.get(one.queue, 0) + sign
        if charge is not None:
            self._charges[workload_id] = charge

    def _note_change(self, before: QueueCharge | None, after: QueueCharge | None) -> None:
        """Gives the use of the trees of two charges a new version, if they differ."""
        if before != after:
            self._version += 1
            for one in (before, after):
                if one is not None:
                    self._use_versions[self.tree.roots[self.tree.numbers[one.queue]]] = self._version

    def get_use_version(self, spec: WorkloadSpec) -> int:
        """Returns the version of the use of the tree in which work waits: what quotas refuse they refuse until it changes.

        NOT_BY_QUOTA if work is nominated, which counts as if it ran, or if the work's queue holds none.
        """
        queue = self.find_leaf(spec)
        if queue is None or self._state.nominations:
            return NOT_BY_QUOTA
        return self._use_versions[self.tree.roots[self.tree.numbers[queue]]]

    def sync_pending(self, workload_id: str) -> None:
        """Follows a workload that began or ceased to wait, or was parked or unparked in the pending queue."""
        if not self._queues:
            return
        self._pending.discard(workload_id)
        ticket = self._state.pending.ticket(workload_id)
        if ticket is not None:
            workload = self._state.workloads[workload_id]
            queue = self.find_leaf(workload.spec)
            number = len(self._queues) if queue is None else self.tree.numbers[queue]
            spec = workload.spec
            # Work without a process is not alike: it goes to other nodes, and waits for watts where processes need not.
            stated_s = spec.expected_runtime_s or 0.0, -1.0 if spec.process is None else spec.process.time_limit_s
            deadline_ns = 0 if spec.deadline is None else spec.deadline.end_ns
            # What its queue refuses a part of a gang is refused by what the other parts ask for, too.
            gang = get_gang_key(workload)
            shape = (
                spec.request,
                spec.required_traits,
                spec.shared_load,
                spec.replicas,
                is_sliced(workload),
                *stated_s,
                deadline_ns,
                gang,
            )
            self._pending.add(number, resolve_user(workload), shape, ticket)

    def _refresh_capacity(self, names: Iterable[str]) -> None:
        has_changed = False
        for name in names:
            record = self._state.nodes.get(name)
            counted = self._counted.pop(name, None)
            if counted is not None and record is not None and counted[0] is record.inventory:
                self._counted[name] = counted
                continue
            if record is not None:
                self._counted[name] = record.inventory, _count_milliwatts(record.inventory)
            self._milliwatts, has_changed = None, True
            new = _capacity_of(record)
            old = self._capacity.pop(name, (0, 0, 0))
            self._capacity[name] = new
            self._capacity_sum = [total + a - b for total, a, b in zip(self._capacity_sum, new, old, strict=True)]
        if has_changed:
            # Quotas of models and of power depend on the GPUs that there are.
            self._version += 1
            self._use_versions = [self._version] * len(self._queues)

    def find_leaf(self, spec: WorkloadSpec) -> str | None:
        """Returns the queue in which work waits; None if it names one that holds no work."""
        queue = resolve_queue(self._queues, spec.queue)
        return queue if queue in self._leaves else None

    def list_charged(self, queue: str) -> Mapping[str, QueueCharge]:
        """Returns the charges of the running work of a queue, by workload."""
        return self._charged.get(queue, {})

    def begin_round(self, now_ns: int, *, skips_refused: bool = False) -> FairRound:
        """Begins a round over all waiting work, or without what quotas are known to refuse still."""
        state, policy = self._state, self._state.policy
        is_aged = compute_age_check(
            lambda workload_id: state.workloads[workload_id].submitted_ns, now_ns, policy.queue_age_limit_s
        )
        without = self._list_refused() if skips_refused else frozenset()
        return FairRound(self.tree, self._pending, self.sum_past_use(now_ns), is_aged=is_aged, without=without)

    def _list_refused(self) -> frozenset[int]:
        """Returns the tops of the trees whose quotas have refused all work of the tree since their use has changed."""
        if self._state.nominations:
            return frozenset()
        tree, versions = self.tree, self._use_versions
        tried = (root for number, root in enumerate(tree.roots) if not self._pending.is_refused(number, versions[root]))
        return frozenset(tree.tops).difference(tried)

    def sum_past_use(self, now_ns: int) -> PastUse:
        """Sums the past use of all queues and their users."""
        return PastUse(
            self.tree,
            lambda: self._state.queue_usage.history,
            tuple(self._capacity_sum),
            now_ns=now_ns,
            half_life_s=self._state.policy.queue_half_life_s,
        )

    def list_order(self, now_ns: int, most: int) -> list[str]:
        """Returns the ids of the work that a round that began now would try first."""
        return [workload_id for _, _, workload_id in islice(self.begin_round(now_ns), most)]

    def note_start(self, fair_round: FairRound, workload: Workload) -> None:
        """Brings a round's past use up to date after work of it was placed."""
        queue = resolve_queue(self._queues, workload.spec.queue)
        if queue is not None:
            fair_round.past.refresh(queue, resolve_user(workload))

    def admit(self, spec: WorkloadSpec, known_models: Callable[[], Iterable[str]]) -> WorkloadSpec | QueueHold:
        """Returns the specification with the models whose quota it fits into, or why it may not start now."""
        return self.admit_without(spec, known_models)

    def admit_without(
        self,
        spec: WorkloadSpec,
        known_models: Callable[[], Iterable[str]],
        leaving: Iterable[str] = (),
        *,
        workload_id: str = "",
        starting: Iterable[tuple[str, tuple[Placement, ...]]] = (),
        released: Iterable[tuple[str, tuple[Placement, ...]]] = (),
    ) -> WorkloadSpec | QueueHold:
        """Like `admit`, as if some running work, or replicas of it, were gone and some pending work, with its places, had started.

        What is nominated counts as started, but not itself.
        """
        # Summed by queue first: many that leave one queue are one change of the tree.
        changes: dict[str, dict[str, int]] = {}
        nominated = ((event.workload_id, event.placements) for event in self._state.nominations)
        started = ((charge, 1) for charge in self._list_charges((*nominated, *starting)) if charge.user != workload_id)
        left = ((self._charges[key], -1) for key in leaving if key in self._charges)
        returned = ((charge, -1) for charge in self._list_charges(released))
        for charge, sign in (*left, *started, *returned):
            amounts = changes.setdefault(charge.queue, {})
            for resource, amount in charge.amounts.items():
                amounts[resource] = amounts.get(resource, 0) + sign * amount
        for queue, amounts in changes.items():
            self.tree.add(queue, amounts)
        try:
            return self._admit(spec, known_models)
        finally:
            for queue, amounts in changes.items():
                self.tree.add(queue, amounts, -1)

    def _list_charges(self, held: Iterable[tuple[str, tuple[Placement, ...]]]) -> Iterable[QueueCharge]:
        """Yields what work is charged with at these places, each under its own name."""
        for workload_id, placements in held:
            # Elements of an array that is being submitted are not known yet; their quota is checked when they start.
            workload = self._state.workloads.get(workload_id)
            queue = None if workload is None else resolve_queue(self._queues, workload.spec.queue)
            if workload is not None and queue is not None:
                placed = replace(workload, placements=placements)
                yield QueueCharge(queue, workload_id, count_placed(self._state.policy, placed, self._state.nodes))

    def _admit(self, spec: WorkloadSpec, known_models: Callable[[], Iterable[str]]) -> WorkloadSpec | QueueHold:
        queue = self.find_leaf(spec)
        if queue is None:
            return QueueHold(queue=spec.queue)
        amounts = count_charge(self._state.policy, spec)
        shortage = self.tree.find_shortage(queue, amounts)
        if shortage is not None:
            lasting = self.tree.find_shortage(queue, amounts, when_empty=True)
            return QueueHold(queue=queue, shortage=lasting or shortage, is_lasting=lasting is not None)
        governed = self.tree.governed_models(queue) if amounts.get("gpu") else frozenset()
        allowed = spec.request.gpu_models
        has_power = bool(amounts.get("gpu")) and self.tree.is_bounded(queue, POWER_RESOURCE)
        if not has_power and (not governed or (allowed and governed.isdisjoint(allowed))):
            return spec
        models = allowed or tuple(known_models())
        short = self._find_short_models(queue, models, spec)
        if not short:
            return spec
        left = tuple(model for model in models if model not in short)
        if left:
            return replace(spec, request=replace(spec.request, gpu_models=left))
        first = short[models[0]]
        never = [
            found
            for model in models
            if (found := self.tree.find_shortage(queue, self._amounts_of(model, spec), when_empty=True))
        ]
        is_lasting = len(never) == len(models)
        return QueueHold(queue=queue, shortage=never[0] if is_lasting else first, is_lasting=is_lasting)

    def prefer_own_models(self, spec: WorkloadSpec, known_models: Callable[[], Iterable[str]]) -> WorkloadSpec | None:
        """Returns an admitted specification with the GPU models that its queue has and need not borrow for it.

        None if these are all of its models, or none of them.
        """
        queue = self.find_leaf(spec) if self._queues and spec.request.gpu_count else None
        governed = frozenset() if queue is None else self.tree.governed_models(queue)
        if queue is None or not governed:
            return None
        models = spec.request.gpu_models or tuple(known_models())
        own = tuple(one for one in models if one in governed and not self._must_borrow(queue, one, spec))
        if not own or len(own) == len(models):
            return None
        return replace(spec, request=replace(spec.request, gpu_models=own))

    def _must_borrow(self, queue: str, model: str, spec: WorkloadSpec) -> bool:
        resource = MODEL_PREFIX + model
        amounts = {resource: self._amounts_of(model, spec)[resource]}
        self.tree.add(queue, amounts)
        try:
            return self.tree.is_borrowing(self.tree.numbers[queue], amounts)
        finally:
            self.tree.add(queue, amounts, -1)

    def _find_short_models(self, queue: str, models: Iterable[str], spec: WorkloadSpec) -> dict[str, QuotaShortage]:
        found = {}
        for model in models:
            shortage = self.tree.find_shortage(queue, self._amounts_of(model, spec))
            if shortage is not None:
                found[model] = shortage
        return found

    def _amounts_of(self, model: str, spec: WorkloadSpec) -> dict[str, int]:
        """Returns what all replicas are charged with on GPUs of one model, at the most."""
        if self._milliwatts is None:
            self._milliwatts = {}
            for _, found in self._counted.values():
                for name, milliwatts in found.items():
                    self._milliwatts[name] = max(milliwatts, self._milliwatts.get(name, 0))
        gpus, milli = spec.replicas * spec.request.gpu_count, count_held_milli(self._state.policy, spec)
        return {
            MODEL_PREFIX + model: gpus * milli,
            POWER_RESOURCE: gpus * scale_milliwatts(self._milliwatts.get(model, 0), milli),
        }

    def count_admitted(self, spec: WorkloadSpec, known_models: Callable[[], Iterable[str]]) -> int:
        """Returns how many of the replicas the quota allows to start now."""
        low, high = 0, spec.replicas
        while low < high:
            middle = (low + high + 1) // 2
            if isinstance(self.admit(replace(spec, replicas=middle), known_models), QueueHold):
                high = middle - 1
            else:
                low = middle
        return low

    def check_submission(
        self, spec: WorkloadSpec, owner: str, known_models: Callable[[], Iterable[str]]
    ) -> WorkloadSpec:
        """Returns the specification with its queue; raises InvalidArgument and PermissionDenied.

        An unknown queue is refused, a user or namespace without access to it, and work that it could never hold.
        """
        spec = self.qualify(spec)
        spec = replace(spec, queue=self.find_queue(spec.queue))
        self._check_access(spec, owner)
        found = self.admit(spec, known_models)
        if isinstance(found, QueueHold) and found.is_lasting and found.shortage is not None:
            shortage = found.shortage
            field = f"spec.request.{_FIELDS.get(shortage.resource, 'gpu_models')}"
            needs = format_resource_amount(shortage.resource, shortage.more)
            most = format_resource_amount(shortage.resource, shortage.most)
            bound, name = _BOUNDS[shortage.bound]
            violation = Violation(
                field,
                f"needs {needs}; queue {shortage.queue} can have {most} {bound} at the most",
                f"ask for less, choose another queue, or have {name} of {shortage.resource} raised there",
            )
            raise InvalidArgument(
                f"queue {found.queue} could never hold this, even with nothing else in it", (violation,)
            )
        return spec

    def qualify(self, spec: WorkloadSpec) -> WorkloadSpec:
        """Returns the specification with the queue of its own namespace, where one of that name is declared."""
        queue = qualify_queue(self._queues, spec.queue, spec.namespace)
        return spec if queue == spec.queue else replace(spec, queue=queue)

    def find_queue(self, name: str) -> str:
        """Returns the queue of a submission, which must hold work; raises InvalidArgument with near names."""
        leaves = list_leaf_queues(self._queues)
        if name in leaves:
            return name
        if not name and DEFAULT_QUEUE in leaves:
            return DEFAULT_QUEUE
        names = list(leaves)
        shown = ", ".join(names[:_NAMED]) + (", ..." if len(names) > _NAMED else "")
        below = [queue.name for queue in self._queues if name and queue.parent == name and queue.name in leaves]
        near = get_close_matches(name, names, n=3) if len(names) <= 2000 else []
        if not name:
            problem, remedy = "is empty, and there is no queue default", f"name one of {shown}"
        elif name in self.tree.numbers:
            problem = f"is {name}, which has queues below it and holds no work itself"
            remedy = f"name one below it: {', '.join(below[:_NAMED]) or shown}"
        else:
            problem = f"is {name!r}, and there is no such queue"
            remedy = f"did you mean {' or '.join(near)}?" if near else f"name one of {shown}"
        raise InvalidArgument("the queue is not known", (Violation("spec.queue", problem, remedy),))

    def _check_access(self, spec: WorkloadSpec, owner: str) -> None:
        user = owner or spec.user or spec.labels.get("user", "")
        for queue in self.tree.list_path(spec.queue):
            for kind, name, allowed in (
                ("user", user, queue.users),
                ("namespace", spec.namespace, queue.namespaces),
            ):
                if allowed and name not in allowed:
                    raise PermissionDenied(
                        f"{kind} {name or '(none)'} may not submit to queue {queue.name}; choose another queue, or have "
                        f"the {kind} added to its {kind}s with eelctl queue apply"
                    )

    def list_statuses(self, now_ns: int) -> Iterable[tuple[int, Callable[[], QueueStatus]]]:
        """Yields the position of each queue and what makes its status, each after its parent."""
        past = self.sum_past_use(now_ns)
        running, waiting = self._sum_below(self._running), self._sum_below(self._waiting())

        def make(number: int, queue: Queue) -> QueueStatus:
            return QueueStatus(
                queue=queue,
                usage=self.tree.usage(queue.name),
                weighted_share=min(1e18, self.tree.borrowed_ratio(number) / queue.weight),
                weighted_usage=min(1e18, past.of_queue(number) / queue.weight),
                running=running[number],
                waiting=waiting[number],
            )

        for number, queue in enumerate(self.tree.queues):
            yield number, lambda number=number, queue=queue: make(number, queue)  # type: ignore[misc]

    def _waiting(self) -> dict[str, int]:
        return {
            queue.name: count for queue, count in zip(self.tree.queues, self._pending.counts, strict=False) if count
        }

    def _sum_below(self, counts: Mapping[str, int]) -> list[int]:
        sums = [counts.get(queue.name, 0) for queue in self.tree.queues]
        for number in range(len(sums) - 1, -1, -1):
            if self.tree.parents[number] >= 0:
                sums[self.tree.parents[number]] += sums[number]
        return sums


def _list_named(event: Event) -> tuple[str, ...]:
    """Lists workloads that begin or end to wait, or wait elsewhere, by an event."""
    if isinstance(event, ArraySubmitted):
        return event.workload_ids
    changes = WorkloadSubmitted | WorkloadQueueChanged | WorkloadHeld | WorkloadReleased
    return (event.workload_id,) if isinstance(event, changes) else ()


def _count_milliwatts(inventory: Inventory) -> Mapping[str, int]:
    """Returns the most that a GPU of each model is charged with."""
    found: dict[str, int] = {}
    for gpu in inventory.gpus:
        found[gpu.model] = max(count_milliwatts(gpu), found.get(gpu.model, 0))
    return found


def _capacity_of(record: NodeRecord | None) -> tuple[int, int, int]:
    if record is None:
        return (0, 0, 0)
    inventory = record.inventory
    return (len(inventory.gpus) * GPU_MILLI_WHOLE, inventory.cpu_milli, inventory.memory_bytes)
