"""KVCMAS itself, one of eight peers behind the engine's contract."""
