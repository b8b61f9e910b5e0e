"""Second members of the family of models, which prove that a seam is one. Each is an extension's."""
