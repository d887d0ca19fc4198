"""Activations as features: read them, choose them, store them, put them to work."""
