"""Serving by cost emulation: what the public harness charges for each method, on a real engine."""
