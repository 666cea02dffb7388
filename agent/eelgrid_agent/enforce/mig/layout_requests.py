"""Layout requests of operators and configuration files, and the placement of requested MIG devices on one GPU.

An entry addresses a GPU when its filter and its indices both match; the last entry that matches wins. Also here: the
syntax of `--layout`, whether a configuration holds on the node, and the export of existing layouts.

Placement goes from counts of device names to profiles and starts. Of all feasible placements it takes the one that
keeps existing instances, then the one that leaves the most places for the largest profiles; ties go to the lowest
starts. At most seven instances exist on a GPU, so the search is exhaustive.
"""

import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from eelgrid_agent.enforce.mig.layout import (
    InstancePart,
    InvalidLayout,
    MigLayout,
    MigName,
    PciId,
    build_layout,
    fits_compute_instances,
    read_layout,
    read_part,
    resolve_layout,
)
from eelgrid_agent.enforce.mig.parted_file import PartedEntry, PartedFile
from eelgrid_agent.enforce.mig.partitioner import TransitionRefused, find_conflict, format_layout, plan_steps
from eelgrid_protos.catalogue.products import GiProfile, MigGeometry
from eelgrid_protos.errors import Violation
from eelgrid_protos.messages import Gpu, GpuLayout, WantedInstance
from eelgrid_protos.values import dataclass

# (profile id, compute profile ids as in Part)
InstanceShape = tuple[int, tuple[int, ...]]


def place_instances(
    geometry: MigGeometry,
    gpu: Gpu,
    shapes: Sequence[InstanceShape],
    *,
    fixed: tuple[InstancePart, ...] = (),
    busy: Collection[int] = frozenset(),
    foreign: Collection[int] = frozenset(),
) -> MigLayout:
    """Returns the layout with exactly these instances that takes the fewest steps.

    Raises InvalidLayout, TransitionRefused.

    `fixed` instances have their places already. InvalidLayout means that they cannot exist together on this part at
    all, TransitionRefused that an untouchable instance is in the way.
    """
    if len(fixed) + len(shapes) > geometry.most:
        raise InvalidLayout(
            "instances", f"are {len(fixed) + len(shapes)}", f"{geometry.key} holds {geometry.most} at most"
        )
    profiles = {profile.id: profile for profile in geometry.profiles.values()}
    for number, (profile_id, _) in enumerate(shapes):
        if profile_id not in profiles:
            known = ", ".join(f"{profile.name} ({key})" for key, profile in geometry.profiles.items())
            raise InvalidLayout(f"instances[{number}].profile", f"is {profile_id}", f"use one of {known}")
    ordered = sorted(shapes, key=lambda shape: (-profiles[shape[0]].size, shape))
    candidates: list[tuple[InstancePart, ...]] = []
    _extend(geometry, [(profiles[shape[0]], shape[1]) for shape in ordered], fixed, candidates, len(fixed))
    if not candidates:
        everything = [*(part.profile_id for part in fixed), *(profile_id for profile_id, _ in shapes)]
        names = ", ".join(profiles[profile_id].name for profile_id in everything if profile_id in profiles)
        raise InvalidLayout(
            "instances", f"{names} cannot exist together on {geometry.key}", "ask for fewer or smaller ones"
        )
    # Which places are best has nothing to do with the mode.
    gpu = replace(gpu, mig_capable=True, mig_enabled=True, mig_pending=False)
    outside = [read_part(instance) for instance in gpu.gpu_instances if instance.id in foreign]
    best: tuple[tuple[object, ...], MigLayout] | None = None
    refusal: TransitionRefused | None = None
    for parts in candidates:
        layout = build_layout(True, parts)
        try:
            steps = plan_steps(geometry, gpu, layout, busy=busy, foreign=foreign)
        except TransitionRefused as refused:
            refusal = refusal or refused
            continue
        standing = [*parts, *(part for part in outside if part not in parts)]
        left = tuple(-places for places in _left(geometry, standing))
        rank = (len(steps), left, tuple(part.start for part in parts))
        if best is None or rank < best[0]:
            best = (rank, layout)
    if best is None:
        assert refusal is not None
        raise refusal
    return best[1]


def _extend(
    geometry: MigGeometry,
    left: list[tuple[GiProfile, tuple[int, ...]]],
    placed: tuple[InstancePart, ...],
    found: list[tuple[InstancePart, ...]],
    fixed: int,
) -> None:
    """Every way to place what is left beside what is placed, of which the first were placed by the caller."""
    if not left:
        if find_conflict(geometry, placed) is None:
            found.append(placed)
        return
    (profile, compute), *rest = left
    last = placed[-1] if len(placed) > fixed else None
    alike = last is not None and (last.profile_id, last.compute) == (profile.id, compute)
    for start in profile.starts:
        if alike and last is not None and start <= last.start:
            continue
        part = InstancePart(profile_id=profile.id, start=start, size=profile.size, compute=compute)
        if not any(part.overlaps(other) for other in placed):
            _extend(geometry, rest, (*placed, part), found, fixed)


def _left(geometry: MigGeometry, standing: Sequence[InstancePart]) -> tuple[int, ...]:
    """From how many places each plain profile could still be made, the largest first."""
    plain = [profile for profile in geometry.profiles.values() if not profile.media and not profile.graphics]
    largest_first = sorted(plain, key=lambda profile: (-profile.compute_slices, -profile.size, profile.id))
    return tuple(
        sum(
            find_conflict(
                geometry, (*standing, InstancePart(profile_id=profile.id, start=start, size=profile.size, compute=()))
            )
            is None
            for start in profile.starts
        )
        for profile in largest_first
    )


_GIB = 1024**3
_EIGHTHS = 8
# A device holds seven instances of at most seven compute instances.
_ASKED_MOST = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestedMigDevice:
    """One requested MIG device: a name and, optionally, the start of its GPU instance."""

    name: MigName
    start: int | None = None


def list_profile_names(geometry: MigGeometry) -> str:
    """Lists the names of a profile."""
    return ", ".join(profile.name for profile in geometry.profiles.values())


def count_mig_devices(gpu: Gpu, geometry: MigGeometry) -> Mapping[MigName, int]:
    """Counts existing MIG devices as mig-parted does.

    By compute instance, so a GPU instance without one does not count.
    """
    counts: Counter[MigName] = Counter()
    for instance in gpu.gpu_instances:
        profile, whole = geometry.profile_by_id(instance.profile_id), MigName.parse(instance.profile)
        if profile is None or whole is None:
            continue
        slices = {ci.id: ci.compute_slices for ci in profile.compute_instances}
        for child in instance.compute_instances:
            counts[whole.part(slices.get(child.profile_id, whole.slices))] += 1
    return counts


def place_mig_devices(
    asked: Sequence[RequestedMigDevice],
    *,
    gpu: Gpu,
    geometry: MigGeometry,
    busy: Collection[int] = frozenset(),
    foreign: Collection[int] = frozenset(),
) -> GpuLayout:
    """Returns the layout with all requested devices and a place for each; raises InvalidLayout.

    `busy` and `foreign` are ids of GPU instances that must not be touched. Where nothing fits around them the layout
    ignores them: planning its steps then reports the rule that forbids it.
    """
    if len(asked) > _ASKED_MOST:
        raise InvalidLayout("mig-devices", f"{len(asked)} MIG devices", f"ask for at most {_ASKED_MOST} on one GPU")
    anywhere = all(item.start is None for item in asked)
    whole = all(instance.compute_instances for instance in gpu.gpu_instances)
    if gpu.mig_enabled and anywhere and whole and matches_devices(asked, gpu=gpu, geometry=geometry):
        # However the shares are packed: nothing should move.
        return to_gpu_layout(read_layout(gpu), gpu.uuid, geometry)
    fixed, free = _pack(asked, gpu, geometry)
    try:
        layout = place_instances(geometry, gpu, free, fixed=fixed, busy=busy, foreign=foreign)
    except TransitionRefused:
        layout = place_instances(geometry, gpu, free, fixed=fixed)
    return to_gpu_layout(layout, gpu.uuid, geometry)


def matches_devices(asked: Iterable[RequestedMigDevice], *, gpu: Gpu, geometry: MigGeometry) -> bool:
    """Whether exactly these devices exist, wherever they are and however shares are packed; raises InvalidLayout."""
    wanted = Counter((_profile_of(item.name, gpu, geometry).id, item.name.compute) for item in asked)
    there: Counter[tuple[int, int]] = Counter()
    for instance in gpu.gpu_instances:
        profile = geometry.profile_by_id(instance.profile_id)
        sizes = {ci.id: ci.compute_slices for ci in profile.compute_instances} if profile else {}
        there.update((instance.profile_id, sizes.get(child.profile_id, 0)) for child in instance.compute_instances)
    return wanted == there


def to_gpu_layout(layout: MigLayout, uuid: str, geometry: MigGeometry) -> GpuLayout:
    """A layout in the words of the contract."""
    instances = tuple(_spelled(layout, geometry))
    return GpuLayout(gpu_uuid=uuid, mig_enabled=layout.mig_enabled, instances=instances)


def _spelled(layout: MigLayout, geometry: MigGeometry) -> Iterator[WantedInstance]:
    for part in layout.parts:
        profile = geometry.profile_by_id(part.profile_id)
        if profile is None:
            raise InvalidLayout(
                "instances", f"{geometry.key} has no profile {part.profile_id}", "ask for another layout"
            )
        sizes = {ci.id: ci.compute_slices for ci in profile.compute_instances}
        slices = () if part.compute == (profile.whole.id,) else tuple(sizes[child] for child in part.compute)
        yield WantedInstance(profile=profile.name, start=part.start, compute_slices=slices)


def _profile_of(name: MigName, gpu: Gpu, geometry: MigGeometry) -> GiProfile:
    """By the name that the driver prints, else by the one that follows from the sizes, as mig-parted does it."""
    profiles = geometry.profiles.values()
    printed = [profile for profile in profiles if MigName.parse(profile.name) == name.instance]
    computed = [profile for profile in profiles if _computed(profile, gpu) == name.instance]
    if printed or computed:
        return (printed or computed)[0]
    like = [
        profile.name
        for profile in profiles
        if (alike := MigName.parse(profile.name)) is not None
        and (alike.slices, alike.extras, alike.lacks) == (name.slices, name.extras, name.lacks)
    ]
    hint = (
        f"on this part {name.slices} slices go by {' or '.join(like)}"
        if like
        else f"it has {list_profile_names(geometry)}"
    )
    raise InvalidLayout(str(name), f"{gpu.product or geometry.key} (GPU {gpu.index}) has no such profile", hint)


def _computed(profile: GiProfile, gpu: Gpu) -> MigName | None:
    """The name by size: the share of the device's memory in whole eighths, of its whole GiB."""
    printed = MigName.parse(profile.name)
    if profile.memory_bytes is None or not gpu.memory_bytes or printed is None:
        return None
    eighths = math.ceil(profile.memory_bytes / gpu.memory_bytes * _EIGHTHS)
    # Half up, never to even: names of other rounding would not be mig-parted's.
    memory_gb = math.floor(eighths / _EIGHTHS * math.ceil(gpu.memory_bytes / _GIB) + 0.5)
    return replace(printed, memory_gb=memory_gb)


def _pack(
    asked: Sequence[RequestedMigDevice], gpu: Gpu, geometry: MigGeometry
) -> tuple[tuple[InstancePart, ...], list[tuple[int, tuple[int, ...]]]]:
    """Compute instances into GPU instances: parts that have a place, and shapes that have none.

    Shares of one instance go together as long as they fit, largest first; with
    a place, whatever names it shares it.
    """
    at_places: dict[tuple[str, int], list[int]] = {}
    anywhere: dict[str, list[list[int]]] = {}
    profiles: dict[str, GiProfile] = {}
    for item in sorted(asked, key=lambda item: -item.name.compute):
        profile = _profile_of(item.name, gpu, geometry)
        profiles[profile.key] = profile
        share = next((ci.id for ci in profile.compute_instances if ci.compute_slices == item.name.compute), None)
        if share is None:
            sizes = ", ".join(str(ci.compute_slices) for ci in profile.compute_instances)
            raise InvalidLayout(
                str(item.name), "there is no such share", f"{profile.name} holds shares of {sizes} slices"
            )
        if item.start is not None:
            at_places.setdefault((profile.key, item.start), []).append(share)
            continue
        held = anywhere.setdefault(profile.key, [])
        room = next(
            (one for one in held if fits_compute_instances(profile, tuple(sorted((*one, share), reverse=True)))), None
        )
        if room is None:
            held.append([share])
        else:
            room.append(share)
    fixed = tuple(_part(profiles[key], start, shares) for (key, start), shares in at_places.items())
    reason = geometry.conflict((profiles[key], start) for key, start in at_places)
    if reason is not None:
        raise InvalidLayout("mig-devices", reason, "move it, or ask for fewer or smaller instances")
    shapes = [(profiles[key].id, tuple(sorted(one, reverse=True))) for key, held in anywhere.items() for one in held]
    return fixed, shapes


def _part(profile: GiProfile, start: int, shares: Sequence[int]) -> InstancePart:
    compute = tuple(sorted(shares, reverse=True))
    if not fits_compute_instances(profile, compute):
        problem = "cannot hold so many shares together"
        raise InvalidLayout(f"{profile.name}@{start}", problem, f"it has {profile.compute_slices} slices in all")
    return InstancePart(profile_id=profile.id, start=start, size=profile.size, compute=compute)


_ITEM = re.compile(r"(?:([0-9]{1,2})x)?([^@]+)(?:@([0-9]{1,2}))?")
_HOW = "write GPU=off, GPU=empty or GPU=[Nx]PROFILE[@START],..., for example 0=3g.20gb@4,2x1g.5gb"


class LayoutRequestError(ValueError):
    """The request cannot be met on this node as written; the violation names the place and the remedy."""

    def __init__(self, field: str, problem: str, remedy: str) -> None:
        self.violation = Violation(field, problem, remedy)
        super().__init__(str(self.violation))


class InvalidLayoutText(LayoutRequestError):
    """A --layout that cannot be read."""


class NoSuchGpu(LayoutRequestError):
    """It speaks of a GPU that is not there."""


class BoardUnknown(LayoutRequestError):
    """An entry filters by board, and the board of this GPU is unknown."""


class UnsupportedLayout(LayoutRequestError):
    """The layout does not fit this GPU, or it has no MIG."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MigSubject:
    """The state of one GPU: its geometry where it has MIG, its board where it can be read.

    `busy` and `foreign` are ids of GPU instances that are in use, or that another program created.
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
    """What a configuration wants of each GPU that it speaks of, by index; raises LayoutRequestError.

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
    """Parses `--layout` options; raises LayoutRequestError."""
    wishes: dict[int, LayoutRequest] = {}
    for text in texts:
        which, separator, listed = text.partition("=")
        because = f"--layout {text}"
        if not separator:
            raise InvalidLayoutText(because, "requests no layout", _HOW)
        asked = (
            [] if listed in ("off", "empty") else [one for item in listed.split(",") for one in _items(item, because)]
        )
        for subject in _select_subjects(which, subjects, because):
            if subject.gpu.index in wishes:
                raise InvalidLayoutText(because, f"GPU {subject.gpu.index} appears twice", "name each GPU once")
            wishes[subject.gpu.index] = _build_request(subject, asked, enabled=listed != "off", because=because)
    return tuple(wishes[index] for index in sorted(wishes))


def _expand_entry(entry: PartedEntry) -> list[RequestedMigDevice]:
    return [RequestedMigDevice(name=name) for name, count in entry.mig_devices for _ in range(count)]


def _items(text: str, because: str) -> Iterator[RequestedMigDevice]:
    match = _ITEM.fullmatch(text.strip())
    name = MigName.parse(match[2]) if match else None
    if match is None or name is None:
        raise InvalidLayoutText(because, f"{text!r} is not a MIG device", _HOW)
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
            reasons.append(f"GPU {subject.gpu.index} is not covered by any entry")
        elif entry_of_it.mig_enabled and subject.gpu.mig_enabled and not _has(subject, entry_of_it):
            there = _format_counts(count_mig_devices(subject.gpu, subject.geometry) if subject.geometry else {})
            asked = _format_counts(dict(entry_of_it.mig_devices))
            reasons.append(f"GPU {subject.gpu.index} has {there}; {entry_of_it.place} requests {asked}")
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
            reasons.append(f"GPU {gpu.index} has MIG {_on(standing.mig_enabled)}; {wish.because} requests the opposite")
        elif target != standing and not mode_only:
            reasons.append(f"GPU {gpu.index} has {format_layout(standing, geometry)}; {wish.because} differs")
    return tuple(reasons)


def _on(enabled: bool) -> str:
    return "on" if enabled else "off"


def _format_counts(counts: Mapping[MigName, int], spelled: str = "") -> str:
    return (
        spelled or ", ".join(f"{count} of {name}" for name, count in sorted(counts.items(), key=str)) or "no MIG device"
    )


# What stands, as a configuration


def export_parted_file(subjects: Sequence[MigSubject], name: str) -> PartedFile:
    """Returns one configuration that describes all GPUs exactly, equal ones grouped, in as few entries as possible."""
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
