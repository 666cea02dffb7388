"""Memory of a process that has loaded what it will run.

Knows no device and no message, since the agent and its driver process call it.
"""

import ctypes
import gc


def settle_memory() -> None:
    """Exempts what is loaded from garbage collection and returns freed pages to the system.

    What stands now stands until the process ends, so the collector need not walk it. Imports leave free pages behind
    that glibc keeps (0.8 MB of an agent); a C library without malloc_trim keeps them.
    """
    gc.collect()
    gc.freeze()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
