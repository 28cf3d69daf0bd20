"""Losses over all ranks' tokens without full logits: cross-entropy, log-probabilities."""

from .labels import num_items, shift_labels
from .tokens import cross_entropy, log_probs, sequence_sums

__all__ = ["cross_entropy", "log_probs", "num_items", "sequence_sums", "shift_labels"]
