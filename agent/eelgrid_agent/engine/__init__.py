"""The local engine: processes of workloads on this machine, each under a launcher of its own that outlives the agent.

`port` names what an engine does; `local` starts, stops and adopts launchers; `launcher` is the program that runs one
process and everything that it starts; `output` reads what the processes wrote.
"""
