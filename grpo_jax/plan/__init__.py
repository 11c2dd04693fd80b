"""What a run would need of a TPU slice that is not there."""
