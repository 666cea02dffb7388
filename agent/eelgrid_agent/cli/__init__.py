"""Command line of the agent.

Subcommands that query a running agent or change MIG layouts, and their terminal output.
"""

import os
import shutil
import sys

from eelgrid_protos.safe_text import escape_text_line

_COLUMNS_LEAST = 40


def write_output(text: str) -> None:
    """All of it now, so that a reader who has gone is met here and not at the end of the program.

    Names of other people's processes can do nothing to the terminal.
    """
    sys.stdout.write(escape_text_line(text))
    sys.stdout.flush()


def terminal_width() -> int | None:
    """Columns of the terminal; into a file or a pipe there is no end of the line."""
    return max(_COLUMNS_LEAST, shutil.get_terminal_size().columns) if sys.stdout.isatty() else None


def close_output() -> None:
    """What could not be written is not tried again at the end of the program."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
