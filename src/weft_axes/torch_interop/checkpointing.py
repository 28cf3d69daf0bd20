"""Selective activation checkpointing that keeps attention outputs and received tensors."""

from __future__ import annotations

import functools
from typing import Any

from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

_NAMESPACE = "weft"


def keep_attention(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """A policy: outputs of weft's operators are kept, everything else is computed again.

    In the backward pass a checkpointed block then moves nothing that its forward pass moved, and
    computes no score twice. The cost is the attention output per block, and the resharded query,
    key and value where an all-to-all comes before attention.

    Args:
        ctx: torch's, not read.
        op: the operator to decide on.
        args: of the operator, not read.
        kwargs: of the operator, not read.

    >>> keep_attention(None, torch.ops.weft.attention.default).name
    'MUST_SAVE'
    >>> keep_attention(None, torch.ops.aten.mm.default).name
    'PREFER_RECOMPUTE'
    """
    ours = getattr(op, "namespace", "") == _NAMESPACE
    return CheckpointPolicy.MUST_SAVE if ours else CheckpointPolicy.PREFER_RECOMPUTE


#: For `torch.utils.checkpoint.checkpoint(..., use_reentrant=False, context_fn=keeping_attention)`.
keeping_attention = functools.partial(create_selective_checkpoint_contexts, keep_attention)
