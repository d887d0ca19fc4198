"""Distillation runs: a teacher's checkpoint becomes a student of few evaluations."""
