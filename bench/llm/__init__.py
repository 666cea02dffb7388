"""E3: energy against latency of LLM serving, and the grid that the queueing model is checked on."""
