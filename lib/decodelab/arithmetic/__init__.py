"""Units, catalogue, cost model and records. No torch here: this room also runs in a browser."""
