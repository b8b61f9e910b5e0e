"""How features meet: cross layers, dot products, factorization machines. Importers name the
file.

Imports: features, layers, losses, metrics and below. Imported by: models, sharding, checkpoint and
above.
"""
