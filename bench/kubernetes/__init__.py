"""Measures mode `gate` with a control plane: `python -m bench.kubernetes --out DIR`.

control_plane.py   the available control plane: one that runs, or one that is started
rig.py             nodes, pods and bindings, through the API only
processes.py       controllers as processes: started, killed, read
burst.py           a burst of gated pods, and the same without gates
takeovers.py       leaders that end during a burst, by every signal, and their successors, with every kind of journal
checker.py         devices held twice, from pods, nodes and bindings only
trials.py          gangs whose capacity is taken, leaders that are killed, a restart of the API server
"""
