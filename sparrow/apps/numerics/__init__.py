"""Which products of a trained model may be computed in fewer bits, and which of them are faster
here.
"""
