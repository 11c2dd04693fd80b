"""Attention by the kernels of accelerators."""
