"""Baselines with the interface of every other method: the plain network, deep ensembles, MC dropout and SWAG."""

from lapwing.methods.dropout import MCDropout
from lapwing.methods.ensemble import Ensemble
from lapwing.methods.map_only import MapOnly
from lapwing.methods.swag import SWAG

__all__ = ["MCDropout", "Ensemble", "MapOnly", "SWAG"]
