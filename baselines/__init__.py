"""The methods KVCMAS is compared with: one file each, all behind the engine's contract."""
