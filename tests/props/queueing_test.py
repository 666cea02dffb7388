"""Queues under any sequence of starts and ends: quotas against a slow twin, and the core with queues in its policy."""

import contextlib
import json
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.builders.cluster import build_node, build_request
from tests.naive_queues import NaiveQueues
from tests.state_invariants import check_invariants

from eelgrid_controller.core.core import Core
from eelgrid_controller.placement.explanations import describe_pending_reason
from eelgrid_controller.queueing.admission import QueueHold, describe_queue_hold
from eelgrid_controller.queueing.fair_share import FairRound, PastUse, PendingTree
from eelgrid_controller.queueing.quota import QuotaTree
from eelgrid_controller.state.cluster_state import ClusterState
from eelgrid_controller.state.events import WorkloadPlaced, event_from_plain, event_to_plain
from eelgrid_controller.state.pending_reasons import PendingConstraint
from eelgrid_controller.state.policy import find_queue_violations
from eelgrid_controller.state.queue_usage import DecayedUsage, resolve_queue
from eelgrid_protos import catalogue
from eelgrid_protos.faults import FailedPrecondition, InvalidArgument
from eelgrid_protos.messages import Queue, QueueQuota, ResourceRequest, WorkloadKind, WorkloadPhase

LIMIT = st.none() | st.integers(0, 8)


@st.composite
def forests(draw, most=9):
    """Queues with a quota of GPUs each, parents before children."""
    queues = {}
    for number in range(draw(st.integers(1, most))):
        parent = draw(st.sampled_from(["", *queues]))
        queues[f"q{number}"] = (parent, draw(st.integers(0, 6)), draw(LIMIT), draw(LIMIT), draw(LIMIT))
    return queues


def build_queues(forest, unit=1):
    def scaled(amount):
        return None if amount is None else unit * amount

    return tuple(
        Queue(
            name=name,
            parent=parent,
            quotas=(
                QueueQuota(
                    resource="gpu",
                    nominal=unit * nominal,
                    borrowing_limit=scaled(borrowing),
                    lending_limit=scaled(lending),
                    usage_limit=scaled(limit),
                ),
            ),
        )
        for name, (parent, nominal, borrowing, lending, limit) in forest.items()
    )


def add_power(queues):
    """The same bounds in watts, of 200 W a GPU, so that now GPUs bind and now power."""
    return tuple(
        replace(
            queue,
            quotas=(
                *queue.quotas,
                *(
                    replace(
                        one,
                        resource="power",
                        **{
                            field: None if amount is None else 200 * amount
                            for field in ("nominal", "borrowing_limit", "lending_limit", "usage_limit")
                            for amount in (getattr(one, field),)
                        },
                    )
                    for one in queue.quotas
                ),
            ),
        )
        for queue in queues
    )


def leaves(queues):
    parents = {queue.parent for queue in queues}
    return [queue.name for queue in queues if queue.name not in parents]


class Quotas(RuleBasedStateMachine):
    """Work starts where the tree lets it, sometimes beyond, and ends; the twin computes everything anew."""

    @initialize(forest=forests(), data=st.data())
    def begin(self, forest, data):
        queues = build_queues(forest)
        self.twin = NaiveQueues(forest)
        self.tree = QuotaTree(data.draw(st.permutations(queues)))
        self.leaves = leaves(queues)

    @rule(data=st.data(), amount=st.integers(1, 9))
    def start(self, data, amount):
        leaf = data.draw(st.sampled_from(self.leaves))
        shortage = self.tree.find_shortage(leaf, {"gpu": amount})
        assert (shortage is None) == self.twin.fits(leaf, amount)
        if shortage is None:
            self.tree.add(leaf, {"gpu": amount})
            self.twin.running.append((leaf, amount))
            return
        assert shortage.lack > 0
        # The number that is told cures that bound: with so much more at it, another one or none is short.
        forest = dict(self.twin.queues)
        parent, nominal, borrowing, lending, limit = forest[shortage.queue]
        field = {"quota": 1, "borrowing": 2, "usage": 4}[shortage.bound]
        forest[shortage.queue] = tuple(
            value + shortage.lack if place == field else value
            for place, value in enumerate((parent, nominal, borrowing, lending, limit))
        )
        cured = QuotaTree(build_queues(forest))
        for leaf_name, used in self.twin.running:
            cured.add(leaf_name, {"gpu": used})
        again = cured.find_shortage(leaf, {"gpu": amount})
        assert again is None or (again.queue, again.bound) != (shortage.queue, shortage.bound)

    @rule(data=st.data(), amount=st.integers(1, 9))
    def adopt(self, data, amount):
        """What runs already is counted whatever the quota."""
        leaf = data.draw(st.sampled_from(self.leaves))
        self.tree.add(leaf, {"gpu": amount})
        self.twin.running.append((leaf, amount))

    @precondition(lambda self: self.twin.running)
    @rule(data=st.data())
    def end(self, data):
        leaf, amount = self.twin.running.pop(data.draw(st.integers(0, len(self.twin.running) - 1)))
        self.tree.add(leaf, {"gpu": amount}, -1)

    @invariant()
    def sums_agree_with_the_twin(self):
        for name in self.twin.queues:
            (usage,) = (one for one in self.tree.usage(name) if one.resource == "gpu")
            assert usage.used == self.twin.used(name)
            assert usage.quota == self.twin.nominal(name)
            assert usage.borrowed == self.twin.borrowed(name)
            assert self.tree.borrowed_ratio(self.tree.numbers[name]) == self.twin.share(name)

    @invariant()
    def what_is_borrowed_is_lent(self):
        """By siblings, by the quota of the parent itself, or by what the parent borrows in turn."""
        usage = {name: next(u for u in self.tree.usage(name) if u.resource == "gpu") for name in self.twin.queues}
        for name, (_, nominal, *_) in self.twin.queues.items():
            children = self.twin.children(name)
            if children:
                borrowed = sum(usage[child].borrowed for child in children)
                lent = sum(usage[child].lent for child in children)
                assert borrowed == min(borrowed, nominal) + lent + max(0, borrowed - nominal - lent)
                assert borrowed - min(borrowed, nominal) - lent == usage[name].borrowed

    @invariant()
    def what_can_never_run_is_what_an_empty_tree_refuses(self):
        empty = NaiveQueues(self.twin.queues)
        for leaf in self.leaves:
            for amount in (1, 5, 9):
                never = self.tree.find_shortage(leaf, {"gpu": amount}, when_empty=True) is not None
                assert never == (not empty.fits(leaf, amount))

    @invariant()
    def what_a_queue_keeps_is_there_for_it(self):
        """The part of a quota that is not lent is reachable whatever the others do."""
        for leaf in self.leaves:
            kept = self.twin.kept(leaf) - self.twin.held(leaf) if self.twin.queues[leaf][0] else 0
            if kept > 0 and self.twin.below_limits(leaf, kept) and self.twin.queues[leaf][2] is None:
                assert self.tree.find_shortage(leaf, {"gpu": kept}) is None


Quotas.TestCase.settings = settings(deadline=None, max_examples=200, stateful_step_count=20)
TestQuotas = Quotas.TestCase


@given(forest=forests())
@settings(deadline=None, max_examples=100)
def test_any_forest_is_valid_and_a_circle_or_a_missing_parent_is_not(forest):
    queues = build_queues(forest)
    assert not find_queue_violations(queues)
    missing = (*queues, Queue(name="x", parent="nowhere"))
    assert [one.field for one in find_queue_violations(missing)] == [f"policy.queues[{len(queues)}].parent"]
    circle = (*queues, Queue(name="x", parent="y"), Queue(name="y", parent="x"))
    assert find_queue_violations(circle)
    assert find_queue_violations((*queues, queues[0]))


def test_a_chain_of_sixteen_queues_is_valid_and_one_of_seventeen_is_not():
    chain = [Queue(name=f"q{number}", parent=f"q{number - 1}" if number else "") for number in range(17)]
    assert not find_queue_violations(tuple(chain[:16]))
    assert [one.field for one in find_queue_violations(tuple(reversed(chain)))] == ["policy.queues[0].parent"]


AMOUNTS = st.fixed_dictionaries(
    {
        "gpus": st.integers(0, 2),
        "cpu": st.integers(1, 8),
        "replicas": st.integers(1, 3),
        "priority": st.integers(0, 1),
        "user": st.sampled_from(["ann", "bob"]),
        "kind": st.just(WorkloadKind.BATCH_JOB),
    }
)


class QueuedCluster(RuleBasedStateMachine):
    """A core with queues under any calls, a journal of its events, and a second core that restarts in between."""

    @initialize(forest=forests(5), gpus=st.integers(2, 8), has_power=st.booleans())
    def begin(self, forest, gpus, has_power):
        self.core, self.twin = (Core(ClusterState(ended_most=5), catalogue.load_catalogue()) for _ in range(2))
        self.journal, self.now_ns, self.over = [], 0, False
        self.both(lambda core: core.register_node(build_node("a", gpus=gpus), now_ns=self.now_ns))
        small = build_node("b", gpus=2, model="T4")
        small = replace(small, gpus=tuple(replace(gpu, power_limit_default_w=70.0) for gpu in small.gpus))
        self.both(lambda core: core.register_node(small, now_ns=self.now_ns))
        queues = build_queues(forest, unit=1000)
        self.set_queues(add_power(queues) if has_power else queues)

    def set_queues(self, queues):
        self.both(
            lambda core: core.update_policy(
                replace(core.state.policy, queues=queues, queue_half_life_s=100.0, queue_age_limit_s=50.0),
                now_ns=self.now_ns,
            )
        )
        self.leaves = leaves(queues)

    def both(self, call):
        self.now_ns += 10**9
        before = len(self.journal)
        step, again = call(self.core), call(self.twin)
        assert step == again
        self.journal.extend(step.events)
        for core in (self.core, self.twin):
            while core.has_backlog:
                more = core.retry(now_ns=self.now_ns).events
                if core is self.core:
                    self.journal.extend(more)
        assert self.core.state.digest() == self.twin.state.digest()
        self.check_order(self.journal[before:])
        return step

    def check_order(self, events):
        """Of work of one queue, user and shape, none is left waiting that comes before one that was placed."""

        def rank(workload):
            return -workload.spec.priority, workload.submitted_ns

        def kind(workload):
            spec = workload.spec
            return resolve_queue(self.core.state.policy.queues, spec.queue), spec.user, spec.request, spec.replicas

        workloads = self.core.state.workloads
        waiting = [workloads[key] for key in self.core.state.pending]
        for event in events:
            placed = workloads.get(event.workload_id) if isinstance(event, WorkloadPlaced) else None
            for one in waiting if placed is not None else ():
                assert kind(one) != kind(placed) or rank(placed) <= rank(one)

    @rule(data=st.data(), wanted=AMOUNTS)
    def submit(self, data, wanted):
        queue = data.draw(st.sampled_from(self.leaves))
        with contextlib.suppress(InvalidArgument):
            self.both(lambda core: core.submit(build_request(queue=queue, **wanted), now_ns=self.now_ns))

    @precondition(lambda self: self.core.state.workloads)
    @rule(data=st.data())
    def cancel(self, data):
        key = data.draw(st.sampled_from(sorted(self.core.state.workloads)))
        self.both(lambda core: core.cancel(key, now_ns=self.now_ns))

    def running(self):
        workloads = self.core.state.workloads.items()
        return sorted(key for key, one in workloads if one.phase is WorkloadPhase.PLACED)

    @precondition(lambda self: self.running())
    @rule(data=st.data(), replicas=st.integers(1, 5))
    def scale(self, data, replicas):
        key = data.draw(st.sampled_from(self.running()))
        with contextlib.suppress(FailedPrecondition):
            self.both(lambda core: core.scale(key, replicas, now_ns=self.now_ns))

    @precondition(lambda self: len(self.core.state.pending))
    @rule(data=st.data())
    def move(self, data):
        key = data.draw(st.sampled_from(sorted(self.core.state.pending)))
        queue = data.draw(st.sampled_from(self.leaves))
        with contextlib.suppress(InvalidArgument):
            self.both(lambda core: core.move_to_queue(key, queue, now_ns=self.now_ns))

    @rule(forest=forests(5), has_power=st.booleans())
    def change_queues(self, forest, has_power):
        """Other queues come into force: what runs stays, so that quotas may be exceeded until it ends."""
        self.over = bool(self.running())
        queues = build_queues(forest, unit=1000)
        self.set_queues(add_power(queues) if has_power else queues)

    @rule()
    def reload(self):
        self.twin = Core(ClusterState.load(json.loads(json.dumps(self.twin.state.dump()))), catalogue.load_catalogue())
        # A new core begins with a round; so does the other, since a round may quote prices.
        self.both(lambda core: core.retry_waiting(now_ns=self.now_ns))

    @invariant()
    def usage_is_the_sum_over_running_work(self):
        if not hasattr(self, "core"):
            return
        check_invariants(self.core.state)
        state, tree = self.core.state, self.core.queues.tree
        for queue in tree.queues:
            used = sum(
                len(place.gpu_uuids) * one.spec.request.gpu_milli
                for one in state.workloads.values()
                if one.phase is WorkloadPhase.PLACED and one.spec.queue in self._below(queue.name)
                for place in one.placements
            )
            usage = {one.resource: one for one in tree.usage(queue.name)}
            assert usage["gpu"].used == used
            if "power" in usage:
                assert usage["power"].used == sum(
                    1000 * {"a": 300, "b": 70}[place.node_name] * len(place.gpu_uuids)
                    for one in state.workloads.values()
                    if one.phase is WorkloadPhase.PLACED and one.spec.queue in self._below(queue.name)
                    for place in one.placements
                )
            for resource in () if self.over else ("gpu", "power"):
                one = usage.get(resource)
                assert one is None or one.usage_most is None or one.used <= one.usage_most

    def _below(self, name):
        children = [queue.name for queue in self.core.queues.tree.queues if queue.parent == name]
        return {name}.union(*map(self._below, children))

    @invariant()
    def who_waits_has_no_quota_or_no_room(self):
        if not hasattr(self, "core"):
            return
        for key in self.core.state.pending:
            workload = self.core.state.workloads[key]
            assert workload.reason.partition(":")[0] in set(PendingConstraint)
            admitted = self.core.queues.admit(workload.spec, lambda: self.core.snapshot().models)
            if not isinstance(admitted, QueueHold):
                assert not self.core._chooser.decide_placement(admitted, workload_id=key).placements

    @rule()
    def try_all(self):
        """Everybody who waits has a place. After a round the reason of whoever waits is the true one, word for word: its queue's if that holds it."""
        self.both(lambda core: core.retry_waiting(now_ns=self.now_ns))
        assert sorted(self.core.queues.list_order(self.now_ns, 1000)) == sorted(self.core.state.pending)
        for key in self.core.state.pending:
            workload = self.core.state.workloads[key]
            admitted = self.core.queues.admit(workload.spec, lambda: self.core.snapshot().models)
            constraint = workload.reason.partition(":")[0]
            assert (constraint in ("quota", "max_quota", "queue")) == isinstance(admitted, QueueHold)
            if isinstance(admitted, QueueHold):
                assert self.core.explain_workload(key).constraint == constraint
                assert workload.reason == describe_queue_hold(admitted)
            else:
                decision = self.core._chooser.decide_placement(admitted, workload_id=key)
                assert workload.reason == describe_pending_reason(admitted.request, decision)

    def teardown(self):
        """The journal, through its text, gives the same state, and so does the dump."""
        if not hasattr(self, "core"):
            return
        replayed = ClusterState(ended_most=5)
        for event in self.journal:
            kind, body = event_to_plain(event)
            replayed.apply(event_from_plain(kind, json.loads(json.dumps(body))))
        assert replayed.digest() == self.core.state.digest()
        loaded = ClusterState.load(json.loads(json.dumps(self.core.state.dump())))
        assert loaded.digest() == self.core.state.digest()
        assert loaded.queue_usage.charges == self.core.state.queue_usage.charges
        assert loaded.queue_usage.history == self.core.state.queue_usage.history


QueuedCluster.TestCase.settings = settings(deadline=None, max_examples=30, stateful_step_count=20)
TestQueuedCluster = QueuedCluster.TestCase


# The order of a round


def goes_before(tree, past, is_aged, one, other):
    """The rules, for two waiting workloads as (ticket, queue number, user); None where no rule decides."""
    (ticket, queue, user), (ticket_b, queue_b, user_b) = one, other
    if ticket[0] != ticket_b[0]:
        return ticket[0] < ticket_b[0]
    if is_aged(ticket[2]) or is_aged(ticket_b[2]):
        return ticket[1] < ticket_b[1] if is_aged(ticket[2]) and is_aged(ticket_b[2]) else is_aged(ticket[2])
    if queue == queue_b:
        return (past.of_user(queue, user), ticket[1]) < (past.of_user(queue, user_b), ticket_b[1])
    paths = [list(reversed(list(tree._path(number)))) for number in (queue, queue_b)]
    child, child_b = next((a, b) for a, b in zip(*paths, strict=False) if a != b)
    keys = [
        (tree.borrowed_ratio(number) / tree.queues[number].weight, past.of_queue(number) / tree.queues[number].weight)
        for number in (child, child_b)
    ]
    return None if keys[0] == keys[1] else keys[0] < keys[1]


@given(forest=forests(7), data=st.data())
@settings(deadline=None, max_examples=150)
def test_a_round_yields_all_work_once_in_the_order_of_the_rules(forest, data):
    weights = data.draw(st.lists(st.sampled_from([1.0, 2.0]), min_size=len(forest), max_size=len(forest)))
    queues = [replace(queue, weight=weight) for queue, weight in zip(build_queues(forest), weights, strict=True)]
    tree = QuotaTree(queues)
    numbers = [tree.numbers[name] for name in leaves(queues)]
    for number in numbers:
        tree.add(tree.queues[number].name, {"gpu": data.draw(st.integers(0, 6))})
    history = {
        (tree.queues[number].name, user): DecayedUsage(0, (float(data.draw(st.integers(0, 3))), 0.0, 0.0), (0, 0, 0))
        for number in numbers
        for user in "ab"
    }
    pending, waiting = PendingTree(len(queues) + 1), []
    for place in range(data.draw(st.integers(0, 12))):
        number, user = data.draw(st.sampled_from(numbers)), data.draw(st.sampled_from("ab"))
        ticket = (-data.draw(st.integers(0, 1)), place, f"w{place}")
        shape = ResourceRequest(cpu_milli=data.draw(st.integers(1, 2))), (), 1, False
        pending.add(number, user, shape, ticket)
        waiting.append((ticket, number, user))
    oldest = data.draw(st.integers(0, 3))
    past = PastUse(tree, lambda: history, (10, 10, 10), now_ns=0, half_life_s=100.0)

    def is_aged(key):
        return int(key[1:]) < oldest

    found = [
        next(one for one in waiting if one[0] == ticket) for ticket in FairRound(tree, pending, past, is_aged=is_aged)
    ]
    assert sorted(found) == sorted(waiting)
    for place, one in enumerate(found):
        for later in found[place + 1 :]:
            assert goes_before(tree, past, is_aged, later, one) is not True
