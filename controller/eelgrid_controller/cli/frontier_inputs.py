"""What `eelctl frontier` computes from: measured points in CSV, services and fleet in YAML, or the running fleet.

Owns the formats of the two files (docs/how-to/frontier.md): an error names the line and column, or the field, and what
to write instead. Of the running fleet those services count that run with a promise, and the GPUs that they or nobody
hold; and training jobs of which anything was measured, with theirs. These GPUs may be partitioned whatever their MIG
mode is now. Must not know what is computed.
"""

import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from eelgrid_controller.cli.connection import RequestRefused, fetch_whole, iterate_pages, read_yaml_file
from eelgrid_controller.placement.power import PriorPowerModel
from eelgrid_controller.profiles.points import Configuration, Point
from eelgrid_controller.replay.csv_reader import CsvLine, read_lines
from eelgrid_controller.state.measurements import make_job_profile_name, make_profile_point
from eelgrid_controller.state.mig_layouts import find_mig_geometry
from eelgrid_controller.state.node_allocations import is_sliced
from eelgrid_controller.whatif.frontier import (
    POINTS_MOST,
    FrontierPool,
    FrontierService,
    FrontierTraining,
    is_measured_on,
)
from eelgrid_controller.whatif.slice_layouts import find_slice_problem
from eelgrid_protos.catalogue import (
    GpuNameError,
    is_canonical_model,
    load_catalogue,
    resolve_gpu_model,
    resolve_product,
)
from eelgrid_protos.catalogue.products import MigGeometry, Product
from eelgrid_protos.messages import (
    GpuStatus,
    LatencyMetric,
    ListGpusRequest,
    ListPointsRequest,
    ListPromisesRequest,
    ListWorkloadsRequest,
    NodeState,
    Workload,
    WorkloadPhase,
)

_NEEDED = ("workload", "gpu_model", "throughput_hz")
_OTHERS = (
    "mig_profile",
    "gpus",
    "batch",
    "processes",
    "power_limit_w",
    "power_w",
    "latency_p50_s",
    "latency_p95_s",
    "latency_p99_s",
    "source",
)
COLUMNS = (*_NEEDED, *_OTHERS)
_QUANTILES = {"latency_p50_s": 0.5, "latency_p95_s": 0.95, "latency_p99_s": 0.99}
_WHOLE_MOST = 1_000_000
_YAML_BYTES_MOST = 1 << 20
# Wider than csv_lines': measured values come with all digits of a float.
_NUMBER = re.compile(r"(\d+\.?\d*|\.\d+)([eE][+-]?\d{1,3})?", re.ASCII)


def _amount(line: CsvLine, column: str, most: float) -> float | None:
    """Reads a number above 0, None for an empty cell; raises TraceError."""
    text = line.text(column)
    if not text:
        return None
    number = float(text) if len(text) <= 40 and _NUMBER.fullmatch(text) else math.nan
    if not 0.0 < number <= most:
        remedy = f"write a number above 0, at most {most:g}, or leave it empty if not measured"
        raise line.cell_error(column, f"is {text!r}", remedy)
    return number


def _count(line: CsvLine, column: str) -> int:
    """Reads a whole number from 1, 1 for an empty cell; raises TraceError."""
    if not line.text(column):
        return 1
    number = line.whole(column, _WHOLE_MOST)
    if number < 1:
        raise line.cell_error(column, "is 0", "write 1 or more, or leave it empty for 1")
    return number


def _model(line: CsvLine, reported: Collection[str]) -> str:
    """Reads a GPU model by any of its names; one that fits nothing keeps its own."""
    try:
        return resolve_gpu_model(line.name("gpu_model"), "gpu_model", reported=reported, keeps_unknown=True)
    except GpuNameError as error:
        raise line.cell_error("gpu_model", error.problem, error.remedy) from None


def _point(line: CsvLine, reported: Collection[str]) -> Point:
    throughput_hz = _amount(line, "throughput_hz", 1e12)
    if throughput_hz is None:
        raise line.cell_error("throughput_hz", "is empty", "write the throughput, or remove the line")
    latency_s: dict[float, float] = {}
    for column, quantile in _QUANTILES.items():
        value_s = _amount(line, column, 1e6)
        if value_s is not None:
            if value_s < max(latency_s.values(), default=0.0):
                raise line.cell_error(column, f"is {value_s:g}, less than a lower quantile", "correct one of the two")
            latency_s[quantile] = value_s
    configuration = Configuration(
        gpu_model=_model(line, reported),
        mig_profile=line.text("mig_profile"),
        gpus=_count(line, "gpus"),
        batch=_count(line, "batch"),
        processes=_count(line, "processes"),
        power_limit_w=_amount(line, "power_limit_w", 1e5),
    )
    return Point(
        line.name("workload"),
        configuration,
        throughput_hz,
        latency_s,
        power_w=_amount(line, "power_w", 1e7),
        source=line.text("source"),
    )


@cache
def _find_product(model: str) -> Product | None:
    """Returns the catalogue's product of a model by its canonical name; None for an unknown one."""
    return resolve_product(model, "gpu_model") if is_canonical_model(model) else None


def _check_slice(line: CsvLine, point: Point) -> None:
    """Raises TraceError if the point's slice does not exist on a model of the catalogue."""
    where = point.configuration
    product = _find_product(where.gpu_model)
    if not where.mig_profile or product is None:
        return
    problem = find_slice_problem(where, product.mig)
    if problem is not None:
        raise line.cell_error(problem.field, f"is {line.text(problem.field)}: {problem.problem}", problem.remedy)


def read_points(path: Path, reported: Collection[str] = (), *, checks_slices: bool = False) -> tuple[Point, ...]:
    """Reads the points of a CSV file; raises TraceError with line, column and remedy.

    reported: GPU models of the fleet, which may be unknown to the catalogue.
    checks_slices: refuse MIG profiles that a model of the catalogue does not have.
    """
    found = []
    for line in read_lines(path, _NEEDED, POINTS_MOST, others=_OTHERS):
        found.append(_point(line, reported))
        if checks_slices:
            _check_slice(line, found[-1])
    if not found:
        raise RequestRefused(
            f"{path}: contains no point", f"write one line per point below the header {','.join(COLUMNS)}"
        )
    return tuple(found)


def _fields(value: Any, place: str, needed: tuple[str, ...], others: tuple[str, ...] = ()) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise RequestRefused(f"{place}: is not a mapping", f"write {', '.join(f'{name}:' for name in needed)}")
    for name in needed:
        if name not in value:
            raise RequestRefused(f"{place}: {name} is missing", f"write `{name}:`")
    for name in value:
        if name not in needed + others:
            raise RequestRefused(
                f"{place}: {name} is unknown", f"remove it, or write one of {', '.join(needed + others)}"
            )
    return value


def _number(value: Any, place: str, remedy: str) -> float:
    # YAML 1.1 reads 1e3 as text, so a numeric text counts as a number.
    if isinstance(value, str) and _NUMBER.fullmatch(value):
        value = float(value)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0.0 <= value <= 1e12:
        raise RequestRefused(f"{place}: is {value!r}", remedy)
    return float(value)


def _service(value: Any, place: str) -> FrontierService:
    fields = _fields(value, place, ("name", "workload", "rate_hz", "quantile"))
    name, workload = _names(fields, place)
    rate_hz = _number(fields["rate_hz"], f"{place}: rate_hz", "write requests per second, above 0, for example 12.5")
    quantile = fields["quantile"]
    if not isinstance(quantile, float) or quantile not in _QUANTILES.values():
        raise RequestRefused(f"{place}: quantile is {quantile!r}", "write 0.5, 0.95 or 0.99")
    if rate_hz == 0.0:
        raise RequestRefused(f"{place}: rate_hz is 0", "write requests per second, or leave the service out")
    return FrontierService(name, workload, rate_hz, quantile)


def _training(value: Any, place: str) -> FrontierTraining:
    fields = _fields(value, place, ("name", "workload", "rate_hz"))
    name, workload = _names(fields, place)
    rate_hz = _number(fields["rate_hz"], f"{place}: rate_hz", "write steps, images or samples per second, above 0")
    if rate_hz == 0.0:
        raise RequestRefused(f"{place}: rate_hz is 0", "write work per second, or leave the training out")
    return FrontierTraining(name, workload, rate_hz)


def _names(fields: Mapping[str, Any], place: str) -> tuple[str, str]:
    for key in ("name", "workload"):
        if not isinstance(fields[key], str) or not 0 < len(fields[key]) <= 128:
            raise RequestRefused(
                f"{place}: {key} is {fields[key]!r}", "write a name of 1 to 128 characters, quoted if a number"
            )
    return fields["name"], fields["workload"]


_IDLE_FIELDS = ("idle_w", "idle_mig_w")


def _gpus(model: Any, value: Any, path: Path) -> tuple[str, FrontierPool]:
    """Reads a model and its GPUs; one whose watts are written keeps the name that it has in the file."""
    place = f"{path}: fleet: {model}"
    fields = _fields(value, place, ("gpus",), _IDLE_FIELDS) if isinstance(value, Mapping) else {"gpus": value}
    count = fields["gpus"]
    if isinstance(count, bool) or not isinstance(count, int) or count < 0:
        raise RequestRefused(f"{place}: gpus is {count!r}", "write the number of GPUs, for example 8")
    given_w = {
        name: _number(fields[name], f"{place}: {name}", "write the idle power of one GPU in watts")
        for name in _IDLE_FIELDS
        if name in fields
    }
    product = _find_product(str(model))
    if "idle_w" not in given_w:
        try:
            product = resolve_product(str(model), "model")
        except GpuNameError as error:
            raise RequestRefused(
                f"{place}: {error.problem}", f"{error.remedy}. Or write {{gpus: {count}, idle_w: WATTS}}"
            ) from None
    name = str(model) if product is None or "idle_w" in given_w else product.model
    idle_w = given_w.get("idle_w", 0.0 if product is None else product.idle_w)
    idle_mig_w = given_w.get("idle_mig_w", _idle_mig_w(product, idle_w))
    return name, FrontierPool(count, idle_w, None if product is None else product.mig, idle_mig_w)


def _idle_mig_w(product: Product | None, idle_w: float) -> float:
    """Returns what an idle GPU draws with MIG on: as the catalogue has it, and not less than without."""
    return max(idle_w, 0.0 if product is None else product.idle_mig_w or 0.0)


class DescribedFleet(NamedTuple):
    """What a fleet has to serve and to train, and its GPUs by model."""

    services: tuple[FrontierService, ...]
    training: tuple[FrontierTraining, ...]
    pools: Mapping[str, FrontierPool]
    notes: tuple[str, ...] = ()  # what has to change before the fleet can be as it is planned


def read_services(path: Path) -> DescribedFleet:
    """Reads services, training and fleet from a YAML file; raises RequestRefused with the field and the remedy."""
    fields = _fields(read_yaml_file(path, _YAML_BYTES_MOST), str(path), ("services", "fleet"), ("training",))
    listed, trained, fleet = fields["services"], fields.get("training", []), fields["fleet"]
    if not isinstance(trained, list):
        raise RequestRefused(f"{path}: training is not a list", "write `- name: ...` for each kind of job")
    if not isinstance(listed, list) or not listed:
        raise RequestRefused(f"{path}: services is not a list", "write `- name: ...` for each service")
    if not isinstance(fleet, Mapping) or not fleet:
        raise RequestRefused(
            f"{path}: fleet is not a mapping", "write the number of GPUs of each model, for example H200: 8"
        )
    services = tuple(_service(value, f"{path}: service {number}") for number, value in enumerate(listed, 1))
    training = tuple(_training(value, f"{path}: training {number}") for number, value in enumerate(trained, 1))
    pools: dict[str, FrontierPool] = {}
    for name, value in fleet.items():
        model, pool = _gpus(name, value, path)
        if model in pools:
            raise RequestRefused(f"{path}: fleet: {name}: is {model}, which is there already", "write it once")
        pools[model] = pool
    return DescribedFleet(services, training, pools)


def _running_service(workload: Workload, arrived_hz: float | None, factor: float) -> FrontierService | None:
    promise = workload.spec.service
    if promise is None or not promise.objectives:
        return None
    is_tokens = promise.objectives[0].metric is not LatencyMetric.RESPONSE
    rate_hz = factor * (arrived_hz or promise.rate_hz) * (promise.output_tokens if is_tokens else 1.0)
    if rate_hz <= 0.0:
        return None
    return FrontierService(workload.workload_id, promise.profile, rate_hz, promise.objectives[0].quantile)


def _running_job(
    workload: Workload, points: Mapping[str, Sequence[Point]], models: Mapping[str, str]
) -> FrontierTraining | None:
    """Returns a training job at the least rate that its promise allows; None if nothing of it was measured on its GPUs.

    models: of the GPUs that are ready.
    """
    promise = workload.spec.training
    uuids = [uuid for place in workload.placements for uuid in place.gpu_uuids]
    on = {models.get(uuid, "") for uuid in uuids}
    if promise is None or len(on) != 1 or "" in on:
        return None
    runs_on = next(iter(on)), len(uuids)
    for profile in (make_job_profile_name(workload.workload_id), promise.profile):
        rates_hz = [one.throughput_hz for one in points.get(profile, ()) if is_measured_on(one, runs_on)]
        if rates_hz:
            rate_hz = max(rates_hz) / (1.0 + (promise.slowdown_most or 0.0))
            if promise.deadline_ns > workload.placed_ns:
                rate_hz = min(rate_hz, promise.work * 1e9 / (promise.deadline_ns - workload.placed_ns))
            return FrontierTraining(workload.workload_id, profile, rate_hz, runs_on)
    return None


def _is_ready(gpu: GpuStatus) -> bool:
    return gpu.node_state is NodeState.READY and not gpu.gpu.lost


def _fleet(gpus: Sequence[GpuStatus]) -> Mapping[str, FrontierPool]:
    """Returns the GPUs by model; those of a model can be partitioned if all can in the same way."""
    power, products = PriorPowerModel(load_catalogue()), load_catalogue().products
    found: dict[str, FrontierPool] = {}
    for one in gpus:
        model, idle_w = one.gpu.model, power.gpu(one.gpu).idle_w
        geometry: MigGeometry | None = find_mig_geometry(one.gpu)
        before = found.get(model)
        if before is not None and before.geometry != geometry:
            geometry = None
        idle_mig_w = _idle_mig_w(products.get(one.gpu.catalogue_key), idle_w)
        found[model] = FrontierPool(1 if before is None else before.count + 1, idle_w, geometry, idle_mig_w)
    return found


def _list_slice_notes(
    gpus: Sequence[GpuStatus],
    workloads: Sequence[Workload],
    points: Mapping[str, Sequence[Point]],
    fleet: Mapping[str, FrontierPool],
) -> Iterator[str]:
    """Yields what has to change before services run on slices: how they were submitted, and the MIG mode of GPUs."""
    usable: set[str] = set()
    for workload in workloads:
        promise = workload.spec.service
        measured = [one.configuration for one in points.get(promise.profile, ())] if promise is not None else []
        models = {
            one.gpu_model
            for one in measured
            if one.mig_profile
            and one.gpu_model in fleet
            and find_slice_problem(one, fleet[one.gpu_model].geometry) is None
        }
        usable |= models
        if models and not is_sliced(workload):
            yield f"{workload.workload_id}: runs on slices only if it is submitted with `slices: true`"
    for model in sorted(usable):
        modes = [one.gpu.mig_enabled for one in gpus if one.gpu.model == model]
        geometry = fleet[model].geometry
        takes_reset = geometry is not None and geometry.reset_to_change_mode
        reset = "; to change it, the GPU is reset" if takes_reset else ""
        yield f"{model}: MIG mode is on for {sum(modes)} of {len(modes)} GPUs now{reset}"


def read_running_fleet(
    client: Any, *, timeout_s: float, factor: float = 1.0
) -> tuple[tuple[Point, ...], DescribedFleet]:
    """Reads points, services at `factor` times their rates, training jobs, and GPUs that are theirs or free.

    Raises RequestRefused.
    """
    told = iterate_pages(client.list_points, ListPointsRequest(), "points", timeout_s=timeout_s)
    points = tuple(map(make_profile_point, told))
    if not points:
        raise RequestRefused(
            "the controller has no measured point", "import measurements with eelctl profile import FILE"
        )
    request = ListWorkloadsRequest(phases=(WorkloadPhase.PLACED,))
    workloads = list(iterate_pages(client.list_workloads, request, "workloads", timeout_s=timeout_s))
    known = fetch_whole(client.list_promises, ListPromisesRequest(), timeout_s=timeout_s)
    arrived_hz = {one.workload_id: one.arrived_hz for one in known.services}
    found = [_running_service(one, arrived_hz.get(one.workload_id), factor) for one in workloads]
    services = tuple(one for one in found if one is not None)
    if not services:
        raise RequestRefused(
            "no running service has an objective and a rate",
            "submit one with objectives and rate_hz: docs/how-to/promises.md",
        )
    gpus = list(iterate_pages(client.list_gpus, ListGpusRequest(), "gpus", timeout_s=timeout_s))
    models = {one.gpu.uuid: one.gpu.model for one in gpus if _is_ready(one)}
    by_profile: dict[str, list[Point]] = {}
    for point in points:
        by_profile.setdefault(point.workload, []).append(point)
    jobs = [_running_job(one, by_profile, models) for one in workloads]
    training = tuple(job for job in jobs if job is not None)
    counted = {service.name for service in services} | {job.name for job in training}
    theirs = [one for one in gpus if _is_ready(one) and set(one.workload_ids) <= counted]
    fleet = _fleet(theirs)
    # One that shares its GPUs with what is not counted has none here.
    training = tuple(job for job in training if job.runs_on is not None and job.runs_on[0] in fleet)
    asked = [one for one in workloads if one.workload_id in counted]
    notes = tuple(_list_slice_notes(theirs, asked, by_profile, fleet))
    return points, DescribedFleet(services, training, fleet, notes)
