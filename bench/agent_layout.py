"""A controller with agents that are replayed, connected directly or behind ingest processes: as real processes.

Owns their start, their order and their end, and the controller's death and return. Must not know what is measured.
"""

import json
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import psutil

from bench.processes import free_port, metric, running
from bench.runner import Options

_WITHIN_S = 600.0
# Agents of one replaying process.
_REPLAYED_MOST = 5_000
_SAID_WITHIN_S = 60.0


def _set_interval(address: str, interval_s: float) -> None:
    from eelgrid_protos import messages, rpc, transport

    with transport.open_blocking_channel(address, tls=None) as channel:
        operators = rpc.build_client(rpc.OPERATOR_SERVICE, channel)
        policy = operators.get_policy(messages.GetPolicyRequest()).policy
        wanted = replace(policy, send_interval_s=interval_s)
        operators.update_policy(messages.UpdatePolicyRequest(policy=wanted))


class AgentLayout:
    """A controller, ingest processes and agents that run. `options` has out and interval."""

    def __init__(
        self, options: Options, folder: Path, agents: int, ingests: int, frames: Path, *, is_older: bool = False
    ) -> None:
        """`is_older` is for agents of the version before, whose streams end with the leader."""
        self.agents, self.ingests = agents, ingests
        self._out, self._interval_s, self._folder, self._frames = options.out, options.interval, folder, frames
        self._name = f"{agents}-{ingests}{'-older' if is_older else ''}"
        self._flags = ["--older"] if is_older else []
        self._address, self.metrics = f"127.0.0.1:{free_port()}", free_port()
        self.relays: list[psutil.Process] = []
        self.loads: list[psutil.Process] = []
        self._logs: list[Path] = []
        self._starts = 0
        self._life = ExitStack()

    @contextmanager
    def run(self) -> Iterator[None]:
        """Starts all of it, until every agent is connected and sends."""
        with ExitStack() as stack:
            stack.callback(self.end_controller)
            self.start_controller()
            self.wait_for("eelgrid_agents_connected", 0)
            _set_interval(self._address, self._interval_s)
            targets = [f"127.0.0.1:{free_port()}" for _ in range(self.ingests)]
            for at, target in enumerate(targets):
                own = ["--ingest", self._address, "--listen", target, "--metrics", f"127.0.0.1:{free_port()}"]
                log = self._out / f"ingest-{self._name}-{at}.log"
                self.relays.append(stack.enter_context(running("eelgrid_controller", own, log)))
            if self.ingests:
                self.wait_for("eelgrid_ingest_processes", self.ingests)
            began_s = time.monotonic()
            for first in range(0, self.agents, _REPLAYED_MOST):
                own = ["--frames", str(self._frames), "--controller", ",".join(targets or [self._address])]
                own += ["--first", str(first), "--agents", str(min(_REPLAYED_MOST, self.agents - first))]
                own += ["--interval", str(self._interval_s), "--welcomes", str(self._welcomes), *self._flags]
                self._logs.append(self._out / f"replay-{self._name}-{first}.log")
                self.loads.append(stack.enter_context(running("bench.agent_replay", own, self._logs[-1])))
            self.wait_for("eelgrid_agents_connected", self.agents)
            self.joined_s = time.monotonic() - began_s
            for load in self.loads:
                load.send_signal(signal.SIGUSR2)
            time.sleep(2.0 * self._interval_s)
            yield

    @property
    def _welcomes(self) -> Path:
        return self._folder / f"welcomes-{self._name}"

    def start_controller(self) -> None:
        """Starts the controller, from what its journal has."""
        flags = ["--listen", self._address, "--metrics", f"127.0.0.1:{self.metrics}", "--no-savings"]
        flags += ["--data", str(self._folder / self._name)]
        log = self._out / f"controller-{self._name}-{self._starts}.log"
        self._starts += 1
        self.controller = self._life.enter_context(running("eelgrid_controller", flags, log))

    def end_controller(self, number: int = signal.SIGTERM) -> None:
        """Ends the controller."""
        self.controller.send_signal(number)
        self._life.close()

    def wait_for(self, name: str, value: float, *, within_s: float = _WITHIN_S) -> None:
        """Waits until a metric of the controller has a value."""
        deadline_s = time.monotonic() + within_s
        while (found := metric(self.metrics, name)) != value:
            if time.monotonic() > deadline_s:
                raise SystemExit(f"{name} is {found}, not {value}; see {self._out}")
            time.sleep(0.25)

    def read_welcomes(self, since_s: float) -> dict[str, float]:
        """Returns when each agent was first welcomed since a time of the monotonic clock, of those that were."""
        found: dict[str, float] = {}
        for line in self._welcomes.read_text().splitlines():
            at, _, name = line.partition(" ")
            if name and float(at) >= since_s:
                found.setdefault(name, float(at))
        return found

    def finish(self) -> list[dict[str, int]]:
        """Stops the load; returns what each process of it says that it sent."""
        for load in self.loads:
            load.send_signal(signal.SIGUSR1)
        return [_read_summary(log) for log in self._logs]


def _read_summary(log: Path) -> dict[str, int]:
    deadline_s = time.monotonic() + _SAID_WITHIN_S
    while time.monotonic() < deadline_s:
        for line in log.read_text().splitlines():
            if line.startswith('{"batches"') and line.endswith("}"):
                found: dict[str, int] = json.loads(line)
                return found
        time.sleep(0.2)
    raise SystemExit(f"the load said nothing; see {log}")
