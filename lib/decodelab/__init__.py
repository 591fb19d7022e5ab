"""Decodelab: predict what one more token costs, then measure it on this machine, with one formula behind both."""

__version__ = "0.1.0"
