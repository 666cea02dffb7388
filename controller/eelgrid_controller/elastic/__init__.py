"""Jobs that can run on more or fewer workers: how many each should have.

Pure: no clock, no I/O. docs/explanation/elastic.md has the mathematics.
"""
