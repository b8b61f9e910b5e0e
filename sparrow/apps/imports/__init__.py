"""Models that other libraries trained -> runs of ours. File `x.py` reads what x saved."""
