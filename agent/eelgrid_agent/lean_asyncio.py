"""asyncio as on a Python built without OpenSSL, for a process that must stay small: imported before anything else of it.

asyncio imports `ssl` for TLS of its own streams, and does without where that cannot be imported. The agent has no such
stream: gRPC brings its own TLS, and the metrics endpoint wraps plain sockets. OpenSSL and what Python makes of it are
5 MB. So `ssl` cannot be imported while asyncio is, and can be before and after: whoever uses it loads it then. A stream
of asyncio with TLS raises RuntimeError in such a process. Where `ssl` is loaded already, nothing is different.
"""

import importlib
import sys

if "asyncio" not in sys.modules and "ssl" not in sys.modules:
    # The import system raises ModuleNotFoundError for a name with this entry.
    sys.modules["ssl"] = None  # type: ignore[assignment]
    try:
        importlib.import_module("asyncio")
    finally:
        del sys.modules["ssl"]
