"""A cluster on one machine: hosts as network namespaces, joined by links of chosen rates."""

from .bed import Bed, Host, missing
from .quota import missing_quota

__all__ = ["Bed", "Host", "missing", "missing_quota"]
