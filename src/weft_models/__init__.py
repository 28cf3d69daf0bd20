"""Models on layouts: the composer, model files, tables, pair stacks, routing, training."""
