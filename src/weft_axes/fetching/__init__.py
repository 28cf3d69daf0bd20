"""Keys that somebody chose, brought from their owners: the rule `R(top_k)`."""
