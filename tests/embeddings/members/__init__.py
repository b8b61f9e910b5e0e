"""Second members, which prove that a seam is one: an addressing of two components and a store whose
slots differ.
"""
