"""A dry run: will a model capture, what would break it, at which sizes, and how much memory would it take?"""

from piecewise_backend.dry_run.explain import explain
from piecewise_backend.dry_run.explanation import Explanation, Finding, GraphFacts, MemoryFacts, SizeFacts

__all__ = ["Explanation", "Finding", "GraphFacts", "MemoryFacts", "SizeFacts", "explain"]
