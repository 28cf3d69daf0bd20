"""Compares a parallelized transformers model with itself on one device, before it is used."""
