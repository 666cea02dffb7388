"""What goes wrong, and when it is over.

Owns the list of faults and their weights. Each fault brings its own end, since
a fault that never ends is no test of coming back; `heal` ends all at once,
but for devices that are broken for good.
"""

from collections.abc import Callable, Sequence

from eelgrid_agent.simulation.gpu import SimHealth
from tests.sim.agent import Agent
from tests.sim.clock import seconds
from tests.sim.controller import Controller
from tests.sim.network import Network, Weather
from tests.sim.poison import Rogue
from tests.sim.timeline import Timeline

__all__ = ["Faults"]

_PAUSE_NS = seconds(5)
_HOUR_NS = seconds(3600)
_YEAR_NS = 365 * 24 * _HOUR_NS


class Faults:
    """See the module."""

    def __init__(self, timeline: Timeline, network: Network, controller: Controller, agents: Sequence[Agent]) -> None:
        self._timeline = timeline
        self._rng = timeline.rng
        self._network = network
        self._controller = controller
        self._agents = agents
        self._is_over = False
        self._rogues = 0
        self.counts: dict[str, int] = {}
        self._kinds: tuple[tuple[int, Callable[[], None]], ...] = (
            (8, self.crash_agent),
            (4, self.reboot),
            (7, self.crash_controller),
            (10, self.break_stream),
            (7, self.partition),
            (7, self.lose_gpu),
            (5, self.hang_gpu),
            (4, self.reset_counter),
            (3, self.unload_driver),
            (6, self.step_clock),
            (4, self.fill_disk),
            (4, self.stall_agent),
            (6, self.roll_back),
            (2, self.jump_clock),
            (3, self.let_rogue_in),
        )

    def begin(self) -> None:
        """From now on."""
        self._timeline.after(self._timeline.draw_ns(_PAUSE_NS), self._next)

    def _next(self) -> None:
        if self._is_over:
            return
        kind = self._rng.choices([kind for _, kind in self._kinds], [weight for weight, _ in self._kinds])[0]
        self.counts[kind.__name__] = self.counts.get(kind.__name__, 0) + 1
        kind()
        self.begin()

    def heal(self) -> None:
        """Everything that can come back does, and nothing more goes wrong."""
        self._is_over = True
        self._timeline.note("fault: all over")
        self._network.weather = Weather(slow_p=0.0)
        self._network.clear()
        self._controller.disk.fill(is_full=False)
        self._controller.start()
        for agent in self._agents:
            if agent.node is None:
                agent.boot()
            agent.stalled_until_ns = 0
            agent.device.faults.load_driver()
            for gpu in agent.device.devices:
                if gpu.health is SimHealth.HUNG or (gpu.health is SimHealth.LOST and self._rng.random() < 0.5):
                    agent.device.faults.restore_gpu(gpu.identity.uuid)

    # Processes and machines

    def crash_agent(self) -> None:
        """The agent dies; systemd or somebody starts it again."""
        agent = self._agent("crash_agent")
        agent.stop(is_power_loss=False)
        self._end(15.0, lambda: agent.start() if agent.node is None else None)

    def reboot(self) -> None:
        """The machine loses its power."""
        agent = self._agent("reboot")
        agent.stop(is_power_loss=True)
        self._end(25.0, lambda: agent.boot() if agent.node is None else None)

    def crash_controller(self) -> None:
        """The controller dies."""
        self._timeline.note("fault: crash_controller")
        self._controller.crash()
        self._end(20.0, self._controller.start)

    def roll_back(self) -> None:
        """The controller dies and its disk goes back to an earlier commit: a damaged log, a backup, an empty directory.

        With its mark, which is then no help, or below it, which the next start must tell.
        """
        self._timeline.note("fault: roll_back")
        self._controller.crash()
        self._controller.roll_back(with_mark=self._rng.random() < 0.5)
        self._end(20.0, self._controller.start)

    def let_rogue_in(self) -> None:
        """An agent of another node says what is allowed and senseless."""
        self._timeline.note("fault: let_rogue_in")
        self._rogues += 1
        Rogue(self._timeline, self._network, self._rogues)

    def jump_clock(self) -> None:
        """A wall clock is decades off for some seconds."""
        span_ns = self._rng.choice((10, 40)) * _YEAR_NS * self._rng.choice((-1, 1))
        clock, name = self._rng.choice(
            [(self._controller.clock, "controller"), *((agent.clock, agent.name) for agent in self._agents)]
        )
        self._timeline.note(f"fault: jump_clock {name} {span_ns}")
        clock.step(span_ns)
        self._timeline.after(self._timeline.draw_ns(seconds(5)), lambda: clock.step(-span_ns))

    def stall_agent(self) -> None:
        """The agent takes no look for a while, as when its machine swaps."""
        agent = self._agent("stall_agent")
        agent.stalled_until_ns = self._timeline.now_ns + self._timeline.draw_ns(seconds(40))

    def fill_disk(self) -> None:
        """The controller's disk has no room."""
        self._timeline.note("fault: fill_disk")
        self._controller.disk.fill(is_full=True)
        self._end(8.0, lambda: self._controller.disk.fill(is_full=False))

    def step_clock(self) -> None:
        """A wall clock is set, mostly by little."""
        span_ns = self._rng.choice((seconds(0.3), seconds(3), seconds(60), _HOUR_NS))
        delta_ns = self._timeline.draw_ns(2 * span_ns) - span_ns
        if self._rng.random() < 0.3:
            self._timeline.note(f"fault: step_clock controller {delta_ns}")
            self._controller.clock.step(delta_ns)
        else:
            self._agent(f"step_clock {delta_ns}").clock.step(delta_ns)

    # The network

    def break_stream(self) -> None:
        """A stream breaks with all that is under way."""
        self._network.snap(self._agent("break_stream").name, "connection reset")

    def partition(self) -> None:
        """A node cannot be reached."""
        agent = self._agent("partition")
        self._network.partition(agent.name, self._timeline.draw_ns(self._rng.choice((seconds(5), seconds(90)))))

    # Devices

    def lose_gpu(self) -> None:
        """A device falls off the bus."""
        agent, uuid = self._gpu("lose_gpu")
        if uuid:
            agent.device.faults.lose_gpu(uuid)
            self._end(60.0, lambda: agent.device.faults.restore_gpu(uuid))

    def hang_gpu(self) -> None:
        """A device answers nothing in time."""
        agent, uuid = self._gpu("hang_gpu")
        if uuid:
            agent.device.faults.hang_gpu(uuid)
            self._end(20.0, lambda: agent.device.faults.restore_gpu(uuid))

    def reset_counter(self) -> None:
        """An energy counter starts from zero."""
        agent, uuid = self._gpu("reset_counter")
        if uuid:
            agent.device.faults.reset_counter(uuid)

    def unload_driver(self) -> None:
        """The driver goes, and with it every device."""
        agent = self._agent("unload_driver")
        agent.device.faults.unload_driver()
        self._end(50.0, agent.device.faults.load_driver)

    # Chance

    def _end(self, most_s: float, action: Callable[[], None]) -> None:
        """The end of a fault, unless `heal` has come first."""
        self._timeline.after(self._timeline.draw_ns(seconds(most_s)), lambda: None if self._is_over else action())

    def _agent(self, what: str) -> Agent:
        agent = self._rng.choice(self._agents)
        self._timeline.note(f"fault: {what} {agent.name}")
        return agent

    def _gpu(self, what: str) -> tuple[Agent, str]:
        agent = self._agent(what)
        devices = agent.device.devices
        return agent, self._rng.choice(devices).identity.uuid if devices else ""
