"""nvitop's exporter with the simulated NVML library in one process, without any other code of Eelgrid.

    PYTHON bench/peer_exporter.py FLEET INTERVAL_S METER [the exporter's own flags]

PYTHON has `nvitop-exporter` installed; FLEET is a fleet file of one node; METER
is where calls to the library are counted, or `-`. The library stands under that
interpreter's own pynvml, so that the exporter and its binding are what their
author wrote. Below a quarter of a second its command line refuses the interval,
so its exporter is given it past that.

What this exporter asks and our agent never does is no part of the simulated
library, and is added here: it answers at once, though PCIe throughput takes a
real driver 20 ms for each direction.
"""

import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
_SAMPLING_US = 20_000
_CUDA_VERSION = 13_000


def _unasked_by_us() -> dict[str, Any]:
    from eelgrid_agent.simulation.nvml_handles import write_number

    def engine(_handle: Any, ratio: Any, period: Any) -> int:
        return write_number(ratio, 0) or write_number(period, _SAMPLING_US)

    def throughput(_handle: Any, _counter: Any, value: Any) -> int:
        return write_number(value, 0)

    def no_fan(_handle: Any, _speed: Any) -> int:
        import pynvml

        return int(pynvml.NVML_ERROR_NOT_SUPPORTED)

    return {
        "nvmlDeviceGetEncoderUtilization": engine,
        "nvmlDeviceGetDecoderUtilization": engine,
        "nvmlDeviceGetPcieThroughput": throughput,
        "nvmlDeviceGetFanSpeed": no_fan,
        "nvmlSystemGetCudaDriverVersion": lambda version: write_number(version, _CUDA_VERSION),
    }


def main() -> int:
    """Installs the library and becomes the exporter."""
    sys.path[:1] = [str(ROOT / "agent"), str(ROOT / "protos"), str(ROOT)]
    fleet, interval, out = sys.argv[1:4]
    import pynvml

    from bench.library_meter import Meter
    from eelgrid_agent.simulation import nvml_library
    from eelgrid_agent.simulation.node import SimulatedNode
    from eelgrid_agent.simulation.spec import load_fleet

    (spec,) = load_fleet(fleet)
    nvml_library.install_library(SimulatedNode(spec, monotonic_ns=time.monotonic_ns, seed=1))
    vars(pynvml.nvmlLib).update(_unasked_by_us())
    if out != "-":
        pynvml.nvmlLib = Meter(Path(out)).over(pynvml.nvmlLib)
    from nvitop_exporter import cli

    exporter = cli.PrometheusExporter
    cli.PrometheusExporter = lambda *devices, **options: exporter(*devices, **options | {"interval": float(interval)})
    sys.argv[:4] = ["nvitop-exporter"]
    return int(cli.main() or 0)


if __name__ == "__main__":
    sys.exit(main())
