"""What a run will need, counted before it is paid for."""
