"""Controlled serving traces: schema, generator, arrival laws, replay."""
