"""Suspended jobs: right-sizing before they start, and what preempting a Kueue Workload costs. Pure decisions."""
