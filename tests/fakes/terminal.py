"""eelctl in this process, against operators' calls that a fake answers."""

import contextlib
from collections.abc import Iterator
from typing import Any

from click.testing import CliRunner, Result

from eelgrid_controller.cli.__main__ import cli
from tests.fakes.operators import FakeOperators, serving

__all__ = ["Terminal", "terminal"]


class Terminal:
    """Runs eelctl as a user would; the result's stdout and stderr are apart."""

    def __init__(self, address: str) -> None:
        self.address = address

    def run(self, *arguments: object, **extra: Any) -> Result:
        """Whatever comes of it; what eelctl does not catch is raised."""
        result = CliRunner().invoke(
            cli, ["--controller", self.address, *map(str, arguments)], prog_name="eelctl", **extra
        )
        if result.exception and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result

    def __call__(self, *arguments: object, code: int = 0, **extra: Any) -> Result:
        """The same, where it ends with a code that is expected."""
        result = self.run(*arguments, **extra)
        assert result.exit_code == code, result.output
        return result


@contextlib.contextmanager
def terminal(fake: FakeOperators) -> Iterator[Terminal]:
    """An eelctl that talks to the fake."""
    with serving(fake) as address:
        yield Terminal(address)
