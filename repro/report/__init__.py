"""One self-contained HTML page from records: claims, tables, figures, provenance, limits."""
