"""What every test leaves behind as it found it."""

import gc
import logging
import os
import signal
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings

from eelgrid_protos.log_lines import LineHandler

# An example may take as long as it takes: the machine has other work. The examples are the same each time, so that a
# commit that passed passes again; `make test-random` looks at others.
settings.register_profile("eelgrid", deadline=None, derandomize=True)
settings.register_profile("random", deadline=None)
settings.load_profile("eelgrid")

# Whoever runs the tests in the background may have handed down an ignored SIGINT, which every program that a test starts
# would keep.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# Folders whose files take long, most of them waiting for processes of their own.
_LONG = {"e2e", "sim"}
# So many other files come after each such file: enough that one process computes while the others wait.
_BETWEEN = 4


def pytest_collection_modifyitems(items):
    """Files that take long are mixed into the first half: one that begins last leaves the other cores idle."""
    files = {}
    for item in items:
        files.setdefault(item.path, []).append(item)
    long = [path for path in files if _LONG.intersection(path.parts)]
    short = [path for path in files if path not in set(long)]
    order = []
    for place, path in enumerate(long):
        order += [path, *short[place * _BETWEEN : (place + 1) * _BETWEEN]]
    order += short[len(long) * _BETWEEN :]
    items[:] = [item for path in order for item in files[path]]


def pytest_collection_finish():
    """What was collected stays to the end: the garbage collector need not look at twelve thousand tests again and again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _no_handler_is_left_behind():
    """A program's main, called in this process, logs to the standard error of its test, which is closed after it."""
    loggers = [logging.getLogger(name) for name in (None, "eelgrid", "eelgrid_agent")]
    before = [(logger, list(logger.handlers), logger.level, logger.propagate) for logger in loggers]
    yield
    for logger, handlers, level, propagate in before:
        for handler in list(logger.handlers):
            if handler not in handlers and type(handler) in {logging.StreamHandler, LineHandler}:
                logger.removeHandler(handler)
        logger.setLevel(level)
        logger.propagate = propagate


@pytest.fixture(autouse=True)
def _no_mask_is_left_behind():
    """The controller's main, called in this process, keeps what it writes from other users."""
    mask = os.umask(0o022)
    os.umask(mask)
    yield
    os.umask(mask)


@pytest.fixture
def short_path():
    """A folder for sockets, whose paths the kernel bounds: pytest's own folders may be long already."""
    with tempfile.TemporaryDirectory(prefix="eelgrid-") as folder:
        yield Path(folder)


@pytest.fixture
def fake():
    """What eelctl talks to; a module that wants another has a fixture of this name."""
    from tests.fakes.operators import FakeOperators  # gRPC, which most tests do without

    return FakeOperators()


@pytest.fixture
def eelctl(fake):
    """Runs eelctl against the fake."""
    from tests.fakes.terminal import terminal

    with terminal(fake) as run:
        yield run
