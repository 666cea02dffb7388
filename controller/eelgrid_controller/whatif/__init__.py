"""What if: changes, other policies and past decisions, tried on a copy of the cluster by the code that runs it.

`scenarios` applies imagined changes and plans capacity, `shadow_policy` follows the live cluster with a second
policy, `decision_record` saves and replays one decision, `comparison` sets two clusters side by side.
"""
