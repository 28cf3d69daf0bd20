"""The same bits on every layout: exact sums, and modules that use them."""
