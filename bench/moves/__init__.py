"""Gain of a churn budget on a production trace: python -m bench.moves."""
