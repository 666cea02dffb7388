"""MIG layouts as the node's loop has them: one object that answers every time, whatever the journal or driver does.

Owns how the executor is put together on a machine and which of its errors
become an event instead of an exception. Must not decide what is wanted, nor
when it is looked after. Every method but `take_events` and `stamped` may block
on the driver and on the disk, so all of them belong where the driver is asked;
one change of one device takes seconds where the driver says that it is in use.

Theory. A node that may not change anything observes: it adopts what stands and
counts generations, so that its inventory can be leased from, and that is all.
A journal that cannot be read is told once and changes nothing: what cannot be
written down is not done.
"""

from collections.abc import Callable, Collection, Iterable
from functools import partial

from eelgrid_agent.device import Control, Device, DeviceError
from eelgrid_agent.mig.executor import MigExecutor
from eelgrid_agent.mig.journal import Journal, JournalError
from eelgrid_agent.mig.partitioner import TransitionRefused
from eelgrid_agent.mig.runner import Limits
from eelgrid_agent.refusal import Rule
from eelgrid_protos.catalogue import MigGeometry
from eelgrid_protos.messages import ApplyResult, ApplyStatus, Gpu, GpuLayout, NodeEvent, NodeEventKind

__all__ = ["LayoutKeeper"]

_DETAIL_MOST = 1000


class LayoutKeeper:
    """The layouts of one node. `boot_id` is asked in every round: since when instances stand (see `boot_of`).

    `open_nodes` makes what containers need to open the instances of a device, and says what it could not make.
    """

    def __init__(
        self,
        device: Device,
        control: Control,
        journal: Journal,
        *,
        boot_id: Callable[[], str],
        sleep: Callable[[float], None],
        monotonic_s: Callable[[], float],
        wall_ns: Callable[[], int],
        obstacle: Callable[[MigGeometry], str] = lambda _: "",
        open_nodes: Callable[[Gpu], str] | None = None,
        limits: Limits | None = None,
    ) -> None:
        self.executor = MigExecutor(
            device, control, journal, boot_id=boot_id, sleep=sleep, monotonic_s=monotonic_s, wall_ns=wall_ns,
            obstacle=obstacle, limits=limits,
        )  # fmt: skip
        self._device = device
        self._open_nodes = open_nodes
        self._wall_ns = wall_ns
        self._told = ""
        self._own_events: list[NodeEvent] = []
        self._resets: set[str] = set()
        # Whether what stands was looked at since the start.
        self.is_recovered = False
        # None until either was told: what the journal holds is the assignments' then, but for what claims say is theirs.
        self._assigned: frozenset[str] | None = None
        self._claimed: frozenset[str] = frozenset()

    def recover(self) -> tuple[ApplyResult, ...]:
        """Once at start: adopts what is found, finishes or undoes what was under way, makes anew what a boot took."""
        results = self._tended(self.executor.recover)
        self.is_recovered = True
        return results

    def check(self) -> tuple[ApplyResult, ...]:
        """Now and then: goes on with what was cut off, and repairs drift, boundedly; a result where it did anything."""
        return self._tended(self.executor.check)

    def observe(self) -> None:
        """In place of `recover` and `check` where nothing may be changed."""
        self._done(self.executor.observe)
        self.is_recovered = True

    def apply(self, layout: GpuLayout) -> ApplyResult:
        """Brings one device to a layout and keeps it there from now on."""
        result = self.executor.apply(layout)
        self._open((result,))
        return result

    def hold(self, uuids: Collection[str]) -> bool:
        """The MIG devices and whole GPUs of all assignments in force, each time that they are applied.

        They are not changed from now on, over a restart too, until other ones are given. False where that could not
        be written down: nothing protects them then but their processes, and the assignments are to be applied again.
        """
        self._assigned = frozenset(uuids)
        return self._done(lambda: self.executor.hold(frozenset(uuids) | self._claimed))

    def lease(self, uuids: Collection[str]) -> bool:
        """What resource claims hold, beside the assignments: as `hold`, and neither of the two ends the other."""
        return self._done(partial(self._lease, frozenset(uuids)))

    def _lease(self, uuids: frozenset[str]) -> None:
        if self._assigned is None:
            self._assigned = self.executor.leased() - uuids
        self._claimed = uuids
        self.executor.hold(self._assigned | uuids)

    def release(self, uuid: str) -> bool:
        """Enforces nothing on a device any more and leaves what stands; False where that could not be written down."""
        return self._done(lambda: self.executor.release(uuid))

    def device_was_reset(self, uuid: str) -> bool:
        """Instances of before are gone even where like ones stand: a lost device came back, or its counter fell.

        Not for a device that merely hung: what others made on it would be taken for what a boot left. Where that could
        not be written down it is False, and `check` tries again.
        """
        self._resets.add(uuid)
        return self._pass_on_resets()

    def stamped(self, gpus: Iterable[Gpu]) -> tuple[Gpu, ...]:
        """Devices as they were listed, with generations for the inventory; without where the journal cannot be read."""
        listed = tuple(gpus)
        try:
            return tuple(map(self.executor.stamped, listed))
        except JournalError:
            return listed

    def take_events(self) -> tuple[NodeEvent, ...]:
        """What the controller should hear, since the call before."""
        own, self._own_events = self._own_events, []
        return (*own, *self.executor.take_events())

    def _tended(self, tend: Callable[[], tuple[ApplyResult, ...]]) -> tuple[ApplyResult, ...]:
        results: list[ApplyResult] = []
        # Repairs of a device whose reset is not known would be counted as somebody's doing.
        if not self._pass_on_resets():
            return ()
        if self._done(lambda: results.extend(tend())):
            problem = next((result.detail for result in results if result.rule == Rule.JOURNAL), "")
            if problem:
                self._tell(problem)
            else:
                self._told = ""
        self._open(results)
        return tuple(results)

    def _open(self, results: Iterable[ApplyResult]) -> None:
        """A device node for each instance of what was changed; one that cannot be made is told and undoes nothing."""
        changed = {result.subject for result in results if result.status is ApplyStatus.APPLIED}
        open_nodes = self._open_nodes
        if open_nodes is None or not changed:
            return
        try:
            gpus = [gpu for gpu in self._device.gpus() if gpu.uuid in changed]
        except DeviceError:
            # The driver went since; whatever comes back is looked at anew.
            return
        for gpu in gpus:
            problem = open_nodes(gpu)
            if problem:
                self._announce(NodeEventKind.HEALTH, problem, gpu.uuid)

    def _pass_on_resets(self) -> bool:
        for uuid in sorted(self._resets):
            if not self._done(partial(self.executor.device_was_reset, uuid)):
                return False
            self._resets.discard(uuid)
        return True

    def _done(self, act: Callable[[], None]) -> bool:
        """Whether it was done; a journal that fails is told once, a driver that is away shows in the quick looks."""
        try:
            act()
        except JournalError as error:
            self._tell(str(error))
            return False
        except (DeviceError, TransitionRefused):
            return False
        return True

    def _tell(self, detail: str) -> None:
        if detail == self._told:
            return
        self._told = detail
        self._announce(NodeEventKind.ENFORCEMENT_SUSPENDED, detail)

    def _announce(self, kind: NodeEventKind, detail: str, uuid: str = "") -> None:
        event = NodeEvent(
            kind=kind, time_ns=max(0, self._wall_ns()), gpu_uuid=uuid, detail=f"MIG: {detail}"[:_DETAIL_MOST]
        )  # fmt: skip
        self._own_events.append(event)
