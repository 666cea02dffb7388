"""The controller: hears of nodes and workloads, decides where work goes, and says why.

Owns the cluster's state, the planner, the journal and the operators' API.
events -> state -> snapshot -> planner -> plan is pure and synchronous: the same
events give the same state, and the same state and request give the same
decision. Must never touch a device, and never imports the agent.
"""
