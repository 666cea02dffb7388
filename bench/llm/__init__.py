"""E3: energy against latency of LLM serving, and the grid on which the queueing model is checked."""
