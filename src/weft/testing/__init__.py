"""A conformance kit for any sequence-parallel attention: is it exact, and if not, where?"""

from .cases import Call, Case, standard_cases
from .conformance import conformance
from .report import Finding, Report

__all__ = ["Call", "Case", "Finding", "Report", "conformance", "standard_cases"]
