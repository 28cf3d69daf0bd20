"""Learned top-k routing: the router, the blocks it fetches, the module, its report."""
