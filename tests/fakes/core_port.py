"""A core as the Slurm engine uses it, without a loop and a journal, and the clock of a Slurm in memory."""

from eelgrid_controller.core.core import Core
from eelgrid_controller.core.steps import CommitResult
from eelgrid_controller.state.agent_liveness import AgentLiveness
from eelgrid_controller.state.cluster_state import ClusterState
from eelgrid_controller.state.engine_reports import Eligibility, EngineOverrides
from eelgrid_protos import catalogue


class CorePort:
    """A core as the engine uses it, without a journal; each command is one commit."""

    def __init__(self, clock):
        self.eligibility, self.presence, self.listeners, self._clock = Eligibility(), AgentLiveness(), [], clock
        self.outside = EngineOverrides()
        self.core = self.make_core(ClusterState())
        self.core.set_eligibility(self.eligibility)

    def make_core(self, state):
        return Core(state, catalogue.load_catalogue())

    async def read(self, view):
        return view(self.core)

    def __getattr__(self, name):
        names = {"record_engine_attempts": "record_attempts", "reconsider": "retry_waiting"}

        async def command(*args, **changes):
            args = (None, *args) if name == "record_engine_attempts" else args
            step = getattr(self.core, names.get(name, name))(*args, **changes, now_ns=self._clock.now_ns())
            events = list(step.events)
            while self.core.has_backlog:
                events += self.core.retry(now_ns=self._clock.now_ns()).events
            for listener in self.listeners:
                listener(CommitResult(tuple(events), frozenset(), self.core.state.revision))
            return step.result

        return command


class SlurmClock:
    def __init__(self, slurm):
        self._slurm = slurm

    def now_ns(self):
        return int(self._slurm.now_s * 1e9)

    def monotonic_s(self):
        return self._slurm.now_s
