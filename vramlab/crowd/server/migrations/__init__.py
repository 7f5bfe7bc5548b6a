"""The schema, step by step. A step that has been released is never changed."""
