"""What each command of the CLI does."""
