"""What the live page is told: the state and the telemetry of one moment as small columns, and what changed since.

Owns the shapes of snapshots, deltas and answers, and the page's own files (files/). Must not
know HTTP, viewers, clocks (times are arguments) or how decisions are made.
"""
