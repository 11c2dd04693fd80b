"""A model in use: text to ids and back, log-probabilities, completions, values."""
