"""Raw log -> prepared log."""
