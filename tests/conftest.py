"""What every test leaves behind as it found it."""

import logging

import pytest


@pytest.fixture(autouse=True)
def _no_handler_is_left_behind():
    """A program's main, called in this process, logs to the standard error of its test, which is closed after it."""
    root = logging.getLogger()
    before, level = list(root.handlers), root.level
    yield
    for handler in list(root.handlers):
        if handler not in before and type(handler) is logging.StreamHandler:
            root.removeHandler(handler)
    root.setLevel(level)
