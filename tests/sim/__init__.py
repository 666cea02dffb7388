"""The simulation: controller and agents as they are, on simulated machines and a simulated network, from one seed.

One thread, no event loop, no sleep, no real clock. Messages cross the network
as bytes of the real codec. What is real: the agent's node, sampler, spool,
guard, engine and simulated devices; the controller's core, state, telemetry,
presence, recovery and (in some seeds) its journal. What is transcribed, since
it is asynchronous: the agent's uplink and wheel (agent.py), the controller's
loop (life.py) and its sessions (sessions.py); these follow the originals line
by line in what they decide, and a difference is a fault of this folder.

    python -m tests.sim --seeds 0:100 --steps 2000 [--pair] [--ingest 2]

With --pair, two controllers lead in turns over one store (store.py, pair.py);
that store and its followers are transcribed, since they speak SQL. With --ingest,
agents are behind ingest processes (ingest.py); with both, see pair_ingest.py.

Where to read first: world.py, then invariants.py; pair_world.py.
"""
