"""Networks and codecs: diffusers' classes, called the way the rest of the library calls them."""

from stillhouse.models.codecs import Codec
from stillhouse.models.networks import NETWORKS, DiffusersNetwork

__all__ = ["NETWORKS", "Codec", "DiffusersNetwork"]
