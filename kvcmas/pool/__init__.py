"""Anchor pools: low-rank factors of earlier requests, how they are found, kept and evicted."""
