"""Windows: what a node spent and on whom, minute by minute, until the controller has it on disk.

Owns the open window, the closed ones that are not acknowledged, and which of them to send.
Must not know how shares were found, sockets or files. Times are arguments: nanoseconds since
1970 by the node's clock, since prices go by the hour of the day.

Theory. Totals since the agent began would have to be told apart from those of the agent
before it; what was spent in a stretch of time need not. So a window is closed when a
multiple of its length has passed, and is kept until it is acknowledged. Shares are whole
millijoules and are only ever added, so everything that was charged is in exactly one window.
Where the controller is away for long, the oldest neighbours of one hour become one window:
names and sums stay, and only when within the hour is forgotten. Beyond `most` the two oldest
become one whatever their hour, so that the number of windows is bounded and no joule is lost.
A clock that is set moves what is not acknowledged along with it (`shift`): how long ago it was is
known by the monotonic clock, so a machine that began in 1970 tells sane windows once its clock is
right. What another boot left stays where it was. Windows of one clock never overlap.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from eelgrid_agent.attribution.answer import shown_owner
from eelgrid_agent.attribution.owner import UNATTRIBUTED, Owner
from eelgrid_agent.attribution.shares import Confidence, Method, Part, Share
from eelgrid_protos import messages as wire

__all__ = ["LENGTH_S", "Spent", "Windows", "merged"]

LENGTH_S = 60.0
# Under way to the controller at once: after a day away it is not to get all in one burst.
_SENT_MOST = 8
_UNHEARD_MOST = 3
# Of the run before so many may have been sent: those under way, and what was acknowledged since its last write.
_TRIED_MOST = 64
_HOUR_NS = 3600 * 10**9
_TIME_NS_MOST = 2**63 - 1
# A window of another run that ends further ahead is of a clock that was wrong, and no reason to begin after it.
_OVERLAP_NS_MOST = _HOUR_NS
_Key = tuple[str, Owner, int | None, Part, Method, Confidence]


@dataclass(slots=True)
class Spent:
    """One device in the open window."""

    uncertainty_mj: int = 0
    uncounted_s: float = 0.0


@dataclass(slots=True)
class _Open:
    begin_ns: int
    end_ns: int
    charged_mj: dict[_Key, int] = field(default_factory=dict)
    devices: dict[str, Spent] = field(default_factory=dict)


class Windows:
    """One node's."""

    def __init__(
        self, incarnation: int, *, length_s: float = LENGTH_S, many: int = 240, most: int = 1000,
        kept: Iterable[wire.EnergyWindow] = (), number: int = 0, before_ns: int = 0,
    ) -> None:  # fmt: skip
        """`kept` are of the run before, whose last window had this `number`; both of this incarnation.

        `before_ns` is where that one ended, if its clock was ours.
        """
        self.incarnation = incarnation
        self.number = number
        self.ended_ns = 0  # of the last window that was closed
        self.changes = 0  # whoever writes them down looks whether this has risen
        self._length_ns = int(length_s * 1e9)
        self._many = many
        self._most = most
        # Times may be before 1970 for a while, when a clock is set back; those that are told never are.
        self._closed: list[wire.EnergyWindow] = list(kept)
        self._before_ns = before_ns
        self._foreign = number  # windows up to it are of a clock that this run knows nothing of
        self._open: _Open | None = None
        self._sent = 0
        # The controller may have these already, under their numbers: merged into a later one, they would count twice.
        self._tried = max((window.number for window in self._closed[:_TRIED_MOST]), default=0)
        self._unheard = 0  # windows that were closed since the last acknowledgement

    @property
    def closed(self) -> tuple[wire.EnergyWindow, ...]:
        """What is not acknowledged, oldest first."""
        return tuple(map(_sane, self._closed))

    def shift(self, by_ns: int, *, foreign: bool = False) -> None:
        """The clock was set by so much. `foreign` windows, of the run before, move only where they are of this clock."""
        if foreign:
            self._foreign = 0
            self._before_ns += by_ns
        if self._open is not None:
            self._open.begin_ns += by_ns
            self._open.end_ns += by_ns
        self._closed = [
            replace(one, begin_ns=one.begin_ns + by_ns, end_ns=one.end_ns + by_ns)
            if one.number > self._foreign
            else one
            for one in self._closed
        ]
        if self.ended_ns:
            self.ended_ns += by_ns
        self.changes += 1

    def _floor_ns(self, begin_ns: int) -> int:
        """Where a window that would begin then may begin at the earliest: windows of one clock never overlap."""
        if self.ended_ns:
            return self.ended_ns
        return self._before_ns if self._before_ns - begin_ns <= _OVERLAP_NS_MOST else 0

    def charge(
        self, shares: Mapping[str, Iterable[Share]], *, at_ns: int, since_ns: int | None = None,
        spent: Mapping[str, Spent] | None = None,
    ) -> None:  # fmt: skip
        """Adds what was spent up to now, by device; closes the window when its time is over.

        `since_ns` is when the first of it may have been spent, where that is before the open window.
        """
        window = self._open
        if window is None:
            begin_ns = at_ns if since_ns is None else min(since_ns, at_ns)
            begin_ns = max(begin_ns, self._floor_ns(begin_ns))
            window = self._open = _Open(begin_ns, max(begin_ns, at_ns))
        window.end_ns = max(window.end_ns, at_ns)
        for uuid, parts in shares.items():
            window.devices.setdefault(uuid, Spent())
            for share in parts:
                key = (uuid, share.owner.account(), share.gpu_instance_id, share.part, share.method, share.confidence)
                window.charged_mj[key] = window.charged_mj.get(key, 0) + share.energy_mj
        for uuid, more in (spent or {}).items():
            told = window.devices.setdefault(uuid, Spent())
            told.uncertainty_mj += more.uncertainty_mj
            told.uncounted_s += more.uncounted_s
        is_over = at_ns // self._length_ns > window.begin_ns // self._length_ns
        is_full = len(window.charged_mj) >= wire.WINDOW_SHARES_MOST // 2
        if is_over or is_full or at_ns < window.begin_ns:
            self.close()

    def close(self) -> None:
        """Ends the open window now, as an agent does that stops."""
        window, self._open = self._open, None
        if window is None or not window.devices:
            return
        self.number += 1
        self.ended_ns = window.end_ns
        self.changes += 1
        self._closed.append(_window(window, self.incarnation, self.number))
        self._unheard += 1
        if self._unheard > _UNHEARD_MOST:
            # The controller had no room, or its disk fails: everything goes again.
            self.resume()
        self._shrink()

    @property
    def is_waiting(self) -> bool:
        """Whether there is one to send."""
        return self._sent < min(len(self._closed), _SENT_MOST)

    def upcoming(self) -> wire.EnergyWindow | None:
        """The next one to send, which then counts as sent."""
        if not self.is_waiting:
            return None
        self._sent += 1
        window = self._closed[self._sent - 1]
        self._tried = max(self._tried, window.number)
        return _sane(window)

    def acknowledge(self, incarnation: int, number: int) -> None:
        """Lets go of what is on the controller's disk."""
        if incarnation != self.incarnation:
            return
        before = len(self._closed)
        self._closed = [window for window in self._closed if window.number > number]
        gone = before - len(self._closed)
        if gone:
            self._unheard = 0
            self.changes += 1
            self._sent = max(0, self._sent - gone)

    def resume(self) -> None:
        """A connection is new: nothing counts as sent."""
        self._sent = self._unheard = 0

    def _shrink(self) -> None:
        """What was ever sent stays as it is: the controller may have it already, under its number."""
        first_free = next((at for at, one in enumerate(self._closed) if one.number > self._tried), len(self._closed))
        while len(self._closed) > self._many:
            first = next(
                (at for at in range(first_free, len(self._closed) - 1) if self._are_of_one_hour(at)),
                first_free if len(self._closed) > self._most else None,
            )
            if first is None or first + 1 >= len(self._closed):
                return
            joined = merged(self._closed[first], self._closed[first + 1])
            self._closed[first : first + 2] = [joined]

    def _are_of_one_hour(self, at: int) -> bool:
        one, other = self._closed[at : at + 2]
        return one.begin_ns // _HOUR_NS == max(one.begin_ns, other.end_ns - 1) // _HOUR_NS


def _sane(window: wire.EnergyWindow) -> wire.EnergyWindow:
    """The window with times that can be told."""
    if window.begin_ns >= 0 and window.end_ns <= _TIME_NS_MOST:
        return window
    begin_ns, end_ns = (min(max(0, at_ns), _TIME_NS_MOST) for at_ns in (window.begin_ns, window.end_ns))
    return replace(window, begin_ns=begin_ns, end_ns=end_ns)


def _window(window: _Open, incarnation: int, number: int) -> wire.EnergyWindow:
    return _packed(
        incarnation, number, begin_ns=window.begin_ns, end_ns=window.end_ns,
        spent={uuid: (one.uncertainty_mj, one.uncounted_s) for uuid, one in window.devices.items()},
        rows=[
            (uuid, shown_owner(owner), instance, wire.EnergyPart[part.name], wire.AttributionMethod[method.name],
             wire.AttributionConfidence[confidence.name], energy_mj)
            for (uuid, owner, instance, part, method, confidence), energy_mj in window.charged_mj.items()
        ],
    )  # fmt: skip


_Row = tuple[
    str, wire.EnergyOwner, int | None, wire.EnergyPart, wire.AttributionMethod, wire.AttributionConfidence, int
]


def _packed(
    incarnation: int, number: int, *, begin_ns: int, end_ns: int, spent: Mapping[str, tuple[int, float]],
    rows: Iterable[_Row],
) -> wire.EnergyWindow:  # fmt: skip
    """Rows by index; what goes beyond the bounds of a message is charged to nobody, and stays in the sum."""
    places = {uuid: index for index, uuid in enumerate(spent)}
    owners: dict[wire.EnergyOwner, int] = {_NOBODY: 0}
    totals = dict.fromkeys(spent, 0)
    summed: dict[tuple[int, int, int | None, int, int, int], int] = {}
    for uuid, owner, instance, part, method, confidence, energy_mj in rows:
        if energy_mj == 0:
            continue
        totals[uuid] += energy_mj
        place = owners.get(owner)
        if place is None and len(owners) < wire.WINDOW_OWNERS_MOST:
            place = owners[owner] = len(owners)
        key = (places[uuid], place or 0, instance, int(part), int(method), int(confidence))
        if key not in summed and (place is None or len(summed) >= wire.WINDOW_SHARES_MOST - 2 * len(places)):
            key = (places[uuid], 0, None, *_LOST)
        summed[key] = summed.get(key, 0) + energy_mj
    return wire.EnergyWindow(
        incarnation=incarnation, number=number, begin_ns=begin_ns, end_ns=end_ns,
        devices=tuple(
            wire.WindowDevice(
                gpu_uuid=uuid, total_mj=totals[uuid], uncertainty_mj=uncertainty_mj, uncounted_s=uncounted_s
            )
            for uuid, (uncertainty_mj, uncounted_s) in spent.items()
        ),
        owners=tuple(owners),
        shares=tuple(
            wire.WindowShare(
                device=device, owner=owner, gpu_instance_id=instance, part=wire.EnergyPart(part),
                method=wire.AttributionMethod(method), confidence=wire.AttributionConfidence(confidence),
                energy_mj=energy_mj,
            )
            for (device, owner, instance, part, method, confidence), energy_mj in summed.items()
        ),
    )  # fmt: skip


def merged(one: wire.EnergyWindow, other: wire.EnergyWindow) -> wire.EnergyWindow:
    """Both as one, under the number of the later."""
    spent: dict[str, tuple[int, float]] = {}
    for device in (*one.devices, *other.devices):
        uncertainty_mj, uncounted_s = spent.get(device.gpu_uuid, (0, 0.0))
        spent[device.gpu_uuid] = (uncertainty_mj + device.uncertainty_mj, uncounted_s + device.uncounted_s)
    rows = [
        (window.devices[share.device].gpu_uuid, window.owners[share.owner], share.gpu_instance_id, share.part,
         share.method, share.confidence, share.energy_mj)
        for window in (one, other)
        for share in window.shares
    ]  # fmt: skip
    return _packed(other.incarnation, other.number, begin_ns=one.begin_ns, end_ns=other.end_ns, spent=spent, rows=rows)


_LOST = (
    int(wire.EnergyPart.ACTIVE), int(wire.AttributionMethod.UNATTRIBUTED), int(wire.AttributionConfidence.LOW)
)  # fmt: skip
_NOBODY = wire.EnergyOwner(kind=wire.OwnerKind[UNATTRIBUTED.kind.name])
