"""Figures, one module per family, drawn from run records only."""
