"""Prepared log -> batches."""
