"""The command line, the experiment profiles and the runners that tie the packages together."""
