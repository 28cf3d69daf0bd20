"""torch's CUDA host code on a GPU that computes nothing: see `gpu`, `ranks`, `replay`."""
