"""What placement saves: the cluster's modelled watts against those that plain best fit would have come to.

`best_fit` keeps the other cluster, `waiting` what finds no room in it, `draw` the watts of work
on nodes, `account` follows events and tells the difference. docs/explanation/savings.md has the method.
"""
