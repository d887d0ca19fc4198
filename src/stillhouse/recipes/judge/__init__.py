"""Judging of samples: evaluations with their settings, features and verdicts."""
