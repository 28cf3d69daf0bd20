"""Plans and traces as tables for a terminal."""
