"""Gradients of parameters: summed over ranks, clipped, averaged by DDP and FSDP2."""
