"""Raw logs: CSV and its kin, Parquet and tables in memory, as record batches; a schema inferred; a log that is made."""
