"""The engine: segments, workflows, rotary alignment, model adapters, executor and accounting."""
