"""The command line: commands, and tables and pictures for a terminal."""
