"""Mode `gate` measured against a control plane: `python -m bench.kubernetes --out DIR`.

control_plane.py   the control plane at hand: one that runs, or one that is started
rig.py             nodes, pods and what is bound, by way of the API alone
processes.py       controllers as processes: started, killed, read
burst.py           a burst of gated pods, and the same without gates
takeovers.py       leaders that end in a burst, by every signal, and others after them, with every journal
checker.py         what pods hold twice, from pods, nodes and bindings alone
trials.py          gangs and thieves, leaders that are killed, a restart of the API server
"""
