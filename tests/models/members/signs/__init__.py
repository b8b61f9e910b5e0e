"""A model that learns a second thing, and is judged by it."""

from sparrow.core.extensions import Extension

EXTENSION = Extension(members={"sparrow.models": {"signs": "model"}})
