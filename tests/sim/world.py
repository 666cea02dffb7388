"""The world of one seed: machines, network, users and faults, stepped one event at a time.

Owns how a seed becomes a cluster, when invariants are checked, and the report
of a failure. A run has two parts: `steps` events under faults, then healing,
after which everything must converge within a bound of simulated time.
"""

from dataclasses import dataclass
from pathlib import Path

from eelgrid_agent.simulation.spec import GpuSpec, NodeSpec
from tests.sim.agent import Agent
from tests.sim.broken import Broken
from tests.sim.clock import SECOND_NS, seconds
from tests.sim.controller import Controller
from tests.sim.disk import Disk
from tests.sim.faults import Faults
from tests.sim.ingest import IngestAgent, IngestFaults, IngestProcess, serve_links
from tests.sim.invariants import check_end, check_freshness, check_served, check_state
from tests.sim.ledger import Ledger
from tests.sim.life import Life
from tests.sim.network import Network, Weather
from tests.sim.ticks import TickBook
from tests.sim.timeline import Timeline
from tests.sim.users import BUDGETS_AT, Users

__all__ = ["Failure", "Parts", "World", "run"]

# Longer than keepalive, back-off, welcome and survey one after another.
CONVERGED_WITHIN_NS = seconds(200)
_CHECK_EVERY = 25
_USER_NS = seconds(1.2)
_GIB = 2**30
# Catalogue key and the model that workloads ask for; the P100 has no energy counter.
_PRODUCTS = (
    ("openb-g2", "G2"),
    ("openb-t4", "T4"),
    ("openb-p100", "P100"),
    ("h100-sxm5-80gb", "H100"),
    ("a100-sxm4-40gb", "A100"),
)
_LIMITED_PRODUCTS = _PRODUCTS[3:]


class Failure(AssertionError):
    """A seed that broke an invariant, and how to see it again."""

    def __init__(
        self, seed: int, steps: int, step: int, error: Exception, recent: list[str], *, flags: str = ""
    ) -> None:
        self.seed = seed
        self.invariant = error.invariant if isinstance(error, Broken) else 0
        said = str(error) if isinstance(error, Broken) else f"{type(error).__name__}: {error}"
        super().__init__(
            "\n".join(
                [
                    *recent,
                    f"seed {seed}, step {step}: {said}",
                    f"again: python -m tests.sim --seeds {seed}:{seed + 1} --steps {steps}{flags}",
                ]
            )
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What a world is made of; tests put faulty parts in and expect to be told."""

    life: type[Life] = Life
    agent: type[Agent] = Agent
    disk: type[Disk] = Disk
    ingest: type[IngestProcess] = IngestProcess


class World:
    """See the module."""

    def __init__(self, seed: int, *, parts: Parts = Parts(), directory: Path | None = None, ingests: int = 0) -> None:
        """Agents are behind as many ingest processes, or connect to the controller."""
        self.timeline = Timeline(seed)
        rng = self.timeline.rng
        self.is_harsh = rng.random() < 0.3
        weather = Weather(drop_p=0.02, duplicate_p=0.02, reorder_p=0.05) if self.is_harsh else Weather()
        self.network = Network(self.timeline, weather)
        self.ledger = Ledger(TickBook(is_fair=not self.is_harsh))
        self.controller = Controller(
            self.timeline,
            self.network,
            self.ledger,
            parts.disk(directory),
            parts.life,
            drift_ppm=rng.randint(-200, 200),
        )
        ticks_most = rng.choice((15, 60, 600))
        self.ingests = [
            parts.ingest(self.timeline, self.network, number, controllers=(self.controller.address,))
            for number in range(ingests)
        ]
        agent_type = parts.agent
        if ingests:
            serve_links(self.controller)
            addresses = [ingest.address for ingest in self.ingests]
            agent_type = type("_Agent", (IngestAgent, parts.agent), {"ingests": addresses})
        self.agents = [
            agent_type(
                self.timeline,
                self.network,
                self.ledger,
                self._spec(index),
                drift_ppm=rng.randint(-200, 200),
                seed=seed,
                ticks_most=ticks_most,
            )
            for index in range(rng.randint(1, 4))
        ]
        models = tuple(sorted({gpu.model for agent in self.agents for gpu in agent.spec.gpus}))
        self.users = Users(self.timeline, self.ledger, self.controller, models=models)
        faults_type = IngestFaults if ingests else Faults
        self.faults = faults_type(self.timeline, self.network, self.controller, self.agents)
        if isinstance(self.faults, IngestFaults):
            self.faults.ingests = self.ingests
        by_name = {agent.name: agent for agent in self.agents}
        self.ledger.held_on = lambda name: by_name[name].held if name in by_name else ()
        self.healed_ns = 0
        self._checked: tuple[object, int] = (None, -1)

    def _spec(self, index: int) -> NodeSpec:
        rng = self.timeline.rng
        # Where power budgets are kept, GPUs say what limits they take.
        products = _LIMITED_PRODUCTS if self.timeline.seed % 10 == BUDGETS_AT else _PRODUCTS
        gpus = tuple(
            GpuSpec(product=product, model=model, sensor_gain=rng.choice((0.95, 1.0, 1.05)))
            for product, model in (rng.choice(products) for _ in range(rng.randint(0, 4)))
        )
        return NodeSpec(
            node_name=f"n{index}",
            cpu_milli=rng.choice((16_000, 64_000)),
            memory_bytes=rng.choice((64, 256)) * _GIB,
            pool=rng.choice(("a", "b")),
            gpus=gpus,
        )

    def begin(self) -> None:
        """Everybody starts, in no particular order."""
        self.timeline.after(self.timeline.draw_ns(seconds(3)), self.controller.start)
        for ingest in self.ingests:
            self.timeline.after(self.timeline.draw_ns(seconds(3)), ingest.start)
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
        timeline = self.timeline
        timeline.step()
        life = self.controller.life
        if life is not None and life.is_settled and (life, life.core.state.revision) != self._checked:
            self._checked = (life, life.core.state.revision)
            check_state(self.controller, self.agents, self.ledger)
            timeline.mark(life.core.state.digest().encode())
        if timeline.steps % _CHECK_EVERY == 0:
            check_freshness(self.controller, self.ledger)
            check_served(self.controller)
            for process in self.ledger.ticks.running.values():
                process.conserve()

    def heal(self) -> None:
        """Faults stop; from here on everything has to come right."""
        self.healed_ns = self.timeline.now_ns
        self.faults.heal()
        if self.is_harsh:
            # What was lost without a broken stream cannot be known to be lost.
            for one in (*self.ingests, *self.agents):
                self.network.snap(one.name, "connection reset")

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
                check_end(self.controller, self.agents, self.ledger)
                if not self.users.open_calls:
                    return
            except Broken:
                if self.timeline.now_ns >= deadline_ns:
                    raise
            if self.timeline.now_ns >= deadline_ns:
                raise Broken(4, f"{len(self.users.open_calls)} calls of users were never answered")


def run(
    seed: int,
    steps: int,
    *,
    parts: Parts = Parts(),
    directory: Path | None = None,
    heals: bool = True,
    ingests: int = 0,
) -> World:
    """A whole run, or without `heals` the first part alone; raises Failure."""
    world = World(seed, parts=parts, directory=directory, ingests=ingests)
    try:
        world.begin()
        for _ in range(steps):
            world.step()
        if heals:
            world.heal()
            world.converge()
    except Exception as error:
        flags = f" --ingest {ingests}" if ingests else ""
        raise Failure(seed, steps, world.timeline.steps, error, list(world.timeline.recent), flags=flags) from error
    finally:
        world.controller.disk.crashed()
    return world
