"""The world of one seed with two controllers over one store: what goes wrong there, and what must hold all the same.

Owns the faults of leadership and the observer's book of it; agents, users, network and invariants are those of world.py.
Beyond those (invariants.py):

11 No agent that has met a leader obeys an earlier one, and no earlier leader's write follows a later one's.
12 Whatever was acknowledged is in the journal of whoever leads, but for what a promoted standby lacks.
13 Once faults stop, one leads, and the other follows it.
14 Of all that one server has ever had on disk, what was removed again included, a plan epoch of a node has one content:
   an agent says by the epoch alone which plan it holds, and a promoted standby may still have what was removed.
"""

import json
from dataclasses import dataclass
from typing import Any

from eelgrid_agent.node.node import AgentNode
from eelgrid_agent.simulation.spec import GpuSpec, NodeSpec
from eelgrid_controller.state.cluster_state import ClusterState
from eelgrid_controller.state.events import Event, event_from_plain
from eelgrid_controller.state.node_allocations import NodeRecord
from eelgrid_protos.messages import ConnectResponse, Hello, LeaderTerm, NodePlan
from tests.sim.agent import Agent, _Stream
from tests.sim.broken import Broken, demand
from tests.sim.clock import SECOND_NS, Clock, seconds
from tests.sim.faults import Faults
from tests.sim.invariants import check_end, check_freshness, check_served, check_state
from tests.sim.ledger import Held, Ledger, held_of
from tests.sim.network import Network, Weather
from tests.sim.pair import LeaderLife, Pair, Seat
from tests.sim.store import TTL_S, Row, Store, read_rows
from tests.sim.ticks import TickBook
from tests.sim.timeline import Timeline
from tests.sim.users import Users
from tests.sim.world import Failure

__all__ = ["PairAgent", "PairParts", "PairWorld", "run_pair"]

CONVERGED_WITHIN_NS = seconds(300)
_CHECK_EVERY = 25
_USER_NS = seconds(2)
_GIB = 2**30
# Of a term, as its order has it.
Token = tuple[int, int]
_PRODUCTS = (("openb-t4", "T4"), ("h100-sxm5-80gb", "H100"))


class PairLedger(Ledger):
    """What an observer of both controllers and of the store knows."""

    def __init__(self, ticks: TickBook) -> None:
        super().__init__(ticks)
        self.store: Store
        self.is_teller_current = True
        # Whose the next plan is.
        self.teller = LeaderTerm()
        # Of each plan that was sent, the highest term of those who sent it.
        self._senders: dict[tuple[str, int], list[tuple[NodePlan, Token]]] = {}
        self.undone = 0
        self._epoch = 0
        # By node and epoch: what this server has had on disk for it.
        self._contents: dict[tuple[str, int], frozenset[Held]] = {}

    def stored(self, removed: int | None, rows: tuple[Row, ...]) -> None:
        """The store has committed a transaction: entries after one are gone, if any, and these follow."""
        if removed is not None:
            self.undone += len(self.entries) - removed
            self._begin_anew(removed)
        for row in rows:
            demand(11, row.epoch >= self._epoch, f"epoch {row.epoch} writes after epoch {self._epoch}")
            self._epoch = row.epoch
        base = len(self.entries)
        self.committed([entry for _, entry in read_rows(self.store, base, base + len(rows))])

    def _begin_anew(self, left: int) -> None:
        """As the store's own rows have it: what was removed was acknowledged to nobody, which `check_state` sees."""
        del self.entries[left:]
        self.shadow, self.placed, self.history = ClusterState(), {}, {}
        for kind, text in self.entries:
            self._take(event_from_plain(kind, json.loads(text)))

    def _take(self, event: Event) -> None:
        super()._take(event)
        for name, record in self.shadow.nodes.items():
            content = frozenset(map(held_of, record.assignments.values()))
            before = self._contents.setdefault((name, record.plan_epoch), content)
            demand(
                14, before == content, f"{name}: epoch {record.plan_epoch} is of {set(before)} and of {set(content)}"
            )

    def promoted(self) -> None:
        """A standby that lacks the last transactions, of which some may have removed entries, is the server now."""
        rows, self._epoch = self.store.content.rows, 0
        self._contents.clear()
        pairs = zip(self.entries, rows, strict=False)
        same = min(len(self.entries), len(rows))
        left = next((at for at, (entry, row) in enumerate(pairs) if entry != (row.kind, row.text)), same)
        if left < len(self.entries):
            self.rolled_back(left)
        self.committed([entry for _, entry in read_rows(self.store, left, len(rows))])
        # What a leader had removed and the standby still has was placed before the loss, not since.
        self.left = max(self.left, len(rows)) if self.rollbacks else self.left

    def recovered(self, state: ClusterState) -> None:
        """A state that came back is what the rows up to its revision lead to."""
        expected = ClusterState()
        for _, entry in read_rows(self.store, 0, state.revision):
            expected.apply(event_from_plain(entry.kind, entry.body))
        demand(3, state.digest() == expected.digest(), f"recovered state of revision {state.revision} differs")

    def joined(self, hello: Hello, record: NodeRecord) -> None:
        """An agent was welcomed; who was followed, or whose server was replaced, ends before it places anything."""
        if self.is_teller_current:
            super().joined(hello, record)

    def plan_sent(self, plan: NodePlan) -> None:
        """An epoch has one content; that of who was followed by another may be old, and agents refuse it."""
        self._senders.setdefault((plan.node_name, plan.epoch), []).append((plan, self.teller.token))
        if self.is_teller_current:
            super().plan_sent(plan)
            return
        if self.rollbacks:
            # It may be of what was lost, under an epoch that the present history gives again.
            self._lost_plans.append(plan)
            return
        before = self._plans.setdefault((plan.node_name, plan.epoch), plan)
        known = before == plan or plan in self._lost_plans
        demand(4, known, f"{plan.node_name}: epoch {plan.epoch} was sent with two contents")

    def sender_of(self, plan: NodePlan) -> Token:
        """The latest leader that sent this plan, whoever handed it on."""
        sent = self._senders.get((plan.node_name, plan.epoch), ())
        return max((token for known, token in sent if known == plan), default=(0, 0))


class PairAgent(Agent):
    """A machine whose agent knows both controllers."""

    ledger: PairLedger
    obeyed: Token = (0, 0)

    @property
    def address(self) -> str:  # type: ignore[override]
        """The controller that is tried next."""
        return "ab"[self._failures % 2]

    def welcomed(self, stream: _Stream) -> None:
        """One more leader is known, on the machine's disk."""
        super().welcomed(stream)
        assert stream.term is not None
        demand(11, stream.term.token >= self.obeyed, f"{self.name} joined {stream.term} after {self.obeyed}")
        self.obeyed = stream.term.token

    def hear(self, node: AgentNode, response: ConnectResponse) -> None:
        """An order that is carried out is of the latest leader that this machine has met."""
        before, term = node.guard.plan, self.heard_from.term
        super().hear(node, response)
        if node.guard.plan is not before:
            assert term is not None
            demand(11, term.token >= self.obeyed, f"{self.name} obeys {term} after {self.obeyed}")
            plan = node.guard.plan
            sender = self.obeyed if plan is None else self.ledger.sender_of(plan)
            demand(11, sender >= self.obeyed, f"{self.name} obeys a plan of {sender} after it has met {self.obeyed}")


class PairFaults(Faults):
    """What goes wrong around leadership, besides what does anyway."""

    def __init__(
        self, timeline: Timeline, network: Network, pair: Pair, agents: list[Agent], store: Store, ledger: PairLedger
    ) -> None:
        super().__init__(timeline, network, pair, agents)  # type: ignore[arg-type]
        self._pair, self._store, self._ledger = pair, store, ledger
        self._kinds = (
            (4, self.crash_agent),
            (2, self.reboot),
            (5, self.break_stream),
            (4, self.partition),
            (3, self.lose_gpu),
            (4, self.step_clock),
            (10, self.kill_leader),
            (5, self.kill_follower),
            (14, self.pause),
            (5, self.stop_store),
            (4, self.restart_store),
            (6, self.cut_off),
            (5, self.step_store_clock),
            (4, self.promote),
        )

    def heal(self) -> None:
        """See `Faults`."""
        self._is_over = True
        self._timeline.note("fault: all over")
        self._network.weather = Weather(slow_p=0.0)
        self._network.clear()
        self._store.is_up = True
        self._store.answer_lost_p = 0.0
        self._store.cut_off.clear()
        for seat in self._pair.seats:
            seat.continue_process()
            seat.start()
        for agent in self._agents:
            if agent.node is None:
                agent.boot()
            for gpu in agent.device.devices:
                agent.device.faults.restore_gpu(gpu.identity.uuid)

    def _end_for_sure(self, most_s: float, action: Any) -> None:
        self._timeline.after(self._timeline.draw_ns(seconds(most_s)), action)

    def kill_leader(self) -> None:
        """SIGKILL; systemd starts it again."""
        self._kill(self._pair.leader)

    def kill_follower(self) -> None:
        """Of those that do not lead, or none."""
        self._kill(next((seat for seat in self._pair.seats if seat is not self._pair.leader), None))

    def _kill(self, seat: Seat | None) -> None:
        if seat is not None:
            self._timeline.note(f"fault: kill {seat.address}")
            seat.crash()
            self._end_for_sure(6.0, seat.start)

    def pause(self) -> None:
        """SIGSTOP, for less than a lease or up to three, often within a write."""
        seat = self._pair.leader if self._rng.random() < 0.8 else self._rng.choice(self._pair.seats)
        if seat is None:
            return
        if self._rng.random() < 0.5:
            self._watch_for_write(seat, 200)
        else:
            self._pause(seat)

    def _watch_for_write(self, seat: Seat, looks: int) -> None:
        if self._store.open or not looks:
            self._pause(seat)
        else:
            self._timeline.after(seconds(0.005), lambda: self._watch_for_write(seat, looks - 1))

    def suspend(self) -> None:
        """The leader's machine is suspended: by its monotonic clock, which then stands still, its lease goes on."""
        if (seat := self._pair.leader) is not None:
            self._pause(seat, suspends_machine=True)

    def _pause(self, seat: Seat, *, suspends_machine: bool = False) -> None:
        seat.stop_process(suspends_machine=suspends_machine)
        self._end_for_sure(self._rng.choice((3.0, 3.0 * TTL_S)), lambda: self._continue(seat))

    def _continue(self, seat: Seat) -> None:
        if self._rng.random() < 0.5:
            # Agents look for a controller just when the former leader goes on.
            for agent in self._agents:
                self._network.snap(agent.name, "connection reset")
        seat.continue_process()

    def stop_store(self) -> None:
        """The server is away, with all connections."""
        self._timeline.note("fault: stop_store")
        self._store.is_up = False
        self._store.break_connections()
        self._end_for_sure(self._rng.choice((3.0, 25.0)), self._start_store)

    def _start_store(self) -> None:
        self._store.is_up = True

    def restart_store(self) -> None:
        """All connections end, whatever was under way."""
        self._timeline.note("fault: restart_store")
        self._store.break_connections()

    def cut_off(self) -> None:
        """One controller cannot reach the server."""
        name = self._rng.choice(self._pair.seats).address
        self._timeline.note(f"fault: cut_off {name}")
        self._store.cut_off.add(name)
        self._end_for_sure(self._rng.choice((3.0, 30.0)), lambda: self._store.cut_off.discard(name))

    def step_store_clock(self) -> None:
        """The server's clock is set: a lease may end at once, or last."""
        delta_ns = seconds(self._rng.choice((-8.0, -3.0, 3.0, 8.0, 60.0)))
        self._timeline.note(f"fault: step_store_clock {delta_ns}")
        self._store.clock.step(delta_ns)

    def promote(self) -> None:
        """An asynchronous standby that lacks the last transactions takes the server's place."""
        lost = self._rng.choice((0, 1, 3, 10))
        self._timeline.note(f"fault: promote without {lost} transactions")
        self._store.promote(lost)
        self._ledger.promoted()


@dataclass(frozen=True, slots=True, kw_only=True)
class PairParts:
    """What a world is made of; tests put faulty parts in and expect to be told."""

    life: type[LeaderLife] = LeaderLife
    agent: type[PairAgent] = PairAgent
    store: type[Store] = Store
    faults: type[PairFaults] = PairFaults


class PairWorld:
    """See the module."""

    def __init__(self, seed: int, *, parts: PairParts = PairParts()) -> None:
        self.timeline = timeline = Timeline(seed)
        rng = timeline.rng
        self.is_harsh = rng.random() < 0.3
        weather = Weather(drop_p=0.02, duplicate_p=0.02, reorder_p=0.05) if self.is_harsh else Weather()
        self.network = Network(timeline, weather)
        self.ledger = ledger = PairLedger(TickBook(is_fair=not self.is_harsh))
        clock = Clock(lambda: timeline.now_ns, drift_ppm=rng.randint(-200, 200))
        self.store = ledger.store = parts.store(lambda: timeline.now_ns, clock, ledger.stored)
        # Where it is often lost, writes are often removed again that were refused to their callers.
        self.store.answer_lost_p = 0.2 if seed % 4 == 3 else 0.02
        self.pair = Pair(
            timeline,
            self.store,
            [
                Seat(
                    name,
                    timeline,
                    self.network,
                    ledger,
                    self.store,
                    life_type=parts.life,
                    drift_ppm=rng.randint(-200, 200),
                )
                for name in "ab"
            ],
        )
        self.agents: list[Agent] = [
            self._agent_type(parts)(
                timeline,
                self.network,
                ledger,
                self._spec(index),
                drift_ppm=rng.randint(-200, 200),
                seed=seed,
                ticks_most=60,
            )
            for index in range(rng.randint(1, 3))
        ]
        models = tuple(sorted({gpu.model for agent in self.agents for gpu in agent.spec.gpus}))
        self.users = Users(timeline, ledger, self.pair, models=models)
        self.faults = self._build_faults(parts)
        by_name = {agent.name: agent for agent in self.agents}
        ledger.held_on = lambda name: by_name[name].held if name in by_name else ()
        self.healed_ns = 0
        self._checked: tuple[object, int] = (None, -1)

    def _agent_type(self, parts: PairParts) -> type[Agent]:
        """Of the next agent."""
        return parts.agent

    def _build_faults(self, parts: PairParts) -> PairFaults:
        return parts.faults(self.timeline, self.network, self.pair, self.agents, self.store, self.ledger)

    def _spec(self, index: int) -> NodeSpec:
        rng = self.timeline.rng
        gpus = tuple(
            GpuSpec(product=product, model=model)
            for product, model in (rng.choice(_PRODUCTS) for _ in range(rng.randint(1, 3)))
        )
        return NodeSpec(
            node_name=f"n{index}", cpu_milli=32_000, memory_bytes=64 * _GIB, pool=rng.choice(("a", "b")), gpus=gpus
        )

    def begin(self) -> None:
        """Everybody starts, in no particular order."""
        for seat in self.pair.seats:
            self.timeline.after(self.timeline.draw_ns(seconds(3)), seat.start)
        for agent in self.agents:
            agent.boot()
        self._user_acts()
        self.faults.begin()

    def _user_acts(self) -> None:
        if not self.healed_ns:
            self.users.act()
            self.timeline.after(self.timeline.draw_ns(_USER_NS), self._user_acts)

    def step(self) -> None:
        """One event, and a look at what it did."""
        self.timeline.step()
        life = self.pair.life
        if life is not None and life.is_settled and (life, life.core.state.revision) != self._checked:
            self._checked = (life, life.core.state.revision)
            check_state(self.pair, self.agents, self.ledger)  # type: ignore[arg-type]
            self.timeline.mark(life.core.state.digest().encode())
        if self.timeline.steps % _CHECK_EVERY == 0:
            if (seat := self.pair.leader) is not None:
                check_freshness(seat, self.ledger)
            check_served(self.pair)  # type: ignore[arg-type]
            for process in self.ledger.ticks.running.values():
                process.conserve()

    def heal(self) -> None:
        """Faults stop; from here on everything has to come right."""
        self.healed_ns = self.timeline.now_ns
        self.faults.heal()
        if self.is_harsh:
            for agent in self.agents:
                self.network.snap(agent.name, "connection reset")

    def converge(self) -> None:
        """Runs until everything is right; raises Broken when it is not in time."""
        deadline_ns = self.healed_ns + CONVERGED_WITHIN_NS
        next_ns = self.healed_ns + SECOND_NS
        while True:
            self.step()
            if self.timeline.now_ns < next_ns:
                continue
            next_ns += SECOND_NS
            self.users.reconcile()
            try:
                self._check_end()
            except Broken:
                if self.timeline.now_ns >= deadline_ns:
                    raise
            else:
                return

    def _check_end(self) -> None:
        check_end(self.pair, self.agents, self.ledger)  # type: ignore[arg-type]
        lives = [seat for seat in self.pair.seats if seat.life is not None]
        demand(13, len(lives) == 1, f"{len(lives)} controllers lead")
        demand(13, all(seat.is_running for seat in self.pair.seats), "a controller does not run")
        demand(10, not self.users.open_calls, f"{len(self.users.open_calls)} calls of users were never answered")


def run_pair(seed: int, steps: int, *, parts: PairParts = PairParts(), heals: bool = True) -> PairWorld:
    """A whole run, or without `heals` the first part alone; raises Failure."""
    world = PairWorld(seed, parts=parts)
    play(world, seed, steps, heals=heals)
    return world


def play(world: PairWorld, seed: int, steps: int, *, heals: bool, flags: str = "") -> None:
    """Runs a world that has not begun; raises Failure, which names the command's further flags."""
    try:
        world.begin()
        for _ in range(steps):
            world.step()
        if heals:
            world.heal()
            world.converge()
    except Exception as error:
        recent = list(world.timeline.recent)
        raise Failure(seed, steps, world.timeline.steps, error, recent, flags=f" --pair{flags}") from error
