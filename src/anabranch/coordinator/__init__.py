"""The driver's side of a running query: batches, commits, checkpoints, recovery."""
