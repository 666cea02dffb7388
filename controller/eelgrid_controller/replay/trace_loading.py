"""Loads the trace that an option names: a folder or file of either format, or the openb trace, found or generated.

A folder with nodes.csv and tasks.csv is in our own format (docs/reference/trace-format.md); otherwise it is one of openb lists. A file
is a task list, ours if it has arrival_s or gpus among its columns; its nodes are beside it or named.

Order for `auto`: EELGRID_DATA, shared data beside the checkout (../shared/data as seen from the current directory and
from the project), the cache, a download, and last the generator. Every failed step leaves a note, and the result says
which source it is: a generated trace never passes for the published one. A download is trusted for its SHA-256 alone;
the address names one commit. A file on disk is the user's own and may differ; then a note says so. The network and the
environment are arguments, so that every path can be tested without either.

The generator restates the counts of marginals.json exactly, so capacity, demand, the size of every class and the mix of
models equal the published trace's; only the order of arrival is drawn from the seed. Quality-of-service classes are
left out.
"""

import hashlib
import json
import os
import random
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from importlib import resources
from pathlib import Path
from typing import NamedTuple

from eelgrid_controller.replay import openb, site_csv
from eelgrid_controller.replay.csv_reader import TraceMissing, read_header
from eelgrid_controller.replay.openb import NODE_LIST, TraceNode, TraceTask, task_list_name
from eelgrid_protos import catalogue
from eelgrid_protos.quantities import MIB

SYNTHESIS_SEED = 42


def synthesize_openb(seed: int = SYNTHESIS_SEED) -> tuple[tuple[TraceNode, ...], tuple[TraceTask, ...]]:
    """All 1,213 nodes and 8,152 tasks, named as in the trace, in an order drawn from the seed."""
    marginals = json.loads(resources.files(__package__).joinpath("marginals.json").read_text("utf-8"))
    order = random.Random(seed)  # noqa: S311 - a shuffle, not a secret
    shapes = [shape for count, *shape in marginals["nodes"] for _ in range(count)]
    classes = [task for count, *task in marginals["tasks"] for _ in range(count)]
    order.shuffle(shapes)
    order.shuffle(classes)
    nodes = tuple(
        TraceNode(
            name=f"openb-node-{index:04d}",
            cpu_milli=cpu_milli,
            memory_bytes=memory_mib * MIB,
            gpu_count=gpus,
            gpu_model=model,
        )
        for index, (cpu_milli, memory_mib, gpus, model) in enumerate(shapes)
    )
    tasks = tuple(
        TraceTask(
            name=f"openb-pod-{index:04d}",
            cpu_milli=cpu_milli,
            memory_bytes=memory_mib * MIB,
            gpu_count=gpus,
            gpu_milli=gpu_milli,
        )
        for index, (cpu_milli, memory_mib, gpus, gpu_milli) in enumerate(classes)
    )
    return nodes, tasks


_HOME = (
    "https://raw.githubusercontent.com/hkust-adsl/kubernetes-scheduler-simulator/"
    "8f3d6417353c5083c6d56617f255fadd8dc306bc/data/csv/"
)
_DOWNLOAD_BYTES_MOST = 16 * 1024 * 1024
_TIMEOUT_S = 10.0

# SHA-256 of the files at that commit, as they are published.
DIGESTS: Mapping[str, str] = {
    "openb_node_list_all_node.csv": "5a85c2af79c66a1efff8bbcbda430400aae56d8431370d738480967e1a9c6b15",
    "openb_node_list_gpu_node.csv": "2beca64b4d3dfa342036a34b56a495c6cef9225db836c81f541282cb1df320b5",
    "openb_pod_list_cpu037.csv": "8ed554026d041b15ff21ddc104d9a21dbd9a93c496262fa23ef7b5be27e220dc",
    "openb_pod_list_cpu050.csv": "747f43247bffc2b0bb081d7f61f0705ca8d390dafc0b647e642c92f3baf3ba1e",
    "openb_pod_list_cpu072.csv": "f8a2b031461b54d7b9f06d55473c2371eb3357b78a255c646bdca5e0833a8a2f",
    "openb_pod_list_cpu100.csv": "bec1c33fbdde61fd463877534ec79b393aec73e1cbb22d55fab9f166ac480982",
    "openb_pod_list_cpu200.csv": "b7e9d8a1a601da84d6e0b4110b19ef5001be5e4796d33e7b82f166ba95161f87",
    "openb_pod_list_cpu235.csv": "87bebd4d012faa8305ce1fd82737f51cf03361aac28b75d42e34aa656d7f4ee0",
    "openb_pod_list_cpu250.csv": "134c21ff96d57533df8a37b67632972884fec9396e77cd0898ddc370cc8e607d",
    "openb_pod_list_cpu300.csv": "76528825f40ee662cb098b3b6e683c1efd9f87a0c8af7e628df1f32c639636d1",
    "openb_pod_list_default.csv": "1ee7ed79c27a3b0861cda8ddba86a004c6aba904caafa329a76ae93ca63834a8",
    "openb_pod_list_gpushare100.csv": "12dbc07d6a49bf8641e2275a2ff5bf7be74b5df7d148d531e135b140b95f9a3d",
    "openb_pod_list_gpushare20.csv": "9be2d0efb52e242c32e23dd184cc5fcc1983478c6c9c02cbb6b4b62925c0ffcd",
    "openb_pod_list_gpushare40.csv": "d83ce79a4eb6987524bedbb0c65e41aed3a36bf6c1b78b86234c3687a07e1d40",
    "openb_pod_list_gpushare60.csv": "d31809628128a1f24491086eda4af3e23882b9213d3ef57a56ee2d1af69492fe",
    "openb_pod_list_gpushare80.csv": "88b6649369ced40d0fde287d2498ea61ff4b05fccba8bdc95daf6042f2f8431e",
    "openb_pod_list_gpuspec05.csv": "8f1c0ef7e4e511e982bd2818898ba22ee6d273bf5fce124b7ace285b5928cf4e",
    "openb_pod_list_gpuspec10.csv": "2dc7e4cb9480484f08539720b433a9ec9ab5d76b396f3f7557c53a2ff78a7611",
    "openb_pod_list_gpuspec20.csv": "6b9b89ab8913c1c074e994e98f548cf1a872fc5f76f2442ca8cd514a478b00a9",
    "openb_pod_list_gpuspec25.csv": "9d030679a2ccd7e27a7ec9ff15baff34480d22a0012515691fc187e3f35ee68c",
    "openb_pod_list_gpuspec33.csv": "eca4f746db1e5b25864ad021b55ece3943e101a3ebd4574d09dcb95c46117652",
    "openb_pod_list_multigpu20.csv": "d9ec6f6c74fb980cc0b81239470c6353fceea077ea9abd610003b604c7cc2b01",
    "openb_pod_list_multigpu30.csv": "a5e479c6444b1d83eef848159cf00c3cfa13441b2d1e2c113c391b91f1cc5b11",
    "openb_pod_list_multigpu40.csv": "32c9e8731ca07ef96108aa65f2a289bb9aacb47f642ed9e3789f99b242df60eb",
    "openb_pod_list_multigpu50.csv": "206f2f5959db30ecb7c44e7f13197c8ec50b7a35558ad3777cc3662ef0fe5373",
}

# Bytes behind an address, at most `most` of them; raises OSError.
FetchUrl = Callable[[str, int], bytes]


class TraceSource(Enum):
    """Where a trace came from; the value is what reports print."""

    LOCAL = "files on this machine"
    CACHED = "cached download"
    DOWNLOADED = "downloaded from its public home"
    GENERATED = "generated from the published marginals"


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenbTrace:
    """Nodes and tasks, where they came from, and what was tried before."""

    nodes: tuple[TraceNode, ...]
    tasks: tuple[TraceTask, ...]
    source: TraceSource
    where: str
    notes: tuple[str, ...] = ()

    def truncated(self, *, nodes: int | None, tasks: int | None) -> "OpenbTrace":
        """A smaller trace: nodes taken evenly over the list, tasks from its front.

        With a node limit alone the tasks shrink in proportion, so that the load stays what it was.
        """
        kept = sample_nodes_evenly(self.nodes, nodes)
        most = tasks if tasks is not None else -(-len(self.tasks) * len(kept) // len(self.nodes))
        return OpenbTrace(
            nodes=kept,
            tasks=self.tasks[:most],
            source=self.source,
            where=self.where,
            notes=self.notes,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceSearch:
    """What the search may look at; `fetch` is None where the network is out of bounds."""

    environment: Mapping[str, str]
    directory: Path
    project: Path
    cache: Path
    fetch: FetchUrl | None

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> "TraceSearch":
        """The surroundings on this machine."""
        cache = Path(environment.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "eelgrid"
        project = Path(__file__).resolve().parents[3]
        return cls(environment=environment, directory=Path.cwd(), project=project, cache=cache, fetch=fetch_url)


def fetch_url(address: str, most: int) -> bytes:
    """The bytes at an HTTPS address; raises OSError, also where there are more than `most`."""
    with urllib.request.urlopen(address, timeout=_TIMEOUT_S) as answer:  # noqa: S310 - callers pass https only
        data: bytes = answer.read(most + 1)
    if len(data) > most:
        raise OSError(f"more than {most} bytes")
    return data


def locate_openb(
    choice: str, surroundings: TraceSearch, *, tasks: str = "default", seed: int = SYNTHESIS_SEED
) -> OpenbTrace:
    """The trace for `auto`, `generated` or a directory; raises TraceError.

    Only `auto` looks further when one place has nothing; a directory that was named must have it.
    """
    if choice == "generated":
        return _generate_trace(tasks, seed, ())
    wanted = (NODE_LIST, task_list_name(tasks))
    if choice != "auto":
        folder = _folder_with(wanted, Path(choice))
        if folder is None:
            raise TraceMissing(choice, f"has no {wanted[0]} and {wanted[1]}", "name the folder that holds both files")
        return _read(folder, wanted, TraceSource.LOCAL, ())
    notes: list[str] = []
    for place in _places(surroundings):
        folder = _folder_with(wanted, place)
        if folder is not None:
            return _read(folder, wanted, TraceSource.LOCAL, tuple(notes))
        if str(place) == surroundings.environment.get("EELGRID_DATA"):
            notes.append(f"EELGRID_DATA={place} has no {wanted[1]}")
    source = _fill_cache(wanted, surroundings, notes)
    if source is not None:
        return _read(surroundings.cache / "openb", wanted, source, tuple(notes))
    return _generate_trace(tasks, seed, tuple(notes))


def _places(surroundings: TraceSearch) -> Iterator[Path]:
    if named := surroundings.environment.get("EELGRID_DATA"):
        yield Path(named)
    for root in (surroundings.directory, surroundings.project):
        yield root / ".." / "shared" / "data"


def _folder_with(wanted: tuple[str, ...], place: Path) -> Path | None:
    """The folder at or under `place` that holds all files."""
    for folder in (place, place / "openb" / "csv", place / "csv"):
        if all((folder / name).is_file() for name in wanted):
            return folder
    return None


def _read(folder: Path, wanted: tuple[str, str], source: TraceSource, notes: tuple[str, ...]) -> OpenbTrace:
    changed = [name for name in wanted if _digest((folder / name).read_bytes()) != DIGESTS.get(name)]
    return OpenbTrace(
        nodes=openb.read_nodes(folder / wanted[0]),
        tasks=openb.read_tasks(folder / wanted[1]),
        source=source,
        where=min(str(folder.resolve()), os.path.relpath(folder), key=len),
        notes=(*notes, *(f"{name} is not byte for byte the published file" for name in changed)),
    )


def _generate_trace(tasks: str, seed: int, notes: tuple[str, ...]) -> OpenbTrace:
    if tasks != "default":
        raise TraceMissing(task_list_name(tasks), "is not at hand", "only `default` can be generated: set EELGRID_DATA")
    nodes, rows = synthesize_openb(seed)
    where = f"seed {seed}"
    return OpenbTrace(nodes=nodes, tasks=rows, source=TraceSource.GENERATED, where=where, notes=notes)


def _fill_cache(wanted: tuple[str, ...], surroundings: TraceSearch, notes: list[str]) -> TraceSource | None:
    """Brings the files into the cache where they are not yet; None, with a note, where that fails."""
    source = TraceSource.CACHED
    folder = surroundings.cache / "openb"
    for name in wanted:
        path = folder / name
        expected = DIGESTS.get(name)
        if expected is None:
            notes.append(f"{name} is not among the published lists")
            return None
        try:
            if path.is_file() and _digest(path.read_bytes()) == expected:
                continue
            if surroundings.fetch is None:
                return None
            data = surroundings.fetch(_HOME + name, _DOWNLOAD_BYTES_MOST)
            if _digest(data) != expected:
                notes.append(f"the download of {name} has another SHA-256 than the published file")
                return None
            folder.mkdir(parents=True, exist_ok=True)
            # Written aside and renamed: a reader never sees half a file.
            aside = path.with_suffix(".part")
            aside.write_bytes(data)
            aside.replace(path)
        except (OSError, ValueError) as error:
            reason = getattr(error, "reason", None) or error
            notes.append(f"no download of {name}: {reason}")
            return None
        source = TraceSource.DOWNLOADED
    return source


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


class LoadedTrace(NamedTuple):
    """The rows of a trace, what to call it, where it lies and what there is to say about it."""

    name: str
    nodes: tuple[TraceNode, ...]
    tasks: tuple[TraceTask, ...]
    where: str
    notes: tuple[str, ...] = ()

    @property
    def timed(self) -> bool:
        """Whether every task has a time of arrival."""
        return all(task.arrival_s is not None for task in self.tasks)


def find_trace(choice: str, listed: str, nodes: Path | None, surroundings: TraceSearch) -> LoadedTrace:
    """The trace for `auto`, `generated`, a folder or a task list; raises TraceError."""
    place = Path(choice)
    if choice not in {"auto", "generated"}:
        if place.is_file():
            return _of_file(place, nodes)
        if not place.is_dir():
            raise TraceMissing(
                choice, "is neither a folder nor a file", "name a task list, or the folder that holds both files"
            )
        if (place / site_csv.NODES).is_file() and (place / site_csv.TASKS).is_file():
            return _of_file(place / site_csv.TASKS, nodes)._replace(name=place.resolve().name)
    found = locate_openb(choice, surroundings, tasks=listed)
    rows = found.nodes if nodes is None else read_nodes(nodes)
    return LoadedTrace(listed, rows, found.tasks, f"{found.source.value} ({found.where})", found.notes)


def _of_file(path: Path, nodes: Path | None) -> LoadedTrace:
    before, after = task_list_name("*").split("*")
    name = path.name.removeprefix(before).removesuffix(after).removesuffix(".csv")
    found = read_nodes(_beside(path, nodes))
    return LoadedTrace(name, found, site_csv.resolve_task_models(read_tasks(path), found, path), str(path))


def _beside(path: Path, nodes: Path | None) -> Path:
    """The node list of a task list."""
    if nodes is not None:
        return nodes
    for name in (site_csv.NODES, NODE_LIST):
        if (path.parent / name).is_file():
            return path.parent / name
    raise TraceMissing(str(path), f"has no {site_csv.NODES} or {NODE_LIST} beside it", "name its nodes with --nodes")


def read_nodes(path: Path) -> tuple[TraceNode, ...]:
    """A node list of either format."""
    return (
        openb.read_nodes(path) if "sn" in read_header(path) else site_csv.read_nodes(path, catalogue.load_catalogue())
    )


def read_tasks(path: Path) -> tuple[TraceTask, ...]:
    """A task list of either format."""
    titles = read_header(path)
    if "gpus" in titles or "arrival_s" in titles:
        return site_csv.read_tasks(path)
    return openb.read_tasks(path)


def sample_nodes_evenly(nodes: Sequence[TraceNode], most: int | None) -> tuple[TraceNode, ...]:
    """At most so many nodes, taken evenly over the list."""
    kept = min(most or len(nodes), len(nodes))
    return tuple(nodes[index * len(nodes) // kept] for index in range(kept))
