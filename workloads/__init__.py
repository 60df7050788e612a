"""Benchmarks: data, agents and prompts, scoring."""
