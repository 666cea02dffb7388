"""Preemption: minimal victims against brute force, and a core in which guarantees hold and preemptions end."""

import contextlib
import itertools
import json
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.builders.cluster import build_node, build_request
from tests.state_invariants import check_invariants

from eelgrid_controller.core.core import Core
from eelgrid_controller.queueing.past_use import PastUse, UseExchange
from eelgrid_controller.queueing.preemption import (
    FoundPlace,
    PreemptionCandidate,
    PreemptionGainer,
    PreemptionRules,
    VictimSearch,
    finish_search,
    order_candidates,
    resolve_preemption,
)
from eelgrid_controller.queueing.quota import QuotaTree
from eelgrid_controller.state.cluster_state import ClusterState
from eelgrid_controller.state.events import (
    PreemptionStarted,
    WorkloadEvicted,
    WorkloadPlaced,
    WorkloadScaled,
    event_from_plain,
    event_to_plain,
)
from eelgrid_controller.state.queue_usage import DecayedUsage
from eelgrid_protos import catalogue
from eelgrid_protos.faults import InvalidArgument
from eelgrid_protos.messages import (
    AttemptState,
    AttemptStatus,
    Mobility,
    PreemptionReclaim,
    PreemptionWithin,
    ProcessSpec,
    Queue,
    QueuePreemption,
    QueueQuota,
    TrainingPromise,
    WorkloadKind,
    WorkloadPhase,
)

S = 10**9
NODES = {"a": 4, "b": 2, "c": 2}
PROCESS = ProcessSpec(argv=("train",), working_directory="/")
ELASTIC = TrainingPromise(profile="p", slowdown_most=0.1, replicas_least=1, replicas_most=8)
SCALABLE = (WorkloadKind.INFERENCE_SERVICE,)


# The search alone, where the work fits is any monotone condition on what is gone.


@st.composite
def searches(draw):
    """Work on nodes with two resources, and waiting work that needs amounts of one node and of the whole."""
    count = draw(st.integers(0, 7))
    work = [(draw(st.sampled_from("abc")), draw(st.integers(1, 3)), draw(st.integers(0, 3))) for _ in range(count)]
    return work, draw(st.integers(1, 6)), draw(st.integers(0, 8))


@given(case=searches())
@settings(deadline=None, max_examples=300)
def test_the_victims_suffice_and_none_of_them_is_one_too_many(case):
    work, needs_at_a_node, needs_in_all = case
    candidates = [
        PreemptionCandidate(
            workload_id=f"w{n}",
            queue="q",
            priority=0,
            amounts={"gpu": 1000},
            node_names=frozenset({node}),
            started_ns=n,
        )
        for n, (node, _, _) in enumerate(work)
    ]

    def find(victims):
        gone = [work[int(one.workload_id[1:])] for one in victims]
        if sum(amount for _, _, amount in gone) < needs_in_all:
            return None
        for name in "abc":
            if sum(amount for node, amount, _ in gone if node == name) >= needs_at_a_node:
                return FoundPlace(name, frozenset({name}))
        return None

    plan = finish_search(VictimSearch(find).run(candidates))
    possible = [
        subset for size in range(len(work) + 1) for subset in itertools.combinations(candidates, size) if find(subset)
    ]
    assert (plan.place is not None) == bool(possible)
    if plan.place is not None:
        assert find(plan.victims) is not None
        chosen = {one.workload_id for one in plan.victims}
        assert not any({one.workload_id for one in subset} < chosen for subset in possible)


def forests(beyond):
    """Queues with their quota, rules and weight; a tree has one measure for reclaim beyond quotas."""
    rules = st.builds(
        QueuePreemption,
        within=st.sampled_from(list(PreemptionWithin)),
        reclaim=st.sampled_from([PreemptionReclaim.UNSPECIFIED, PreemptionReclaim.NOMINAL, beyond]),
        min_runtime_s=st.sampled_from([0.0, 0.0, 3.0]),
        horizon_s=st.sampled_from([0.0, 60.0]),
    )
    return st.lists(st.tuples(st.integers(0, 4), rules, st.sampled_from([1.0, 2.0])), min_size=2, max_size=4)


FORESTS = st.sampled_from([PreemptionReclaim.FAIR_SHARE, PreemptionReclaim.PAST_USE]).flatmap(forests)


def build_queues(forest, *, root=0):
    quota = (QueueQuota(resource="gpu", nominal=1000 * root),)
    return (
        Queue(name="root", quotas=quota),
        *(
            Queue(
                name=f"q{n}",
                parent="root",
                weight=weight,
                quotas=(QueueQuota(resource="gpu", nominal=1000 * nominal),),
                preemption=rules,
            )
            for n, (nominal, rules, weight) in enumerate(forest)
        ),
    )


@given(
    forest=FORESTS,
    work=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 3), st.integers(0, 2)), max_size=7),
    data=st.data(),
)
@settings(deadline=None, max_examples=200)
def test_permitted_victims_keep_every_rule_whatever_the_order(forest, work, data):
    queues = build_queues(forest)
    tree, rules = QuotaTree(queues), resolve_preemption(queues)
    found = []
    for n, (queue, gpus, priority) in enumerate(work):
        name = f"q{queue % len(forest)}"
        tree.add(name, {"gpu": 1000 * gpus})
        found.append(
            PreemptionCandidate(
                workload_id=f"w{n}",
                queue=name,
                priority=priority,
                amounts={"gpu": 1000 * gpus},
                node_names=frozenset(),
                started_ns=n,
            )
        )
    before = [tree.usage(queue.name) for queue in queues]
    mine = f"q{data.draw(st.integers(0, len(forest) - 1))}"
    gainer = PreemptionGainer(queue=mine, priority=data.draw(st.integers(0, 3)), amounts={"gpu": 2000})
    spent = {
        (f"q{n}", "ann"): DecayedUsage(0, (1e6 * data.draw(st.integers(0, 9)), 0.0, 0.0)) for n in range(len(forest))
    }
    past = PastUse(tree, lambda: spent, (10_000, 1, 1), now_ns=0, half_life_s=1e4)
    exchange = UseExchange(past, half_life_s=1e4, horizon_s=rules[mine].horizon_s)
    ordered = order_candidates(found, 10 * S)
    assert sorted(ordered, key=lambda one: one.priority) == ordered
    for is_lenient in (False, True):
        chosen = PreemptionRules(tree, gainer, rules[mine], exchange).select(ordered, is_lenient=is_lenient)
        used = {queue.name: sum(one.amounts["gpu"] for one in found if one.queue == queue.name) for queue in queues}
        nominal = {f"q{n}": 1000 * row[0] for n, row in enumerate(forest)}
        fits = used[mine] + 2000 <= nominal[mine]
        for one in chosen:
            if one.queue == mine:
                assert rules[mine].within
                assert one.priority < gainer.priority
            else:
                # Never within its quota, and for work beyond its own only by fair share or past use.
                assert used[one.queue] > nominal[one.queue]
                assert fits or rules[mine].reclaim in (PreemptionReclaim.FAIR_SHARE, PreemptionReclaim.PAST_USE)
                if not fits and rules[mine].reclaim is PreemptionReclaim.PAST_USE:
                    ours, theirs = (
                        spent[name, "ann"].total[0] / tree.queues[tree.numbers[name]].weight
                        for name in (mine, one.queue)
                    )
                    assert theirs > ours
            used[one.queue] -= one.amounts["gpu"]
            fits = used[mine] + 2000 <= nominal[mine]
    assert before == [tree.usage(queue.name) for queue in queues]


WANTED = st.fixed_dictionaries(
    {
        "gpus": st.integers(1, 4),
        "replicas": st.integers(1, 2),
        "priority": st.integers(0, 2),
        "kind": st.sampled_from([WorkloadKind.BATCH_JOB, WorkloadKind.TRAINING_JOB, WorkloadKind.INFERENCE_SERVICE]),
        "process": st.sampled_from([None, None, PROCESS]),
    }
)


class PreemptingCluster(RuleBasedStateMachine):
    """A core with preemption under any calls, one that replays its journal, and one that gets the same calls."""

    @initialize(forest=FORESTS, work_most=st.sampled_from([1, 100, 3000]))
    def begin(self, forest, work_most):
        self.work_most = work_most
        self.core, self.twin = (Core(ClusterState(ended_most=5), catalogue.load_catalogue()) for _ in range(2))
        self.limit_searches()
        self.journal, self.now_ns, self.lost, self.count = [], 0, set(), 0
        self.shrunk_by_hand = set()
        self.queues = build_queues(forest)
        for name, gpus in NODES.items():
            node = build_node(name, gpus=gpus, runs_processes=True, agent_version="1")
            self.both(lambda core, node=node: core.register_node(node, now_ns=self.now_ns))
        self.both(lambda core: core.update_policy(replace(core.state.policy, queues=self.queues), now_ns=self.now_ns))
        self.leaves = [queue.name for queue in self.queues[1:]]

    def limit_searches(self):
        """Lets searches pause, as they do where thousands run."""
        for core in (self.core, self.twin):
            core._preemptions.work_most = self.work_most

    def both(self, call, seconds=1):
        """Makes a change from outside, and everything that follows from it; checks what is preempted."""
        self.now_ns += seconds * S
        ran = self.running()
        started_ns = {key: self.core.workload(key).placed_ns for key in ran}
        step, again = call(self.core), call(self.twin)
        assert step == again
        events = list(step.events)
        for core in (self.core, self.twin):
            for _ in range(1000):
                if not core.has_backlog:
                    break
                more = core.retry(now_ns=self.now_ns).events
                events += more if core is self.core else ()
            assert not core.has_backlog
        self.check_preemptions(events, ran, started_ns)
        self.journal.extend(events)
        assert self.core.state.digest() == self.twin.state.digest()
        return step

    def running(self):
        found = self.core.state.workloads.items()
        return {key for key, one in found if one.phase is WorkloadPhase.PLACED}

    def check_preemptions(self, events, ran, started_ns):
        gone = [one for one in events if isinstance(one, WorkloadEvicted) and one.preempted_for]
        started = [key for one in events if isinstance(one, PreemptionStarted) for key in one.victims]
        # Finite: of what ran before, each at most once, and nothing that came in between.
        once = [one.workload_id for one in gone if one.workload_id in ran]
        assert len(set(once)) == len(once)
        assert {one.workload_id for one in gone} | set(started) <= ran
        rules = resolve_preemption(self.queues)
        for key in {one.workload_id for one in gone} | set(started):
            workload = self.core.workload(key)
            if workload.spec.process is None:
                ran_s = (self.now_ns - started_ns[key]) / S
                assert ran_s >= rules[workload.spec.queue].min_runtime_s
        # Without processes, nobody is preempted unless the gainer is placed in the same step.
        placed = {one.workload_id for one in events if isinstance(one, WorkloadPlaced | WorkloadScaled)}
        for one in gone:
            if self.core.state.workloads[one.workload_id].spec.process is None:
                assert one.preempted_for in placed

    @rule(data=st.data(), wanted=WANTED)
    def submit(self, data, wanted):
        queue = data.draw(st.sampled_from(self.leaves))
        if wanted["kind"] is WorkloadKind.INFERENCE_SERVICE:
            wanted = {**wanted, "process": None}
        if wanted["kind"] is WorkloadKind.TRAINING_JOB and wanted["process"] is None:
            wanted = {**wanted, "training": ELASTIC}
        if wanted["process"] is not None:
            wanted = {**wanted, "mobility": Mobility.FIXED}
        self.count += 1
        request = build_request(f"w{self.count}", queue=queue, cpu=1, **wanted)
        with contextlib.suppress(InvalidArgument):
            self.both(lambda core: core.submit(request, now_ns=self.now_ns))

    @precondition(lambda self: self.core.state.workloads)
    @rule(data=st.data())
    def cancel(self, data):
        key = data.draw(st.sampled_from(sorted(self.core.state.workloads)))
        self.both(lambda core: core.cancel(key, now_ns=self.now_ns))

    def scalable(self):
        found = map(self.core.workload, self.running())
        return sorted(one.workload_id for one in found if one.spec.training or one.spec.kind in SCALABLE)

    @precondition(lambda self: self.scalable())
    @rule(data=st.data(), replicas=st.integers(1, 8))
    def scale(self, data, replicas):
        key = data.draw(st.sampled_from(self.scalable()))
        before = self.core.workload(key)
        if replicas < (before.replicas_begun or before.spec.replicas):
            self.shrunk_by_hand.add(key)
        sizes = {name: len(self.core.workload(name).placements) for name in self.scalable()}
        step = self.both(lambda core: core.scale(key, replicas, now_ns=self.now_ns))
        if before.spec.training is not None and replicas >= len(before.placements):
            # A job takes what is free, and nothing of others.
            assert not any(isinstance(one, WorkloadEvicted | PreemptionStarted) for one in step.events)
            assert all(len(self.core.workload(name).placements) == size for name, size in sizes.items() if name != key)

    def processes(self):
        return sorted(key for key in self.running() if self.core.workload(key).spec.process is not None)

    @precondition(lambda self: self.processes())
    @rule(data=st.data(), code=st.sampled_from([0, 0, 1]))
    def report(self, data, code):
        """A process starts, ends by itself, or has stopped."""
        workload = self.core.workload(data.draw(st.sampled_from(self.processes())))
        place = data.draw(st.sampled_from(workload.placements))
        known = {one.replica: one for one in workload.attempts}
        stopped = bool(workload.stopping_ns)
        status = AttemptStatus(
            workload_id=workload.workload_id,
            replica=place.replica,
            attempt=workload.attempt,
            state=AttemptState.ENDED if place.replica in known or stopped else AttemptState.RUNNING,
            started_ns=self.now_ns,
            checkpointed_ns=data.draw(st.sampled_from([0, self.now_ns])),
        )
        if status.is_over:
            status = replace(status, exit_code=code, reason="stopped" if stopped else "", ended_ns=self.now_ns)
        self.both(lambda core: core.record_attempts(place.node_name, (status,), now_ns=self.now_ns))

    @rule(name=st.sampled_from(sorted(NODES)))
    def lose_or_return_a_node(self, name):
        if name in self.lost:
            self.lost.discard(name)
            node = build_node(name, gpus=NODES[name], runs_processes=True, agent_version="1")
            self.both(lambda core: core.register_node(node, now_ns=self.now_ns))
        else:
            self.lost.add(name)
            self.both(lambda core: core.mark_node_lost(name, now_ns=self.now_ns))

    @rule(seconds=st.integers(1, 5))
    def pass_time(self, seconds):
        self.both(lambda core: core.continue_drains(now_ns=self.now_ns), seconds)

    @rule()
    def restart_the_twin(self):
        plain = json.loads(json.dumps(self.core.state.dump()))
        for core in ("core", "twin"):
            setattr(self, core, Core(ClusterState.load(plain), catalogue.load_catalogue()))
        self.limit_searches()
        self.both(lambda core: core.retry(now_ns=self.now_ns))

    @invariant()
    def the_state_is_sound(self):
        check_invariants(self.core.state)
        for nomination in self.core.state.nominations:
            gainer = self.core.workload(nomination.workload_id)
            assert gainer.workload_id in self.core.state.pending or gainer.spec.kind is WorkloadKind.INFERENCE_SERVICE
        stopping = [one for one in self.core.state.workloads.values() if one.preempted_for]
        assert all(one.phase is WorkloadPhase.PLACED and one.stopping_ns for one in stopping)

    @invariant()
    def what_jobs_were_submitted_with_is_theirs(self):
        for one in self.core.state.workloads.values():
            if one.workload_id in self.shrunk_by_hand or not one.placements or one.spec.training is None:
                continue
            assert len(one.placements) >= (one.replicas_begun or one.spec.replicas)

    @invariant()
    def quotas_are_kept(self):
        used = dict.fromkeys(self.leaves, 0)
        for charge in self.core.state.queue_usage.charges.values():
            used[charge.queue] += charge.amounts.get("gpu", 0)
        assert sum(used.values()) <= sum(queue.quotas[0].nominal for queue in self.queues)

    def teardown(self):
        if not hasattr(self, "journal"):
            return
        replayed = ClusterState(ended_most=5)
        for event in self.journal:
            kind, body = event_to_plain(event)
            replayed.apply(event_from_plain(kind, json.loads(json.dumps(body))))
        assert replayed.digest() == self.core.state.digest()


PreemptingCluster.TestCase.settings = settings(deadline=None, max_examples=60, stateful_step_count=25)
TestPreemptingCluster = PreemptingCluster.TestCase


@given(
    nominal=st.lists(st.integers(0, 4), min_size=2, max_size=3),
    work=st.lists(st.tuples(st.integers(0, 2), st.integers(1, 2), st.integers(0, 2), st.booleans()), max_size=10),
    priority=st.integers(0, 2),
    reclaim=st.sampled_from([PreemptionReclaim.NOMINAL, PreemptionReclaim.FAIR_SHARE]),
    data=st.data(),
)
@settings(deadline=None, max_examples=80)
def test_a_queue_gets_its_unused_quota_in_one_decision_whoever_borrows_it(nominal, work, priority, reclaim, data):
    """Work of one GPU in a full cluster of single GPUs: where the quota covers it, some borrower can make room."""
    rules = QueuePreemption(reclaim=reclaim)
    queues = build_queues([(gpus, rules, 1.0) for gpus in nominal])
    core = Core(ClusterState(), catalogue.load_catalogue())
    gpus = max(1, sum(nominal))
    for n in range(gpus):
        core.register_node(build_node(f"n{n}", gpus=1, runs_processes=True, agent_version="1"), now_ns=1)
    core.update_policy(replace(core.state.policy, queues=queues), now_ns=2)
    for n, (queue, replicas, rank, is_process) in enumerate(work):
        process = {"process": PROCESS, "mobility": Mobility.FIXED} if is_process else {}
        with contextlib.suppress(InvalidArgument):
            core.submit(
                build_request(f"w{n}", queue=f"q{queue % len(nominal)}", replicas=replicas, priority=rank, **process),
                now_ns=3 + n,
            )
        while core.has_backlog:
            core.retry(now_ns=3 + n)
        finish_stops(core, 3 + n)
    mine = data.draw(st.sampled_from(range(len(nominal))))
    used = sum(c.amounts["gpu"] for c in core.state.queue_usage.charges.values() if c.queue == f"q{mine}") // 1000
    if used >= nominal[mine]:
        return
    core.submit(build_request("mine", queue=f"q{mine}", priority=priority), now_ns=100)
    finish_stops(core, 101)
    assert core.workload("mine").phase is WorkloadPhase.PLACED


def finish_stops(core, now_ns):
    """Lets every process that was told to stop report its end."""
    for key, workload in list(core.state.workloads.items()):
        if workload.phase is WorkloadPhase.PLACED and workload.stopping_ns:
            for place in workload.placements:
                ended = AttemptStatus(
                    workload_id=key,
                    replica=place.replica,
                    attempt=workload.attempt,
                    state=AttemptState.ENDED,
                    reason="stopped",
                    ended_ns=now_ns,
                )
                core.record_attempts(place.node_name, (ended,), now_ns=now_ns)
    while core.has_backlog:
        core.retry(now_ns=now_ns)
