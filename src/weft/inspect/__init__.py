"""What a layout does and did: the exactness check, traffic, tables, timelines, pictures."""
