"""Metrics: detectors, summable statistics, and distances between sets of features."""
