"""Activations as features: read them, choose them, store them, put them to work."""

from stillhouse.recipes.features.direct import Features

__all__ = ["Features"]
