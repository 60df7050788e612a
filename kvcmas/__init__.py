"""KVCMAS and the engine it runs on: a library that needs no other package of this repository."""
