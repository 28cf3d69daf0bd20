"""weft in torch's own tools: attention regions, module styles, activation checkpointing."""
