"""A run on disk and on the terminal."""
