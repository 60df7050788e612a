"""Serving under load: an open-loop replay of a trace on an engine, from cells to records."""
