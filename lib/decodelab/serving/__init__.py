"""Serving many requests: the scheduler, the engine and the simulator that share it, and a load client for real servers."""
