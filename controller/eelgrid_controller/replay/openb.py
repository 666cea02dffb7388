"""The openb trace's CSV files as typed rows.

Owns the format: which columns a node list and a task list have, what their
cells may hold, and how a task becomes a request. Must not know where files
come from or who takes the rows. Units are converted here, once: the trace
counts memory in MiB.

Theory: the whole file is read before anything is used, and the first bad cell
refuses it, because a trace that lost a row silently gives numbers that nobody
can compare. The multigpu lists have the first five task columns only; what
they leave out is empty.

TraceError                  the trace, or the place it was looked for, is at fault
├── TraceMissing            no file there, or it cannot be read
├── TraceTooLarge           more bytes or rows than this program takes
└── TraceMalformed          a line or column that is not of the format
"""

import csv
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from eelgrid_protos.messages import ResourceRequest, SubmitWorkloadRequest, WorkloadKind, WorkloadSpec
from eelgrid_protos.quantities import GPU_MILLI_WHOLE, MIB

__all__ = [
    "FILE_BYTES_MOST", "NODES_MOST", "TASKS_MOST", "NodeRow", "TaskRow", "TraceError", "TraceMalformed",
    "TraceMissing", "TraceTooLarge", "read_nodes", "read_tasks", "submission",
]  # fmt: skip

FILE_BYTES_MOST = 256 * MIB
NODES_MOST = 100_000
TASKS_MOST = 1_000_000
_CPU_MILLI_MOST = 10_000_000
_MEMORY_MIB_MOST = 2**30
_GPUS_MOST = 64
_NAME_LONGEST = 128
_NODE_COLUMNS = ("sn", "cpu_milli", "memory_mib", "gpu", "model")
_TASK_COLUMNS = ("name", "cpu_milli", "memory_mib", "num_gpu", "gpu_milli")
# What the trace calls latency-sensitive is measured by latency here too.
_LATENCY_SENSITIVE = "LS"


class TraceError(ValueError):
    """A trace that cannot be used; the message names the place and the remedy."""

    def __init__(self, place: str, problem: str, remedy: str) -> None:
        self.place, self.problem, self.remedy = place, problem, remedy
        super().__init__(f"{place}: {problem}; {remedy}")


class TraceMissing(TraceError):
    """No trace where one was looked for."""


class TraceTooLarge(TraceError):
    """A trace beyond the bounds of this program."""


class TraceMalformed(TraceError):
    """A line or column that is not of the openb format."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRow:
    """One node of the trace; all its GPUs are of one model."""

    name: str
    cpu_milli: int
    memory_bytes: int
    gpu_count: int
    gpu_model: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskRow:
    """One task of the trace; several GPUs are whole ones, and no model means any."""

    name: str
    cpu_milli: int
    memory_bytes: int
    gpu_count: int
    gpu_milli: int
    gpu_models: tuple[str, ...] = ()
    qos: str = ""


@dataclass(frozen=True, slots=True)
class _Line:
    """One record with its place in the file, so that every complaint can name it."""

    path: Path
    number: int
    cells: Mapping[str, str]

    def complain(self, column: str, problem: str, remedy: str) -> TraceMalformed:
        return TraceMalformed(f"{self.path}, line {self.number}, column {column}", problem, remedy)

    def whole(self, column: str, most: int) -> int:
        text = self.cells[column].strip()
        # isascii: str.isdigit() alone lets through digits that int() refuses.
        if not (text.isascii() and text.isdigit() and len(text) <= 18):
            raise self.complain(column, f"holds {text!r}, not a whole number", f"write a number from 0 to {most}")
        number = int(text)
        if number > most:
            raise self.complain(column, f"holds {number}, more than {most}", "check the unit in the column's name")
        return number

    def name(self, column: str) -> str:
        text = self.cells[column].strip()
        if not text or len(text) > _NAME_LONGEST:
            raise self.complain(column, "is empty or too long", f"write a name of 1 to {_NAME_LONGEST} characters")
        return text


def read_nodes(path: Path) -> tuple[NodeRow, ...]:
    """The nodes of a node list, in its order."""
    return tuple(map(_node, _unique(_lines(path, _NODE_COLUMNS, NODES_MOST), "sn")))


def read_tasks(path: Path) -> tuple[TaskRow, ...]:
    """The tasks of a task list, in its order."""
    return tuple(map(_task, _unique(_lines(path, _TASK_COLUMNS, TASKS_MOST), "name")))


def _node(line: _Line) -> NodeRow:
    gpus, model = line.whole("gpu", _GPUS_MOST), line.cells["model"].strip()
    if bool(gpus) != bool(model):
        raise line.complain("model", f"is {model!r} with {gpus} GPUs", "name a model exactly where there are GPUs")
    return NodeRow(
        name=line.name("sn"),
        cpu_milli=line.whole("cpu_milli", _CPU_MILLI_MOST),
        memory_bytes=line.whole("memory_mib", _MEMORY_MIB_MOST) * MIB,
        gpu_count=gpus,
        gpu_model=model,
    )


def _task(line: _Line) -> TaskRow:
    gpus, share = line.whole("num_gpu", _GPUS_MOST), line.whole("gpu_milli", GPU_MILLI_WHOLE)
    if bool(gpus) != bool(share):
        raise line.complain("gpu_milli", f"is {share} with num_gpu {gpus}", "make both 0, or both more than 0")
    if gpus > 1 and share != GPU_MILLI_WHOLE:
        raise line.complain("gpu_milli", f"is {share} for each of {gpus} GPUs", "several GPUs are whole: write 1000")
    cpu_milli, memory_mib = line.whole("cpu_milli", _CPU_MILLI_MOST), line.whole("memory_mib", _MEMORY_MIB_MOST)
    if not (cpu_milli or memory_mib or gpus):
        raise line.complain("cpu_milli", "is 0, and so is all else: the task asks for nothing", "remove the line")
    models = [model.strip() for model in line.cells.get("gpu_spec", "").split("|") if model.strip()]
    if models and not gpus:
        raise line.complain("gpu_spec", f"names {models[0]} for a task without GPU", "empty it or set num_gpu")
    return TaskRow(
        name=line.name("name"),
        cpu_milli=cpu_milli,
        memory_bytes=memory_mib * MIB,
        gpu_count=gpus,
        gpu_milli=share,
        gpu_models=tuple(dict.fromkeys(models)),  # the published lists name some models twice
        qos=line.cells.get("qos", "").strip(),
    )


def _lines(path: Path, columns: tuple[str, ...], rows_most: int) -> Iterator[_Line]:
    """Every record of a file that has the columns; bounded in bytes and rows."""
    try:
        if path.stat().st_size > FILE_BYTES_MOST:
            raise TraceTooLarge(str(path), f"has over {FILE_BYTES_MOST >> 20} MiB", "give a shorter trace")
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise TraceMissing(str(path), error.strerror or "cannot be read", "check the path and its rights") from None
    except UnicodeDecodeError as error:
        raise TraceMalformed(f"{path}, byte {error.start}", "is not UTF-8", "save the file as UTF-8 CSV") from None
    reader = csv.reader(text.splitlines(), strict=True)
    try:
        header = [column.strip() for column in next(reader, [])]
        missing = [column for column in columns if column not in header]
        if missing:
            place = f"{path}, line 1, column {missing[0]}"
            raise TraceMalformed(place, "is missing", f"begin the file with {','.join(columns)}")
        for count, cells in enumerate(filter(None, reader), start=1):
            if count > rows_most:
                raise TraceTooLarge(f"{path}, line {reader.line_num}", f"is past {rows_most} rows", "split the file")
            if len(cells) != len(header):
                place = f"{path}, line {reader.line_num}, column {header[min(len(cells), len(header) - 1)]}"
                raise TraceMalformed(place, f"{len(cells)} cells under {len(header)} columns", "write a cell a column")
            yield _Line(path, reader.line_num, dict(zip(header, cells, strict=True)))
    except csv.Error as error:
        raise TraceMalformed(f"{path}, line {reader.line_num}", f"is no CSV ({error})", "quote the cell") from None


def _unique(lines: Iterable[_Line], column: str) -> Iterator[_Line]:
    """The same lines; a name that comes twice would make one submission swallow another."""
    seen: dict[str, int] = {}
    for line in lines:
        name = line.cells[column].strip()
        if name in seen:
            raise line.complain(column, f"repeats {name!r} of line {seen[name]}", "give each row its own name")
        seen[name] = line.number
        yield line
    if not seen:
        raise TraceMalformed("the trace", "has no row", "give a list with at least one row")


def submission(task: TaskRow, *, prefix: str = "") -> SubmitWorkloadRequest:
    """The request that places a task; its id is the task's name, so that repeating it is harmless."""
    return SubmitWorkloadRequest(
        workload_id=f"{prefix}{task.name}",
        spec=WorkloadSpec(
            name=task.name,
            kind=WorkloadKind.INFERENCE_SERVICE if task.qos == _LATENCY_SENSITIVE else WorkloadKind.BATCH_JOB,
            namespace="openb",
            queue=task.qos.lower(),
            request=ResourceRequest(
                cpu_milli=task.cpu_milli,
                memory_bytes=task.memory_bytes,
                gpu_count=task.gpu_count,
                gpu_milli=task.gpu_milli,
                gpu_models=task.gpu_models,
            ),
        ),
    )
