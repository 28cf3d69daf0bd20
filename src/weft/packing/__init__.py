"""Tokens assigned to ranks so that the work of a mask is equal, packed documents among them."""
