"""A load for one GPU: fused multiply-adds on every multiprocessor, for a given time.

It needs the driver's libcuda and no toolkit: the kernel is PTX, which the
driver compiles. It changes no setting of the device.
"""

import ctypes
import sys
import time

import click

from bench.runner import Options, benchmark

__all__ = ["PTX", "main"]

_THREADS = 256
_BLOCKS_PER_MULTIPROCESSOR = 8
_MULTIPROCESSORS = 16  # CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT
# Some 5 ms on any recent part, so that the end comes soon after it is due.
_ROUNDS = 40_000
# 32 independent chains hide the latency of each other; the store is never made, and keeps them from being left out.
_CHAINS = 32
PTX = (
    "\n".join(
        (
            ".version 6.0",
            ".target sm_60",
            ".address_size 64",
            ".visible .entry burn(.param .u64 out, .param .u32 rounds)",
            "{",
            f".reg .f32 %f<{_CHAINS + 2}>;",
            ".reg .b32 %r<4>;",
            ".reg .b64 %rd<2>;",
            ".reg .pred %p<3>;",
            "ld.param.u64 %rd1, [out];",
            "ld.param.u32 %r1, [rounds];",
            "mov.u32 %r2, %tid.x;",
            "cvt.rn.f32.u32 %f1, %r2;",
            *(f"add.f32 %f{chain + 1}, %f1, 0f3F800000;" for chain in range(1, _CHAINS)),
            "mov.u32 %r3, 0;",
            "turn:",
            *(f"fma.rn.f32 %f{chain}, %f{chain}, 0f3F7FFFFE, 0f3A83126F;" for chain in range(1, _CHAINS + 1)),
            "add.u32 %r3, %r3, 1;",
            "setp.lt.u32 %p1, %r3, %r1;",
            "@%p1 bra turn;",
            *(f"add.f32 %f1, %f1, %f{chain};" for chain in range(2, _CHAINS + 1)),
            "setp.lt.f32 %p2, %f1, 0fFF7FFFFF;",
            "@%p2 st.global.f32 [%rd1], %f1;",
            "ret;",
            "}",
        )
    )
    + "\n"
)


class _Failed(Exception):
    """A call of the driver failed."""


class _Driver:
    """The driver's calls that are needed, checked."""

    def __init__(self) -> None:
        try:
            self._library = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise _Failed(f"{error}; install the NVIDIA driver") from None

    def call(self, name: str, *arguments: object) -> None:
        """Calls it; raises _Failed."""
        status = getattr(self._library, name)(*arguments)
        if status:
            raise _Failed(f"{name} failed with CUDA error {status}; see that the GPU is free and not in MIG mode")


def _burn(seconds: float, index: int) -> int:
    """Launches until the time is over; returns how often."""
    cuda = _Driver()
    device, context, module, function = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
    count = ctypes.c_int()
    cuda.call("cuInit", ctypes.c_uint(0))
    cuda.call("cuDeviceGet", ctypes.byref(device), ctypes.c_int(index))
    cuda.call("cuDeviceGetAttribute", ctypes.byref(count), ctypes.c_int(_MULTIPROCESSORS), device)
    cuda.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    cuda.call("cuCtxSetCurrent", context)
    cuda.call("cuModuleLoadData", ctypes.byref(module), ctypes.c_char_p(PTX.encode()))
    cuda.call("cuModuleGetFunction", ctypes.byref(function), module, ctypes.c_char_p(b"burn"))
    out, rounds = ctypes.c_uint64(0), ctypes.c_uint32(_ROUNDS)
    parameters = (ctypes.c_void_p * 2)(ctypes.addressof(out), ctypes.addressof(rounds))
    sizes = (*map(ctypes.c_uint, (_BLOCKS_PER_MULTIPROCESSOR * count.value, 1, 1, _THREADS, 1, 1, 0)), None)
    launches, until = 0, time.monotonic() + seconds
    try:
        while time.monotonic() < until:
            cuda.call("cuLaunchKernel", function, *sizes, parameters, None)
            cuda.call("cuCtxSynchronize")
            launches += 1
    finally:
        cuda.call("cuDevicePrimaryCtxRelease_v2", device)
    return launches


@benchmark(out=None)
@click.option("--seconds", default=30.0)
@click.option("--gpu", default=0, help="CUDA index of the GPU")
def main(options: Options) -> int:
    """Loads the GPU, and says how often the kernel ran."""
    try:
        launches = _burn(options.seconds, options.gpu)
    except _Failed as error:
        sys.stderr.write(f"cuda_load: {error}\n")
        return 1
    print(f"{launches} launches in {options.seconds:g} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
