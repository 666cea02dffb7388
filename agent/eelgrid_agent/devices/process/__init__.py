"""The driver in a child process under a watchdog, so that a hung driver cannot hang the agent.

Nothing is imported here, because the child imports this package and must stay small.
"""
