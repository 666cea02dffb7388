"""MIG layouts on the node: what is found, what is wanted, and the way from one to the other.

Pure and below: layout and steps, then partitioner, placing and counts, then
transition. Above them journal and ledger (what outlives a crash), runner (one
device brought to one layout), executor (layouts kept over time), and machine
(whether a reset can be had). The command and the site's files stand beside the
executor. Must not know NVML's calls nor why a layout is wanted.
"""
