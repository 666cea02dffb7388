"""What a churn budget gains on a production trace: python -m bench.moves."""
