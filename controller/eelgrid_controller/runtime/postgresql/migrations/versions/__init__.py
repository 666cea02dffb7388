"""One module for each version of the schema; a published one is never changed."""
