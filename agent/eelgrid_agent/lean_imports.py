"""asyncio and http.server as on a Python built without OpenSSL, for a process that must stay small.

Both import `ssl` (the second through http.client) for TLS of their own, and do without where it cannot be imported. The
agent uses neither: gRPC brings its own TLS, and the metrics endpoint wraps plain sockets. OpenSSL and what Python makes
of it are 5 MB. So `ssl` cannot be imported while they are, and can be before and after: whoever uses it loads it then.

Imported before anything else of the process. What does not exist in it: TLS of asyncio's streams, which raises
RuntimeError, and http.client.HTTPSConnection (so https of urllib.request), until `importlib.reload(http.client)`, as the
client of Kubernetes does. Where one of the modules or `ssl` is loaded already, nothing is different.
"""

import importlib
import sys

_MODULES = ("asyncio", "http.server")

if sys.modules.keys().isdisjoint({"ssl", "http.client", *_MODULES}):
    # The import system raises ModuleNotFoundError for a name with this entry.
    sys.modules["ssl"] = None  # type: ignore[assignment]
    try:
        for name in _MODULES:
            importlib.import_module(name)
    finally:
        del sys.modules["ssl"]
