"""Benchmarks: each module measures one promise and prints what it found with its spread.

`python -m bench --out DIR` runs those that need no trace of their own; each
can be run alone as `python -m bench.NAME`. Times on a shared machine are
noisy: medians of several runs, with the spread, and ratios within one run.
"""
