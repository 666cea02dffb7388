"""`python -m eelgrid_kernels` compiles every kernel into numba's cache, for images and before a first start."""

from eelgrid_kernels.warmup import COMPILED_DECIDING, warm_kernels

if __name__ == "__main__":
    names = warm_kernels(
        lambda done, total: print(f"compiling kernels, once: {done}/{total}", flush=True),  # noqa: T201
        lambda: print(COMPILED_DECIDING, flush=True),  # noqa: T201
    )
    print("compiled:", ", ".join(names))  # noqa: T201
