"""Raw columns -> ids and numbers -> a batch: the schema and the transforms, which preparing a log and serving share."""
