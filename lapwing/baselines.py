"""Methods to compare with, behind the interface of every other method."""

from lapwing.methods.ivon import IVON
from lapwing.methods.members import Ensemble, MapOnly, MCDropout, MixtureOfLaplace
from lapwing.methods.swag import SWAG
from lapwing.methods.variational_last_layer import VariationalLastLayer

__all__ = ["MCDropout", "Ensemble", "IVON", "MapOnly", "MixtureOfLaplace", "SWAG", "VariationalLastLayer"]
