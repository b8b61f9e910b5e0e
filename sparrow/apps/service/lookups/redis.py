"""Redis or Valkey: a value for each user, which is a JSON object of raw columns."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import redis
import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from sparrow.apps.service.lookups import Row
from sparrow.apps.service.request import Value
from sparrow.core.errors import UserError, suggest
from sparrow.core.progress import Progress
from sparrow.features.ids import as_ids

_BLOCK = 1_000  # users that are written at a time
_OF_JSON = re.compile(  # types of Arrow in words
    r"((large_)?list<\w+:"
    r" |dictionary<values=)?(null|bool|u?int\d+|halffloat|float|double|(large_)?string)\b[^<]*"
)
_decode = msgspec.json.Decoder(dict[str, Value]).decode
_encode = msgspec.json.Encoder().encode


def name_of(key: str, value: object) -> str:
    """Returns where the columns of a user are stored. key: the column by which she is known. value:
    what it has.
    """
    return f"sparrow:{key}:{value}"


class Redis:
    """Columns of users in Redis or Valkey.

    Args:
        url: redis://, rediss:// or unix://.
        key: the column by which users are known.

    Raises:
        UserError: for another URL.
    """

    def __init__(self, url: str, key: str) -> None:
        self._key = key
        try:  # a connection that was closed while nobody used it is opened again, once
            self._client = redis.asyncio.Redis.from_url(
                url, protocol=2, retry=Retry(NoBackoff(), 1)
            )
        except ValueError as error:
            raise UserError(
                f"{_without_password(url)}: {error}; give redis://HOST:PORT or unix:///PATH"
            ) from None

    async def get(self, keys: Sequence[object]) -> list[Row | UserError | None]:
        """Returns the columns of each key, as `Lookup.get`. It takes one round trip."""
        try:
            values = await self._client.mget([name_of(self._key, key) for key in keys])
        except RedisError as error:
            raise OSError(f"{type(error).__name__}: {error}") from error
        return [None if value is None else _row(value) for value in values]

    async def close(self) -> None:
        """Close its connections."""
        await self._client.aclose()


def _row(value: bytes | str) -> Row | UserError:
    try:
        return _decode(value)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        return UserError(f"a stored value: {error}; push it again")


def push(
    path: Path, url: str, key: str, ttl_s: int | None = None, progress: Progress | None = None
) -> int:
    """Write the rows of a Parquet file, each under its key. Returns how many.

    Args:
        path: the file. Of two rows with one key the later one stays.
        url: see `Redis`.
        key: the column of the keys.
        ttl_s: seconds after which what is written goes; None to keep it.
        progress: shows how far it is.

    Raises:
        UserError: for a file that cannot be read, a missing key, a column that JSON cannot say, and
            a server that cannot be reached or refuses.
    """
    try:
        file = pq.ParquetFile(path)
        _check(path, file.schema_arrow, key)
        keys = as_ids(file.read([key])[key].combine_chunks(), key, int)
        if keys.null_count:
            row = keys.is_null().index(True).as_py()
            raise UserError(f"{path}: {key!r} of row {row} is missing; give each row a key")
        written = 0
        total = file.metadata.num_rows
        with redis.Redis.from_url(url, protocol=2) as client:
            for batch in file.iter_batches(_BLOCK):
                pipe = client.pipeline(transaction=False)
                for row in batch.to_pylist():
                    pipe.set(name_of(key, keys[written].as_py()), _encode(row), ex=ttl_s)
                    written += 1
                pipe.execute()
                if progress is not None:
                    progress("users written", written, total)
        return written
    except UserError:
        raise
    except RedisError as error:
        raise UserError(
            f"{_without_password(url)}: {error}; check that a server is there and takes writes"
        ) from None
    except (OSError, ValueError, pa.ArrowException) as error:
        raise UserError(
            f"{path} to {_without_password(url)}: {error}; give a Parquet file and"
            " redis://HOST:PORT"
        ) from None


def _check(path: Path, schema: pa.Schema, key: str) -> None:
    """Refuse a file without the key, and columns that are no numbers, texts or lists of these."""
    if key not in schema.names:
        raise UserError(f"{path}: no column {key!r}{suggest(key, schema.names)}")
    for field in schema:
        if not _OF_JSON.fullmatch(str(field.type)):
            raise UserError(
                f"{path}: column {field.name!r} is {field.type}; make it numbers, text or lists of"
                " them"
            )


def _without_password(url: str) -> str:
    """Returns a URL without its password."""
    scheme, _, rest = url.partition("://")
    return f"{scheme}://{rest.rpartition('@')[2]}"
