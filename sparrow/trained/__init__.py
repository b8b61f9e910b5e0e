"""A run's directory -> the model that it trained, and its scores. Training and serving both stand
on it.

Imports: models, sharding, checkpoint and below. Imported by: training, serving and above.
"""
