"""A scorer as people write one: FastAPI, and a body of JSON. Started by `serve_peers.py` with
uvicorn.
"""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from features import made
from pydantic import BaseModel

app, rank = FastAPI(), made()


class Asked(BaseModel):
    """A user's columns, and those of her candidates."""

    user: dict[str, Any]
    candidates: dict[str, list[Any]]


@app.post("/rank")
def scored(asked: Asked) -> dict[str, Any]:
    """Returns the scores in the candidates' order."""
    return {"scores": rank(asked.user, asked.candidates).tolist()}


@app.get("/ready")
def ready() -> dict[str, Any]:
    """Say that it answers."""
    return {}
