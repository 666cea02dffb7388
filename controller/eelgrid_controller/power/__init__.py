"""Power limits: which limit each job gets, within its promised slowdown and every budget.

Owns the exploration of unknown curves and the division of budgets. Must not know
agents, drivers or the wire.
"""
