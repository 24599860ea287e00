"""Micro-batches through stages."""
