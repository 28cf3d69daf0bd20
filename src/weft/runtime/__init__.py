"""A plan applied to tensors: custom ops, the executor, resharding, merging, profiler marks."""
