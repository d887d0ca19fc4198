"""Whole runs: the only place that assembles parts."""
