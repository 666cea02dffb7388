"""Benchmarks: each module measures one target and prints the result with its spread.

`python -m bench --out DIR` runs those that have targets and need no trace; each
can be run alone as `python -m bench.NAME`. Times on a shared machine are noisy,
so results are medians of several runs with their spread, and ratios within one run.
"""
