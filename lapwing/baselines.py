"""Methods to compare with, behind the interface of every other method."""

from lapwing.methods.dropout import MCDropout
from lapwing.methods.ensemble import Ensemble
from lapwing.methods.map_only import MapOnly
from lapwing.methods.mixture_of_laplace import MixtureOfLaplace
from lapwing.methods.swag import SWAG

__all__ = ["MCDropout", "Ensemble", "MapOnly", "MixtureOfLaplace", "SWAG"]
