"""Answers requests with a trained model."""
