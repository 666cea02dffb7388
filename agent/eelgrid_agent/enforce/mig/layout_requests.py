"""Layout requests of operators and configuration files against the GPUs of a node.

Which entry addresses which GPU (filter and indices must both match; the last wins), the syntax of `--layout`, whether
a configuration holds, and the export of existing layouts.

LayoutRequestError           the request cannot be met on this node as written
├── InvalidLayoutText        a --layout that cannot be parsed
├── NoSuchGpu                it names a GPU that does not exist
├── BoardUnknown             an entry filters by board, and the board of this GPU is unknown
└── UnsupportedLayout        the layout does not fit this GPU, or it has no MIG
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from eelgrid_agent.enforce.mig.layout import InvalidLayout, MigName, PciId, read_layout, resolve_layout
from eelgrid_agent.enforce.mig.parted_file import PartedEntry, PartedFile
from eelgrid_agent.enforce.mig.partitioner import format_layout
from eelgrid_agent.enforce.mig.placement import (
    RequestedMigDevice,
    count_mig_devices,
    matches_devices,
    place_mig_devices,
)
from eelgrid_protos.catalogue.products import MigGeometry
from eelgrid_protos.errors import Violation
from eelgrid_protos.messages import Gpu, GpuLayout

_ITEM = re.compile(r"(?:([0-9]{1,2})x)?([^@]+)(?:@([0-9]{1,2}))?")
_HOW = "write GPU=off, GPU=empty or GPU=[Nx]PROFILE[@START],..., for example 0=3g.20gb@4,2x1g.5gb"


class LayoutRequestError(ValueError):
    """What is wanted cannot be had of this node as it is written; the violation names the place and the remedy."""

    def __init__(self, field: str, problem: str, remedy: str) -> None:
        self.violation = Violation(field, problem, remedy)
        super().__init__(str(self.violation))


class InvalidLayoutText(LayoutRequestError):
    """A --layout that cannot be read."""


class NoSuchGpu(LayoutRequestError):
    """It speaks of a GPU that is not there."""


class BoardUnknown(LayoutRequestError):
    """An entry filters by board, and nobody knows this GPU's."""


class UnsupportedLayout(LayoutRequestError):
    """The layout cannot stand on this GPU, or it has no MIG."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MigSubject:
    """One GPU as it stands: its geometry where it has MIG, its board where it can be read.

    `busy` and `foreign` are ids of GPU instances that are in use, or that something else made.
    """

    gpu: Gpu
    geometry: MigGeometry | None = None
    board: PciId | None = None
    busy: frozenset[int] = frozenset()
    foreign: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutRequest:
    """One GPU's layout and who wants it."""

    subject: MigSubject
    layout: GpuLayout
    because: str


def requests_from_entries(entries: Iterable[PartedEntry], subjects: Sequence[MigSubject]) -> tuple[LayoutRequest, ...]:
    """What a configuration wants of each GPU that it speaks of, by index; raises WishError.

    GPUs without MIG are passed over where an entry is for all or wants MIG off, as mig-parted does.
    """
    wishes: dict[int, LayoutRequest] = {}
    for entry in entries:
        for subject in _spoken_of(entry, subjects):
            gpu = subject.gpu
            if not gpu.mig_capable:
                if entry.mig_enabled and entry.devices is not None:
                    remedy = "leave it out of devices, or filter by board"
                    raise UnsupportedLayout(
                        f"{entry.place}.devices", f"GPU {gpu.index} ({gpu.product}) has no MIG", remedy
                    )
                continue
            wishes[gpu.index] = _build_request(
                subject, _expand_entry(entry), enabled=entry.mig_enabled, because=entry.place
            )
    return tuple(wishes[index] for index in sorted(wishes))


def requests_from_texts(texts: Iterable[str], subjects: Sequence[MigSubject]) -> tuple[LayoutRequest, ...]:
    """What `--layout` options want; raises WishError."""
    wishes: dict[int, LayoutRequest] = {}
    for text in texts:
        which, separator, listed = text.partition("=")
        because = f"--layout {text}"
        if not separator:
            raise InvalidLayoutText(because, "says nothing of what is wanted", _HOW)
        asked = (
            [] if listed in ("off", "empty") else [one for item in listed.split(",") for one in _items(item, because)]
        )
        for subject in _select_subjects(which, subjects, because):
            if subject.gpu.index in wishes:
                raise InvalidLayoutText(because, f"GPU {subject.gpu.index} is there twice", "name each GPU once")
            wishes[subject.gpu.index] = _build_request(subject, asked, enabled=listed != "off", because=because)
    return tuple(wishes[index] for index in sorted(wishes))


def _expand_entry(entry: PartedEntry) -> list[RequestedMigDevice]:
    return [RequestedMigDevice(name=name) for name, count in entry.mig_devices for _ in range(count)]


def _items(text: str, because: str) -> Iterator[RequestedMigDevice]:
    match = _ITEM.fullmatch(text.strip())
    name = MigName.parse(match[2]) if match else None
    if match is None or name is None:
        raise InvalidLayoutText(because, f"{text!r} is no MIG device", _HOW)
    times, start = int(match[1] or 1), None if match[3] is None else int(match[3])
    for _ in range(times):
        yield RequestedMigDevice(name=name, start=start)


def _select_subjects(which: str, subjects: Sequence[MigSubject], because: str) -> Sequence[MigSubject]:
    if which == "all":
        able = [subject for subject in subjects if subject.gpu.mig_capable]
        if not able:
            raise NoSuchGpu(because, "no GPU of this node has MIG", "ask a node that has one")
        return able
    chosen = [subject for subject in subjects if which in (str(subject.gpu.index), subject.gpu.uuid)]
    if not chosen:
        there = ", ".join(str(subject.gpu.index) for subject in subjects)
        raise NoSuchGpu(
            because, f"there is no GPU {which!r}", f"name one by its UUID or index: {there or 'none'}, or all"
        )
    return chosen


def _build_request(
    subject: MigSubject, asked: Sequence[RequestedMigDevice], *, enabled: bool, because: str
) -> LayoutRequest:
    gpu, geometry = subject.gpu, subject.geometry
    if geometry is None:
        raise UnsupportedLayout(because, f"GPU {gpu.index} ({gpu.product}) has no MIG", "leave it out")
    if not enabled:
        return LayoutRequest(subject=subject, layout=GpuLayout(gpu_uuid=gpu.uuid), because=because)
    try:
        layout = place_mig_devices(asked, gpu=gpu, geometry=geometry, busy=subject.busy, foreign=subject.foreign)
    except InvalidLayout as error:
        raise UnsupportedLayout(f"{because}: {error.field}", error.problem, error.remedy) from None
    return LayoutRequest(subject=subject, layout=layout, because=because)


def _spoken_of(entry: PartedEntry, subjects: Sequence[MigSubject]) -> Iterator[MigSubject]:
    for subject in subjects:
        if not entry.matches_index(subject.gpu.index):
            continue
        if subject.board is None and entry.filters:
            problem = f"the PCI id of GPU {subject.gpu.index} cannot be read"
            remedy = "read it with lspci -nn and name the GPU in devices, without device-filter"
            raise BoardUnknown(f"{entry.place}.device-filter", problem, remedy)
        if subject.board is None or entry.matches_board(subject.board):
            yield subject


# Whether it is so


def find_unmet_entries(
    entries: Sequence[PartedEntry], subjects: Sequence[MigSubject], *, mode_only: bool = False
) -> tuple[str, ...]:
    """Why a configuration does not hold, a line for each reason; none when it does; raises BoardUnknown.

    As mig-parted judges: the mode must be that of every entry that speaks of a GPU, the counts those of the last
    one, and some entry must speak of each GPU. The mode is the current one; a pending one changes nothing.
    """
    reasons = []
    last: dict[int, PartedEntry] = {}
    for entry in entries:
        for subject in _spoken_of(entry, subjects):
            gpu = subject.gpu
            last[gpu.index] = entry
            if entry.mig_enabled != gpu.mig_enabled:
                now = "has no MIG" if not gpu.mig_capable else f"has MIG {_on(gpu.mig_enabled)}"
                reasons.append(f"GPU {gpu.index} {now}; {entry.place} wants it {_on(entry.mig_enabled)}")
    if mode_only:
        return tuple(reasons)
    for subject in subjects:
        entry_of_it = last.get(subject.gpu.index)
        if entry_of_it is None:
            reasons.append(f"GPU {subject.gpu.index} is not spoken of by any entry")
        elif entry_of_it.mig_enabled and subject.gpu.mig_enabled and not _has(subject, entry_of_it):
            there = _format_counts(count_mig_devices(subject.gpu, subject.geometry) if subject.geometry else {})
            asked = _format_counts(dict(entry_of_it.mig_devices))
            reasons.append(f"GPU {subject.gpu.index} has {there}; {entry_of_it.place} wants {asked}")
    return tuple(reasons)


def _has(subject: MigSubject, entry: PartedEntry) -> bool:
    assert subject.geometry is not None  # whoever has MIG on has a geometry
    try:
        return matches_devices(_expand_entry(entry), gpu=subject.gpu, geometry=subject.geometry)
    except InvalidLayout:
        # A name that this part does not know cannot be on it.
        return False


def find_unmet_requests(wishes: Iterable[LayoutRequest], *, mode_only: bool = False) -> tuple[str, ...]:
    """Why layouts with places do not hold, a line for each GPU; none when they do."""
    reasons = []
    for wish in wishes:
        gpu, geometry = wish.subject.gpu, wish.subject.geometry
        assert geometry is not None  # a wish is of a GPU with MIG
        target, standing = resolve_layout(wish.layout, geometry), read_layout(gpu)
        if target.mig_enabled != standing.mig_enabled:
            reasons.append(f"GPU {gpu.index} has MIG {_on(standing.mig_enabled)}; {wish.because} wants it otherwise")
        elif target != standing and not mode_only:
            reasons.append(f"GPU {gpu.index} has {format_layout(standing, geometry)}; {wish.because} is not that")
    return tuple(reasons)


def _on(enabled: bool) -> str:
    return "on" if enabled else "off"


def _format_counts(counts: Mapping[MigName, int], spelled: str = "") -> str:
    return (
        spelled or ", ".join(f"{count} of {name}" for name, count in sorted(counts.items(), key=str)) or "no MIG device"
    )


# What stands, as a configuration


def export_parted_file(subjects: Sequence[MigSubject], name: str) -> PartedFile:
    """One configuration that describes all GPUs, alike ones together; by the fewest words that say it exactly."""
    groups: dict[tuple[bool, frozenset[tuple[MigName, int]]], list[MigSubject]] = {}
    for subject in subjects:
        there = count_mig_devices(subject.gpu, subject.geometry) if subject.geometry and subject.gpu.mig_enabled else {}
        groups.setdefault((subject.gpu.mig_enabled, frozenset(there.items())), []).append(subject)
    chips = {subject.gpu.index: _chip(subject) for subject in subjects}
    by_chip = len(set(chips.values())) > 1 and len(groups) > 1 and None not in chips.values()
    entries = []
    for (enabled, counts), members in groups.items():
        filters = {chip for subject in members if (chip := _chip(subject)) is not None} if by_chip else set()
        indices = tuple(sorted(subject.gpu.index for subject in members))
        everyone = tuple(sorted(index for index, chip in chips.items() if not filters or chip in filters))
        entries.append(
            PartedEntry(
                filters=tuple(sorted(filters, key=str)),
                devices=None if indices == everyone else indices,
                mig_enabled=enabled,
                mig_devices=tuple(sorted(counts, key=lambda item: (item[0].slices, str(item[0])))),
            )
        )
    return PartedFile(configs={name: tuple(entries)})


def _chip(subject: MigSubject) -> PciId | None:
    """The board without its maker, so that the configuration serves every maker's."""
    return None if subject.board is None else PciId(subject.board.device, subject.board.vendor)
