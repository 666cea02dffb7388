"""Interference: which work may share a GPU with which, by how much the loads on it slow each other down.

Owns the loads that share a GPU (`LoadMix`), and the rule by which measured slowdowns are summed and compared with limits. Must
not know how a place is chosen among those that are left, nor what slowdowns were measured with.

Theory. Loads that share a GPU contend for its multiprocessors, caches and memory bandwidth, whatever share each was
promised. s(a, b) is measured for pairs: a takes 1 + s(a, b) times as long beside b as alone on its share. Beside several
loads the slowdowns are added, which is exact where each of them takes its part of what a would use, and where measured
pairs are all that is known. A pair that nobody measured has no bound, so that it exceeds every limit. Slowdowns are not
negative: who joins never relieves those that are there, and since sums are linear in the number of replicas that join, the
largest number within all limits is a division.

Whoever states no limit bears everything, but also does not join those whose limit it would exceed.

Work whose limit lets no load join, of those with a measured slowdown and of any other, has its GPU for itself, and is
charged for all of it (`count_held_milli`): a small share would otherwise be a whole GPU that costs a part of one.

Among GPUs within limits, work that is slowed down holds its share for longer: a slowdown s of a share that draws P watts
costs s P, of whoever joins and of those that are there; P is that of whoever joins, since shares of a GPU are of one order.
A pair that nobody measured counts there as taking turns, s = 1.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping

from eelgrid_controller.state.node_allocations import NodeRecord
from eelgrid_controller.state.policy import cache_by_identity
from eelgrid_protos.messages import ANY_LOAD, Assignment, GpuSharing, Policy, Workload, WorkloadSpec
from eelgrid_protos.quantities import GPU_MILLI_WHOLE

# The loads on a GPU and how many of each there are, in one order.
LoadMix = tuple[tuple[GpuSharing, int], ...]
# A load of which nothing is known.
UNKNOWN_LOAD = GpuSharing()
NEARLY = 1e-9
# How much longer each of two loads takes that have a GPU in turns.
TAKING_TURNS = 1.0
# Answers that are kept for a policy.
_KEPT_MOST = 65_536


def is_shared(assignment: Assignment) -> bool:
    """Returns whether an assignment holds a part of a GPU beside others, and no slice of its own.

    What is only held for nominated work (state.nominations) has a key with a space, which no workload has.
    """
    if " " in assignment.workload_id:
        return False
    return 0 < assignment.gpu_milli < GPU_MILLI_WHOLE and assignment.gpu_instance is None and bool(assignment.gpu_uuids)


def has_shares(record: NodeRecord) -> bool:
    """Returns whether work has shares of GPUs of a node."""
    return any(gpu_milli < GPU_MILLI_WHOLE for _, gpu_milli in record.shares_held)


def make_mix(loads: Iterable[GpuSharing]) -> LoadMix:
    """Returns loads as a mix."""

    def key(item: tuple[GpuSharing, int]) -> tuple[str, float]:
        most = item[0].slowdown_most
        return item[0].load, math.inf if most is None else most

    return tuple(sorted(Counter(loads).items(), key=key))


def join_mix(mix: LoadMix, loads: Iterable[GpuSharing]) -> LoadMix:
    """Returns a mix with further loads."""
    return make_mix((*(one for one, count in mix for _ in range(count)), *loads))


def list_mixes(
    record: NodeRecord, workloads: Mapping[str, Workload], coming: GpuSharing = UNKNOWN_LOAD
) -> dict[str, LoadMix]:
    """Returns the loads on each GPU of a node that work has a share of, by UUID; `coming` is that of what is not known yet."""
    found: dict[str, list[GpuSharing]] = {}
    for assignment in record.assignments.values():
        if is_shared(assignment):
            workload = workloads.get(assignment.workload_id)
            load = coming if workload is None else workload.spec.shared_load or UNKNOWN_LOAD
            found.setdefault(assignment.gpu_uuids[0], []).append(load)
    return {uuid: make_mix(loads) for uuid, loads in found.items()}


class InterferenceRules:
    """Measured slowdowns and limits of a policy."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self._slowdowns = {(one.load, one.beside): one.slowdown for one in policy.interference}
        self._names = {name for pair in self._slowdowns for name in pair} - {ANY_LOAD}
        self.default_most = policy.shared_slowdown_most
        self._joining: dict[tuple[LoadMix, GpuSharing, int], int] = {}
        self._closing: dict[GpuSharing, bool] = {}

    @property
    def has_pairs(self) -> bool:
        """Whether any pair was measured."""
        return bool(self._slowdowns)

    def find_slowdown(self, load: str, beside: str) -> float:
        """Returns by how much one load is slowed down beside another, as a part of its time; infinite if nobody measured it."""
        keys = (load, beside), (load, ANY_LOAD), (ANY_LOAD, beside), (ANY_LOAD, ANY_LOAD)
        return next((self._slowdowns[key] for key in keys if key in self._slowdowns), math.inf)

    def resolve_name(self, load: str) -> str:
        """Returns the name of a load where a pair has it; empty for all others, which are slowed down alike."""
        return load if load in self._names else ""

    def find_limit(self, one: GpuSharing) -> float | None:
        """Returns by how much a load may be slowed down; None for no limit."""
        return self.default_most if one.slowdown_most is None else one.slowdown_most

    def closes_gpu(self, one: GpuSharing) -> bool:
        """Returns whether a load's limit lets no other load join it on a GPU, measured or not."""
        found = self._closing.get(one)
        if found is None:
            limit = self.find_limit(one)
            others = (self.find_slowdown(one.load, other) for other in {*self._names, one.load, ""})
            found = limit is not None and min(others) > limit + NEARLY
            if len(self._closing) >= _KEPT_MOST:
                self._closing.clear()
            self._closing[one] = found
        return found

    def sum_slowdown(self, one: GpuSharing, mix: LoadMix) -> float:
        """Returns by how much a load is slowed down beside a mix of others; infinite if a pair was not measured."""
        return sum(count * self.find_slowdown(one.load, other.load) for other, count in mix)

    def are_within_limits(self, mix: LoadMix) -> bool:
        """Returns whether all loads on one GPU bear each other."""
        for one, _ in mix:
            most = self.find_limit(one)
            # Sums of a few measured parts: equal to a limit is within it.
            if most is not None and self.sum_slowdown(one, _without(mix, one)) > most + NEARLY:
                return False
        return True

    def count_joining(self, mix: LoadMix, newcomer: GpuSharing, most: int) -> int:
        """Counts how many replicas of one load may join those on a GPU, up to `most`."""
        key = mix, newcomer, most
        found = self._joining.get(key)
        if found is None:
            found = self._compute_joining(mix, newcomer, most)
            if len(self._joining) >= _KEPT_MOST:
                self._joining.clear()
            self._joining[key] = found
        return found

    def _compute_joining(self, mix: LoadMix, newcomer: GpuSharing, most: int) -> int:
        # The newcomers beside those that are there, and beside each other.
        bounds = [(newcomer, self.sum_slowdown(newcomer, mix), 1)]
        bounds += [(one, self.sum_slowdown(one, _without(mix, one)), 0) for one, _ in mix]
        for one, before, free in bounds:
            limit = self.find_limit(one)
            if limit is None:
                continue
            if before > limit + NEARLY:
                return 0
            each = self.find_slowdown(one.load, newcomer.load)
            if each > 0.0:
                more = 0 if math.isinf(each) else int(min(GPU_MILLI_WHOLE, (limit - before + NEARLY) / each))
                most = min(most, free + more)
        return most

    def sum_added(self, mix: LoadMix, newcomer: GpuSharing) -> float:
        """Sums by how much a newcomer and those on a GPU would slow each other down."""
        total = 0.0
        for one, count in mix:
            for load, beside in ((newcomer, one), (one, newcomer)):
                slowdown = self.find_slowdown(load.load, beside.load)
                total += count * (slowdown if math.isfinite(slowdown) else TAKING_TURNS)
        return total

    def find_needed(self, mix: LoadMix, newcomer: GpuSharing) -> float:
        """Returns how much a newcomer would have to bear on a GPU; infinite if that is not known, or others do not bear it."""
        tolerant = GpuSharing(load=newcomer.load, slowdown_most=math.inf)
        return self.sum_slowdown(newcomer, mix) if self.count_joining(mix, tolerant, 1) else math.inf

    def find_unmeasured(self, mix: LoadMix) -> tuple[tuple[str, str], ...]:
        """Returns the pairs of loads with names that nobody measured and that matter to a limit, each once."""
        pairs = (
            (one.load, other.load)
            for one, _ in mix
            for other, _ in _without(mix, one)
            if self.find_limit(one) is not None and not {one.load, other.load} & {"", ANY_LOAD}
        )
        return tuple(pair for pair in dict.fromkeys(pairs) if math.isinf(self.find_slowdown(*pair)))

    def describe_unbearable(
        self,
        record: NodeRecord,
        coming: Iterable[Assignment],
        workloads: Mapping[str, Workload],
        *,
        load: GpuSharing | None = None,
        more: Mapping[str, tuple[GpuSharing, ...]] | None = None,
    ) -> str:
        """Names a GPU of a node whose loads do not bear each other, of those that `coming`, part of the record, has shares of.

        Empty if there is none. `load` is that of work that is not known yet, and `more` are further loads by UUID.
        """
        uuids = {assignment.gpu_uuids[0] for assignment in coming if is_shared(assignment)}
        if not uuids:
            return ""
        mixes = list_mixes(record, workloads, load or UNKNOWN_LOAD)
        for uuid in sorted(uuids):
            if not self.are_within_limits(join_mix(mixes.get(uuid, ()), (more or {}).get(uuid, ()))):
                return uuid
        return ""


def list_limit_settings(policy: Policy) -> tuple[object, ...]:
    """Returns the settings from which it follows who may share a GPU, and which shares hold whole ones."""
    return policy.interference, policy.shared_slowdown_most


@cache_by_identity
def _get_rules(policy: Policy) -> InterferenceRules:
    return InterferenceRules(policy)


def count_held_milli(policy: Policy, spec: WorkloadSpec) -> int:
    """Returns the thousandths of each of its GPUs that a workload keeps from others: its share, or all if it closes them."""
    load = spec.shared_load
    has_limit = load is not None and (policy.shared_slowdown_most is not None or load.slowdown_most is not None)
    if load is not None and has_limit and _get_rules(policy).closes_gpu(load):
        return GPU_MILLI_WHOLE
    return spec.request.gpu_milli


def _without(mix: LoadMix, one: GpuSharing) -> LoadMix:
    """Returns a mix without one of a load."""
    counts = ((other, count - (other == one)) for other, count in mix)
    return tuple((other, count) for other, count in counts if count)
