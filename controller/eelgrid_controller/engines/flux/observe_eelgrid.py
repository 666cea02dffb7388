"""Observer module for a Flux broker: tells Eelgrid's controller what runs under a scheduler of Flux's own.

Loaded by `flux module load .../observe_eelgrid.py controller=HOST:PORT` beside sched-simple or Fluxion. Owns when resources are
asked for. Decides nothing, and changes nothing in Flux: energy, queues and the frobnicator's advice are answered from it.

Theory. What jobs hold is in the journal. What there is, and what is down, the scheduler says; it is asked every few seconds,
since only schedulers are told of changes.

Source: `sched.resource-status` and `job-manager.events-journal` of flux-core.
"""

from typing import Any

from flux.brokermod import BrokerModule

from eelgrid_controller.engines.flux.batches import READS_BATCHES
from eelgrid_controller.engines.flux.broker_link import BrokerLink, read_ranks
from eelgrid_controller.engines.flux.resource_sets import format_idset

_EVERY_S = 5.0


class EelgridObserver(BrokerLink, BrokerModule):
    """Says what there is and what runs."""

    def __init__(self, h: Any, *args: str) -> None:
        """Raises ValueError for arguments or a version that cannot be used."""
        super().__init__(h, *args)
        if self.arguments.rest:
            raise ValueError(f"unknown argument {self.arguments.rest[0]!r}: give controller=, tls-*= or insecure")
        self._has_begun = False
        self._timer = h.timer_watcher_create(_EVERY_S, self._ask, repeat=_EVERY_S)

    def run(self) -> None:
        """Connects, and runs until the module is removed."""
        self._timer.start()
        super().run()

    def say_all(self) -> None:
        """Asks for what there is; with the answer all is said."""
        self._has_begun = False
        self._ask()

    def _ask(self, *_: Any) -> None:
        if self.is_connected:
            self.handle.rpc("sched.resource-status").then(self._on_status)

    def _on_status(self, future: Any) -> None:
        try:
            found = future.get()
        except OSError as error:
            self.log.warning(f"no scheduler says what there is: {error}")
            return
        down = format_idset(read_ranks(found["down"]))
        said = {"resources": found["all"], "down": down, "mode": "observe"}
        if self._has_begun:
            self.send("resources", said)
            return
        self._has_begun = self.send("hello", said | READS_BATCHES)
        self.follow_journal()

    def on_past_told(self) -> None:
        """All that runs has been said."""
        self.send("ready", {})


def mod_main(h: Any, *args: str) -> None:
    """Flux's entry point."""
    EelgridObserver(h, *args).run()
