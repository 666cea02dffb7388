"""`python -m eelgrid_kernels` compiles every kernel into numba's cache, for images and before a first start."""

from eelgrid_kernels.warmup import warm_kernels

if __name__ == "__main__":
    print("compiled:", ", ".join(warm_kernels()))  # noqa: T201
