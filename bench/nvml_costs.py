"""NVML on this machine: seconds per call, and watts compared with the energy counter, idle and under load.

Run it on a machine with an otherwise unused GPU:

    python -m bench.nvml_costs --out DIR --load "python -m bench.cuda_load --seconds 60"

It only reads: a call that could change anything is refused before it reaches the
library. `nvml_costs.json` is the record; it names no device and no machine.
`--simulate PRODUCT` runs it on the simulated library. It has no target.
"""

import json
import math
import platform
import re
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import pairwise
from typing import Any

import click
import pynvml

from bench.runner import Options, benchmark
from eelgrid_agent.devices.nvml.device import NvmlDevice
from eelgrid_agent.devices.port import DeviceError, Missing, RawReadings
from eelgrid_agent.devices.process.remote_device import RemoteDevice
from eelgrid_agent.simulation.node import SimulatedNode
from eelgrid_agent.simulation.nvml_library import installed_library
from eelgrid_agent.simulation.spec import GpuLoad, GpuSpec, NodeSpec
from eelgrid_protos.messages import Reading

__all__ = ["Meter", "Refused", "energies", "main", "metered"]

SCHEMA = 1
SAMPLE_S = 0.05
SETTLE_S = 3.0
_KEPT_MOST = 20_000
# Events and activity samples are made and freed by whoever reads; everything else with these words changes a device.
_CHANGING = re.compile(r"Set|Create|Destroy|Reset|Clear|Modify|Freeze|Register|Inject|Discover|Remove|Add")
_HARMLESS = frozenset(
    {
        "nvmlEventSetCreate",
        "nvmlEventSetFree",
        "nvmlEventSetWait",
        "nvmlEventSetWait_v2",
        "nvmlDeviceRegisterEvents",
        "nvmlDeviceGetSupportedEventTypes",
        "nvmlGetSettings",
    }
)
_COLUMNS = {
    "power_w": Reading.POWER_W,
    "average_w": Reading.POWER_AVERAGE_W,
    "utilization": Reading.UTILIZATION_RATIO,
    "sm_clock_mhz": Reading.SM_CLOCK_MHZ,
    "temperature_c": Reading.TEMPERATURE_C,
    "event_reasons": Reading.EVENT_REASONS_MASK,
}


class Refused(Exception):
    """A call that could change a device was about to be made."""


class Meter:
    """Seconds and refusals of each call, by name."""

    def __init__(self) -> None:
        self._seconds: dict[str, list[float]] = {}
        self._errors: dict[str, dict[int, int]] = {}

    def timed(self, name: str, call: Callable[[], Any]) -> Any:
        """Makes the call and counts it."""
        begun = time.perf_counter()
        try:
            return call()
        except pynvml.NVMLError as error:
            codes = self._errors.setdefault(name, {})
            codes[error.value] = codes.get(error.value, 0) + 1
            raise
        finally:
            seconds = self._seconds.setdefault(name, [])
            if len(seconds) < _KEPT_MOST:
                seconds.append(time.perf_counter() - begun)

    def rows(self) -> list[dict[str, Any]]:
        """One row for each call, in microseconds; the first call of all often loads what the others find."""
        rows = []
        for name, seconds in sorted(self._seconds.items()):
            ordered = sorted(seconds)
            rows.append(
                {
                    "call": name,
                    "count": len(seconds),
                    "first_us": _us(seconds[0]),
                    "median_us": _us(statistics.median(ordered)),
                    "p95_us": _us(ordered[math.ceil(0.95 * len(ordered)) - 1]),
                    "max_us": _us(ordered[-1]),
                    "errors": {str(code): n for code, n in self._errors.get(name, {}).items()},
                }
            )
        return rows


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 2)


@contextmanager
def metered(meter: Meter) -> Iterator[None]:
    """The binding, timed and unable to change anything, for as long as the block runs."""
    before = {name: call for name, call in vars(pynvml).items() if name.startswith("nvml") and callable(call)}
    calls = {name: call for name, call in before.items() if not isinstance(call, type)}
    for name, call in calls.items():
        setattr(pynvml, name, _watched(meter, name, call))
    try:
        yield
    finally:
        for name, call in calls.items():
            setattr(pynvml, name, call)


def _watched(meter: Meter, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    changes = name not in _HARMLESS and _CHANGING.search(name.removeprefix("nvml")) is not None

    def watched(*arguments: Any, **options: Any) -> Any:
        if changes:
            raise Refused(f"{name} could change a device; this bench only reads")
        label = name
        if name == "nvmlDeviceGetFieldValues":
            asked = [one[0] if isinstance(one, tuple) else one for one in arguments[1]]
            label = f"{name}[{len(asked)} of {','.join(map(str, sorted(set(asked))))}]"
        return meter.timed(label, lambda: call(*arguments, **options))

    return watched


def port_costs(device: Any, uuids: Sequence[str], rounds: int) -> list[dict[str, Any]]:
    """The calls of the device port."""
    meter = Meter()
    for _ in range(rounds):
        meter.timed("read, all devices", lambda: [device.read(uuid) for uuid in uuids])
        for uuid in uuids:
            for name in ("read", "read_slow", "read_instances", "processes"):
                try:
                    meter.timed(name, partial(getattr(device, name), uuid))
                except DeviceError:
                    continue
    for _ in range(max(1, rounds // 10)):
        for name in ("gpus", "topology", "driver_version", "access", "take_events"):
            meter.timed(name, getattr(device, name))
    return meter.rows()


def child_costs(remote: RemoteDevice, rounds: int) -> list[dict[str, Any]]:
    """The same quick look through the worker's process."""
    meter = Meter()
    uuids = [gpu.uuid for gpu in remote.gpus()]
    for _ in range(rounds):
        meter.timed("looks, all devices", lambda: remote.read_gpus(uuids))
    return meter.rows()


def sampled(device: Any, uuid: str, seconds: float) -> list[dict[str, float | None]]:
    """Quick looks at one device; a reading that could not be had is null."""
    begun, due, rows = time.monotonic(), time.monotonic(), []
    while due - begun < seconds:
        look: RawReadings = device.read(uuid)
        row: dict[str, float | None] = {
            "t_s": round(time.monotonic() - begun, 6),
            "counter_j": _number(look.energy_counter_j),
        }
        rows.append(row | {name: _number(look.values[reading]) for name, reading in _COLUMNS.items()})
        due += SAMPLE_S
        time.sleep(max(0.0, due - time.monotonic()))
    return rows


def _number(value: Any) -> float | None:
    return None if isinstance(value, Missing) else value


def energies(rows: Sequence[dict[str, float | None]]) -> dict[str, float | None]:
    """Joules by the counter and by integrating power over the same span, and their ratio."""
    known: list[tuple[float, ...]] = []
    for row in rows:
        told = [value for name in ("t_s", "counter_j", "power_w") if (value := row[name]) is not None]
        if len(told) == 3:
            known.append(tuple(told))
    if len(known) < 2:
        return {"counter_j": None, "integrated_j": None, "ratio": None, "mean_w": None}
    integrated = sum((end - start) * (after + before) / 2.0 for (start, _, before), (end, _, after) in pairwise(known))
    counter, span = known[-1][1] - known[0][1], known[-1][0] - known[0][0]
    return {
        "counter_j": counter,
        "integrated_j": integrated,
        "ratio": integrated / counter if counter else None,
        "mean_w": counter / span if span else None,
    }


@contextmanager
def _load(command: str, node: SimulatedNode | None) -> Iterator[None]:
    """Something runs on the first device meanwhile."""
    if node is not None:
        node.set_load(node.devices[0].uuid, GpuLoad(utilization_ratio=1.0))
        yield
        return
    child = subprocess.Popen(shlex.split(command))
    try:
        time.sleep(SETTLE_S)
        if child.poll() is not None:
            raise SystemExit(f"--load: {command!r} ended at once with {child.returncode}; give one that runs longer")
        yield
    finally:
        if child.poll() is None:
            child.terminate()
        child.wait(30)


def record(options: Options, node: SimulatedNode | None) -> dict[str, Any]:
    """The whole record; raises DeviceError where there is no GPU."""
    meter, device = Meter(), NvmlDevice()
    gpus = device.gpus()
    uuids = [gpu.uuid for gpu in gpus]
    if not uuids:
        raise SystemExit("nvml_costs: the driver lists no GPU")
    # The port by itself first: watching each call of the binding costs a microsecond.
    port = port_costs(device, uuids, options.rounds)
    device.close()
    with metered(meter):
        port_costs(device, uuids, options.rounds)
        idle = sampled(device, uuids[0], options.seconds)
        phases = [{"phase": "idle", **energies(idle), "samples": idle}]
        if options.load or node is not None:
            with _load(options.load, node):
                loaded = sampled(device, uuids[0], options.seconds)
            phases.append({"phase": "loaded", **energies(loaded), "samples": loaded})
        slow = {reading.name.lower(): _number(value) for reading, value in device.read_slow(uuids[0]).items()}
        version = device.driver_version()
        device.close()
    child = []
    if node is None:
        remote = RemoteDevice("nvml")
        try:
            child = child_costs(remote, options.rounds)
        finally:
            remote.close()
    return {
        "schema": SCHEMA,
        "simulated": node is not None,
        "driver": version,
        "products": [gpu.product for gpu in gpus],
        "binding": pynvml.__name__,
        "python": platform.python_version(),
        "processor": platform.machine(),
        "rounds": options.rounds,
        "sample_s": SAMPLE_S,
        "calls": meter.rows(),
        "port": port,
        "child": child,
        "phases": phases,
        "slow": slow,
    }


@benchmark()
@click.option("--rounds", default=200)
@click.option("--seconds", default=20.0, help="length of each phase")
@click.option("--load", default="", help="a command that loads the first GPU; it is ended after the measurement")
@click.option("--simulate", default="", metavar="PRODUCT", help="eight simulated devices of this product")
def main(options: Options) -> int:
    """Writes the record and says the dearest calls."""
    node = None
    with ExitStack() as stack:
        if options.simulate:
            spec = NodeSpec(
                node_name="bench", cpu_milli=1000, memory_bytes=2**30, gpus=(GpuSpec(product=options.simulate),) * 8
            )
            node = SimulatedNode(spec, monotonic_ns=time.monotonic_ns, seed=1)
            stack.enter_context(installed_library(node))
        try:
            found = record(options, node)
        except DeviceError as error:
            sys.stderr.write(f"nvml_costs: {error}\n")
            return 1
    (options.out / "nvml_costs.json").write_text(json.dumps(found, indent=1) + "\n")
    dearest = sorted(found["calls"], key=lambda row: -row["median_us"])[:8]
    for row in (*found["port"], *found["child"], *dearest):
        print(f"{row['call']:60} {row['median_us']:10.1f} us median, {row['p95_us']:10.1f} us p95, n={row['count']}")
    for phase in found["phases"]:
        told = {name: round(value, 4) if isinstance(value, float) else value for name, value in phase.items()}
        print(told | {"samples": len(phase["samples"])})
    return 0


if __name__ == "__main__":
    sys.exit(main())
