"""weft inside other code: F.scaled_dot_product_attention, transformers, torch's own tools."""
