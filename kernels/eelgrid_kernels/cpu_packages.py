"""CPU packages: power of a node's cores, and the cores free before another package wakes.

Owns the arithmetic of cores and packages and the numbers of the power model. Must
not know tasks or states. A core is two vCPU, a package 16 cores; a package with
any working core draws 120 W, else 15 W. Source: Lettich et al., CCGrid 2025
(arXiv 2412.17484), section on the power model.
"""

from eelgrid_kernels.compilation import inlined_kernel

WHOLE = 1000  # milli-GPU
MILLI_PER_CORE, CORES_PER_PACKAGE = 2000, 16
CPU_PACKAGE_IDLE_W, CPU_PACKAGE_FULL_W = 15.0, 120.0
PACKAGE_W = CPU_PACKAGE_FULL_W - CPU_PACKAGE_IDLE_W  # that waking one adds
PACKAGE_MILLI = MILLI_PER_CORE * CORES_PER_PACKAGE
FEED = 10  # a GPU is fed by 10 vCPU: milli-CPU per milli-GPU


@inlined_kernel
def active_packages(cpu_capacity: int, cpu_free: int) -> int:
    """CPU packages with at least one working core; milli-CPU in."""
    cores = (cpu_capacity + MILLI_PER_CORE - 1) // MILLI_PER_CORE
    working = cores - cpu_free // MILLI_PER_CORE
    return (working + CORES_PER_PACKAGE - 1) // CORES_PER_PACKAGE


@inlined_kernel
def package_slack(cpu_capacity: int, cpu_free: int) -> int:
    """Free milli-CPU that can be taken before another package wakes."""
    cores = (cpu_capacity + MILLI_PER_CORE - 1) // MILLI_PER_CORE
    asleep = max(0, cores - CORES_PER_PACKAGE * active_packages(cpu_capacity, cpu_free))
    return cpu_free - MILLI_PER_CORE * asleep
