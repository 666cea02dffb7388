"""A remote device over simulated ones in a real child, and the file that says what befalls them."""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from eelgrid_agent.devices.port import Missing
from eelgrid_agent.devices.process.remote_device import RemoteDevice
from eelgrid_agent.devices.process.supervisor import CallDeadlines
from eelgrid_agent.devices.process.watchdog import WatchdogLimits
from eelgrid_protos.messages import AbsenceReason, Reading

# Short enough to wait for, long enough that a machine under load does not pass for a driver that hangs.
DEADLINES = CallDeadlines(
    quick_s=0.6, slow_s=1.0, listing_s=1.5, setting_s=1.0, instance_s=1.0, mode_s=1.5, taken_up_s=1.5, started_s=20.0
)
LIMITS = WatchdogLimits(probe_first_s=0.05, probe_most_s=0.1, restart_first_s=0.05, restart_most_s=0.2)
# A machine under load starts a child in seconds.
LONG_S = 15.0
TIMED_OUT = Missing(AbsenceReason.TIMED_OUT)


class Scene:
    """The file that says what a child finds."""

    def __init__(self, path: Path, gpus: int, **words: object) -> None:
        self.path = path
        self._kept = {"products": ["h100-sxm5-80gb"] * gpus, "load": 0.5, "began_ns": time.monotonic_ns()} | words
        self.say()

    def say(self, **words: object) -> None:
        self.path.write_text(json.dumps(self._kept | words))


class Rig:
    def __init__(self, path: Path, gpus: int, scene: dict[str, object] | None = None, **options: object) -> None:
        self.scene = Scene(path, gpus, **(scene or {}))
        options = {"deadlines": DEADLINES, "limits": LIMITS} | options
        self.remote = RemoteDevice("simulated", str(path), **options)
        self.uuids = [gpu.uuid for gpu in self.remote.gpus()]
        assert len(self.uuids) == gpus

    def hang(self, *places: int, stall: object = "ever") -> None:
        self.say(hung=list(places), stall=stall)

    def say(self, **words: object) -> None:
        """The scene from now on, in the child that stands too."""
        self.scene.say(**words)
        self.remote.order_simulation("scene")

    def silent(self, budget_s: float = LONG_S) -> list[int]:
        """The places that say nothing."""
        looks = self.remote.read_gpus(self.uuids, budget_s)
        assert [uuid for uuid, _ in looks] == self.uuids
        return [place for place, (_, look) in enumerate(looks) if look.values[Reading.POWER_W] == TIMED_OUT]


@contextmanager
def rigs_in(folder: Path) -> Iterator[Callable[..., Rig]]:
    """Makes rigs, and sees that none of their children outlives them."""
    rigs: list[Rig] = []

    def make(gpus: int = 2, **options: object) -> Rig:
        rigs.append(Rig(folder / f"scene-{len(rigs)}.json", gpus, **options))
        return rigs[-1]

    yield make
    for rig in rigs:
        children = rig.remote.children
        rig.remote.close()
        assert not [pid for pid in children if Path(f"/proc/{pid}").exists()]
