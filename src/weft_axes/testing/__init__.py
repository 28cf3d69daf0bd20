"""A conformance kit for any sequence-parallel attention: is it exact, and if not, where?"""

from .cases import Case, RankCall, standard_cases
from .conformance import conformance
from .report import Finding, Report

__all__ = ["Case", "Finding", "RankCall", "Report", "conformance", "standard_cases"]
