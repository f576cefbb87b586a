"""The coordinator: batches, commits, checkpoints and recovery of a running query, on the driver."""
