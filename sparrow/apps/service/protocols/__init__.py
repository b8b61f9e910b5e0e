"""How requests and answers are written. One file for each protocol."""
