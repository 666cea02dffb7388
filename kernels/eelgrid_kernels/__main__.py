"""`python -m eelgrid_kernels` compiles every kernel into numba's cache, for images and before a first start."""

import gc
import os
import sys

# What it has for types that do not fit is made for each that is tried, and thrown away: without colours that takes half
# the time where colorama is installed. numba reads this when it is imported.
os.environ.setdefault("NUMBA_DISABLE_ERROR_MESSAGE_HIGHLIGHTING", "1")
# Where scipy is installed, numba looks for linear algebra in it, which no kernel uses: a fifth of a second.
sys.modules.setdefault("scipy", None)  # type: ignore[arg-type]

from eelgrid_kernels.warmup import COMPILED_DECIDING, warm_kernels  # noqa: E402 (numba reads both when it is imported)

# Of what a compiler makes, most is for good or gone at once: looking for circles after every 700 objects is a tenth of
# the time. Measured: without any looking 0.4 GB more are held, with this 0.08.
_OBJECTS_BETWEEN_COLLECTIONS = 50_000


def collect_seldom() -> None:
    """Has this process look for circles as seldom as suits a compiler."""
    gc.freeze()
    gc.set_threshold(_OBJECTS_BETWEEN_COLLECTIONS, 50, 50)


if __name__ == "__main__":
    collect_seldom()
    names = warm_kernels(
        lambda done, total: print(f"compiling kernels, once: {done}/{total}", flush=True),  # noqa: T201
        lambda: print(COMPILED_DECIDING, flush=True),  # noqa: T201
    )
    print("compiled:", ", ".join(names))  # noqa: T201
