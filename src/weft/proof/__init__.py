"""Plans proven without tensors."""
