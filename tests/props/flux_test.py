"""Flux: nothing is held twice, everything is freed, a restart changes nothing, R and constraints are read as they are meant."""

import json

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.flux_rig import build_jobspec

from eelgrid_controller.core.core import Core
from eelgrid_controller.engines.flux.allocations import split_equally
from eelgrid_controller.engines.flux.instance import FluxReply
from eelgrid_controller.engines.flux.jobspecs import match_ranks
from eelgrid_controller.engines.flux.resource_sets import (
    RankResources,
    ResourceSet,
    format_idset,
    format_resource_set,
    parse_idset,
    parse_resource_set,
)
from eelgrid_controller.engines.flux.scheduling import (
    FluxAdopt,
    FluxEligibility,
    FluxEnd,
    FluxScheduling,
    FluxSubmit,
    find_job_number,
)
from eelgrid_controller.engines.node_reports import RegisterNode, RemoveNode, ReportUsage
from eelgrid_controller.state.cluster_state import ClusterState
from eelgrid_controller.state.engine_reports import Eligibility
from eelgrid_protos import catalogue
from eelgrid_protos.faults import Fault, InvalidArgument
from eelgrid_protos.messages import WorkloadPhase

RANKS, CORES, GPUS = 4, 6, 3
PRODUCTS = catalogue.load_catalogue()
NAMES = ("ssd", "big", "+queue", "a100@gpu")
IDS = st.frozensets(st.integers(0, 70), max_size=12)


@st.composite
def resource_sets(draw):
    ranks = draw(st.frozensets(st.integers(0, 40), min_size=1, max_size=8))
    held = {
        rank: RankResources(
            f"node{rank:03}", draw(st.frozensets(st.integers(0, 99), min_size=1, max_size=9)), draw(IDS)
        )
        for rank in sorted(ranks)
    }
    chosen = st.frozensets(st.sampled_from(sorted(ranks)), min_size=1)
    properties = draw(st.dictionaries(st.sampled_from(NAMES), chosen))
    times = draw(st.floats(0, 2e9)), draw(st.floats(0, 2e9))
    return ResourceSet(
        ranks=held, properties=properties, nslots=draw(st.integers(0, 99)), starttime=times[0], expiration=times[1]
    )


@given(resource_sets())
def test_r_is_the_same_after_it_was_written_and_read(one):
    assert parse_resource_set(json.dumps(format_resource_set(one))) == one


@given(IDS)
def test_an_idset_is_the_same_after_it_was_written_and_read(ids):
    assert parse_idset(format_idset(ids)) == ids


@given(resource_sets(), resource_sets())
def test_a_difference_and_what_was_taken_are_the_whole(one, two):
    left = one.subtract(two)
    assert not left.overlaps(two)
    assert one.covers(left)
    back = {
        rank: (one.ranks[rank].cores & two.ranks[rank].cores if rank in two.ranks else frozenset())
        | (left.ranks[rank].cores if rank in left.ranks else frozenset())
        for rank in one.ranks
    }
    assert back == {rank: held.cores for rank, held in one.ranks.items()}


@given(resource_sets())
def test_equal_parts_are_all_of_it(one):
    found = split_equally(one)
    if found is not None:
        (cores, gpus), times = found
        assert {rank: (count * cores, count * gpus) for rank, count in times.items()} == {
            rank: (len(held.cores), len(held.gpus)) for rank, held in one.ranks.items()
        }


def leaves():
    words = st.sampled_from(NAMES)
    return st.one_of(
        st.lists(st.one_of(words, words.map("^{}".format)), max_size=3).map(lambda found: {"properties": found}),
        st.lists(st.integers(0, 40).map("node{:03}".format), max_size=4).map(lambda found: {"hostlist": found}),
        st.lists(IDS.map(format_idset), max_size=3).map(lambda found: {"ranks": found}),
    )


TREES = st.recursive(
    leaves(),
    lambda inner: st.dictionaries(st.sampled_from(("and", "or", "not")), st.lists(inner, max_size=3), max_size=2),
    max_leaves=12,
)


def holds(tree, rank, pool):
    """Whether one rank matches, by RFC 31 read word by word."""
    for operator, values in tree.items():
        match operator:
            case "properties":
                has = {name for name, where in pool.properties.items() if rank in where}
                found = all((one[1:] not in has) if one[0] == "^" else one in has for one in values)
            case "hostlist":
                found = pool.ranks[rank].hostname in values
            case "ranks":
                found = any(rank in parse_idset(one) for one in values)
            case "and":
                found = all(holds(one, rank, pool) for one in values)
            case "or":
                found = not values or any(holds(one, rank, pool) for one in values)
            case "not":
                found = not all(holds(one, rank, pool) for one in values)
        if not found:
            return False
    return True


@given(TREES, resource_sets())
@settings(max_examples=300)
def test_constraints_match_the_ranks_that_a_reader_of_rfc_31_finds(tree, pool):
    assert match_ranks(tree, pool) == {rank for rank in pool.ranks if holds(tree, rank, pool)}


POOL = ResourceSet(
    ranks={rank: RankResources(f"n{rank}", frozenset(range(CORES)), frozenset(range(GPUS))) for rank in range(RANKS)},
    properties={"ssd": frozenset({0, 1})},
)
CONSTRAINTS = (
    None,
    {"properties": ["ssd"]},
    {"not": [{"ranks": ["1"]}]},
    {"or": [{"ranks": ["0"]}, {"properties": ["^ssd"]}]},
)
SHAPES = st.fixed_dictionaries(
    {
        "nodes": st.integers(0, 3),
        "slots": st.integers(1, 3),
        "cores": st.integers(1, 3),
        "gpus": st.integers(0, 2),
        "exclusive": st.booleans(),
        "constraints": st.sampled_from(CONSTRAINTS),
    }
)


def is_word(one):
    """Whether an instruction only tells a job that waits for what."""
    return isinstance(one, FluxReply) and one.payload.get("type") == 1


class FluxWorld(RuleBasedStateMachine):
    """A job manager that remembers by itself who holds what, the pure part, and a real core."""

    @initialize()
    def begin(self):
        self.state = ClusterState()
        self.core = Core(self.state, PRODUCTS, joins_closed=True)
        self.now_s, self.number = 1000.0, 0
        self.waiting, self.holding, self.down = {}, {}, frozenset()
        self.load()

    def load(self):
        """A module is loaded, or the controller has begun anew: all that stands is said."""
        self.scheduling = FluxScheduling()
        self.eligibility, self.rules = Eligibility(), FluxEligibility(self.scheduling)
        self.core.set_eligibility(self.eligibility)
        self.say_all()

    def say_all(self):
        self.say("hello", resources=format_resource_set(POOL), down=format_idset(self.down))
        for number, held in self.holding.items():
            self.say("running", id=number, priority=1, user="u", t_submit=1.0, R=format_resource_set(held))
        for number, jobspec in tuple(self.waiting.items()):
            self.ask(number, jobspec)
        self.say("ready")
        self.settle()

    def say(self, topic, **payload):
        for reply in self.scheduling.instance.receive(topic, json.dumps(payload)):
            self.take(reply)

    def ask(self, number, jobspec):
        self.waiting[number] = jobspec
        self.say("alloc", id=number, priority=1, user="u", t_submit=1.0, jobspec=jobspec)

    def take(self, reply):
        number, kind = reply.payload["id"], reply.payload["type"]
        if kind == 0:
            asked, found = self.waiting.pop(number), parse_resource_set(reply.payload["R"])
            self.check_answer(asked, found)
            assert not any(found.overlaps(other) for other in self.holding.values())
            self.holding[number] = found
        elif kind == 2:
            del self.waiting[number]

    def check_answer(self, jobspec, found):
        """An answer is what was asked for, on ranks that are up and match."""
        outer = jobspec["resources"][0]
        slot = outer["with"][0] if outer["type"] == "node" else outer
        counts = {one["type"]: one["count"] for one in slot["with"]}
        assert POOL.covers(found)
        assert not found.ranks.keys() & self.down
        constraint = jobspec["attributes"]["system"].get("constraints") or {}
        assert all(holds(constraint, rank, POOL) for rank in found.ranks)
        if outer.get("exclusive"):
            assert found.count() == (outer["count"] * CORES, outer["count"] * GPUS)
        else:
            slots = slot["count"] * (outer["count"] if outer is not slot else 1)
            assert found.count() == (slots * counts["core"], slots * counts.get("gpu", 0))
        if outer["type"] == "node":
            assert len(found.ranks) == outer["count"]

    def settle(self):
        """Decides until there is nothing to do."""
        for _ in range(30):
            jobs = self.scheduling.instance.changed.take(self.now_s)
            found = self.look(jobs)
            for one in found:
                self.carry_out(one)
            self.now_s += 0.1
            # The loop goes on with rounds over pending work while nobody asks for anything else.
            has_backlog = self.core.has_backlog
            if has_backlog:
                self.note(self.core.retry(now_ns=int(self.now_s * 1e9)))
            if not found and not has_backlog:
                # What was not looked at since it has not changed is as it should be.
                assert [one for one in self.look(None) if not is_word(one)] == []
                return
        raise AssertionError("it decides for ever")

    def look(self, jobs):
        """Decides about some jobs, None for all; of nodes the core knows nothing that it was not told."""
        workloads = {
            key: one
            for key, one in self.core.state.workloads.items()
            if key.startswith("flux-") and (jobs is None or find_job_number(key.partition(".")[0]) in jobs)
        }
        inventories = {name: record.inventory for name, record in self.core.state.nodes.items()}
        found = self.scheduling.decide(workloads, inventories, now_s=self.now_s, jobs=jobs)
        self.eligibility.rules = self.rules if self.scheduling.has_rules() else None
        return found

    def note(self, step):
        """Notes of which jobs a step of the core tells, as its listener does."""
        for event in step.events:
            if key := getattr(event, "workload_id", ""):
                self.scheduling.instance.changed.add(find_job_number(key.partition(".")[0]))

    def carry_out(self, one):
        now_ns = int(self.now_s * 1e9)
        try:
            match one:
                case RegisterNode(inventory):
                    self.note(self.core.register_node(inventory, now_ns=now_ns))
                case RemoveNode():
                    raise AssertionError("no rank has gone")
                case ReportUsage(name, others):
                    self.note(self.core.update_external_usage(name, others, now_ns=now_ns))
                case FluxSubmit(request):
                    self.note(self.core.submit(request, now_ns=now_ns))
                case FluxAdopt(request, adoption):
                    self.note(self.core.adopt(request, adoption, now_ns=now_ns))
                case FluxEnd(workload_id):
                    self.note(self.core.cancel(workload_id, now_ns=now_ns))
                case _:
                    self.take(one)
        except InvalidArgument as error:
            if isinstance(one, FluxSubmit) and (reply := self.scheduling.instance.deny_job(one.job, str(error))):
                self.take(reply)
        except Fault:
            if isinstance(one, FluxAdopt):
                self.scheduling.instance.leave_job(one.job, now_s=self.now_s)

    @rule(shape=SHAPES)
    def submit(self, shape):
        self.number += 1
        self.ask(self.number, build_jobspec(**shape))
        self.settle()

    @precondition(lambda self: self.holding)
    @rule(data=st.data())
    def free(self, data):
        number = data.draw(st.sampled_from(sorted(self.holding)))
        held = self.holding[number]
        ranks = data.draw(st.frozensets(st.sampled_from(sorted(held.ranks)), min_size=1))
        part, left = held.select_ranks(ranks), held.select_ranks(frozenset(held.ranks) - ranks)
        if left.ranks:
            self.holding[number] = left
        else:
            del self.holding[number]
        self.say("free", id=number, R=format_resource_set(part), final=not left.ranks)
        self.settle()

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def cancel(self, data):
        number = data.draw(st.sampled_from(sorted(self.waiting)))
        del self.waiting[number]
        self.say("cancel", id=number)
        self.settle()

    @rule(down=st.frozensets(st.integers(0, RANKS - 1), max_size=2))
    def drain(self, down):
        self.down = down
        self.say("resources", resources=format_resource_set(POOL), down=format_idset(down))
        self.settle()

    @rule(forgets=st.booleans())
    def restart(self, forgets):
        """A module is loaded again; or the controller begins with its journal and nothing else."""
        before = dict(self.holding)
        if forgets:
            self.load()
        else:
            self.scheduling.instance.end_session()
            self.say_all()
        assert before.items() <= self.holding.items()

    @invariant()
    def both_hold_the_same(self):
        if not hasattr(self, "holding"):
            return
        allocations = self.scheduling.instance.view.allocations
        assert {number: allocations.get(number).ranks for number in allocations} == {
            number: held.ranks for number, held in self.holding.items()
        }
        used = {rank: [0, 0] for rank in range(RANKS)}
        for workload in self.core.state.workloads.values():
            if workload.phase is WorkloadPhase.PLACED:
                for place in workload.placements:
                    rank = int(place.node_name[1:])
                    used[rank][0] += workload.spec.request.cpu_milli // 1000
                    used[rank][1] += len(place.gpu_indexes)
        others = {name: record.others for name, record in self.core.state.nodes.items()}
        for rank in range(RANKS):
            mine = [held.ranks[rank] for held in self.holding.values() if rank in held.ranks]
            outside = others[f"n{rank}"]
            assert sum(len(one.cores) for one in mine) == used[rank][0] + outside.cpu_milli // 1000
            assert sum(len(one.gpus) for one in mine) == used[rank][1] + outside.gpu_count

    def teardown(self):
        if not hasattr(self, "holding"):
            return
        for number, held in tuple(self.holding.items()):
            del self.holding[number]
            self.say("free", id=number, R=format_resource_set(held), final=True)
        self.drain(frozenset())
        while self.holding:
            for number, held in tuple(self.holding.items()):
                del self.holding[number]
                self.say("free", id=number, R=format_resource_set(held), final=True)
            self.settle()
        assert not self.waiting, "a job is stuck though all is free"
        assert not any(one.phase is WorkloadPhase.PLACED for one in self.core.state.workloads.values())


FluxWorld.TestCase.settings = settings(max_examples=30, stateful_step_count=15, deadline=None)
TestFluxWorld = FluxWorld.TestCase
