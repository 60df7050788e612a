"""Serving with vLLM: the same method objects on its paged cache, behind a KV connector."""
