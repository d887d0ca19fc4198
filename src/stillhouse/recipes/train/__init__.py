"""Training runs: what is trained, on what, and how it is told."""
