"""Clocks, this machine's card, and the sweeps the labs run."""
