"""Errors whose message is meant for the person at the terminal."""


class UserError(Exception):
    """Bad input. The message is one line that says what is wrong and what would be right.

    The command line prints it and exits with code 2; a library caller may catch it.
    """
