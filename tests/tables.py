"""Tables that a program wrote, as tests read them."""

import csv


def read_csv(path):
    """The rows of a CSV file, by their columns."""
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def strip_table(text):
    """A printed table without blanks at the ends of its lines."""
    return "\n".join(line.rstrip() for line in text.strip("\n").splitlines()) + "\n"
