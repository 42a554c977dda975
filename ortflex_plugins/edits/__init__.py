"""Edits: changes of a model before its training, which stay in the export."""
