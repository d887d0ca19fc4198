"""The training loop and its parts: processes, sharding, updates, averages, checkpoints."""
