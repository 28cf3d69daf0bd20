"""Tables and pictures of layouts, plans and runs."""
