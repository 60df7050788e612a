"""Single streams: what one workflow after another costs in time and memory, by method and shape."""
