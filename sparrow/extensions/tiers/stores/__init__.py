"""Stores of which some rows have frames: on an SSD, in the memory of a host, and exact rows over
those in few bits.
"""
