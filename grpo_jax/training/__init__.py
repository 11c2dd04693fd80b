"""An iteration and its stages: batches, the update, the loop around them, evaluation."""
